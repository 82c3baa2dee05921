"""Views that a draft step fills."""

import torch

from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.runner.request_table import RequestTable


def views_of(table: RequestTable, rows: torch.Tensor, width: int) -> ForwardBatch:
    num_reqs, device = len(rows), rows.device
    num_tokens = num_reqs * width

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), -9, dtype=dtype, device=device)

    return ForwardBatch(
        mode=ForwardMode.VERIFY, input_ids=empty(num_tokens, torch.int32), positions=empty(num_tokens, torch.int64),
        slot_mapping=empty(num_tokens, torch.int64), request_rows=rows, seq_lens=empty(num_reqs, torch.int32),
        query_start_loc=empty(num_reqs + 1, torch.int32), page_table=table.page_table,
        logits_indices=empty(num_reqs, torch.int64), kv_layers=(), attention=TorchAttention(), attention_metadata=None,
        num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=width, max_seq_len=24,
    )  # fmt: skip
