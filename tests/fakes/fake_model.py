"""A model small enough to reason about, whose output depends on every page it may read.

One layer of paged attention between an embedding and a head; a stale row, a wrong slot or a missing length changes the
logits.
"""

import torch

from graphrunner.attention.backend import AttentionSpec
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.device.graph import eager_break
from graphrunner.sampling.rejection import accept_greedy

VOCAB_SIZE = 61
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM
MAX_POSITION = 512


class FakeModel:
    """Args: where it runs. Weights are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        angle = torch.arange(MAX_POSITION)[:, None] * torch.logspace(0, -3, HEAD_DIM // 2)
        self.spec = AttentionSpec(
            NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5,
            rope_cos=angle.cos().to(device), rope_sin=angle.sin().to(device),
        )  # fmt: skip
        self.embedding = weight(VOCAB_SIZE, HIDDEN_SIZE)
        self.qkv = weight((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN_SIZE) / HIDDEN_SIZE**0.5
        self.out = weight(HIDDEN_SIZE, HIDDEN_SIZE)
        self.head = weight(VOCAB_SIZE, HIDDEN_SIZE)
        self.num_forwards = 0
        self.fails_at: int | None = None

    def body(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of every token."""
        self.num_forwards += 1
        hidden = self.embedding[batch.input_ids.long()]
        qkv = hidden @ self.qkv.T
        attended = eager_break(self._attend, batch, qkv)
        return hidden + attended @ self.out.T

    def _attend(self, batch: ForwardBatch, qkv: torch.Tensor) -> torch.Tensor:
        return batch.attention.forward(self.spec, qkv, batch.kv_layers[0], batch)

    def forward(self, batch: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """What runners are given."""
        if self.fails_at is not None and batch.num_tokens == self.fails_at:
            raise ValueError("this shape is cursed")
        hidden = self.body(batch)
        if variant is ForwardVariant.HIDDEN:
            return ModelOutput(hidden_states=hidden)
        logits = self.tail(hidden[batch.logits_indices]).logits
        assert logits is not None
        if variant is ForwardVariant.LOGITS:
            return ModelOutput(logits=logits)
        if variant is ForwardVariant.SAMPLE:
            # "Noise" that is a pure function of the position, so that it is the same in every batch.
            repeats = logits.shape[0] // batch.seq_lens.shape[0]
            logits = logits + (batch.seq_lens % 5).repeat_interleave(repeats).unsqueeze(1) * logits.roll(1, 1)
        token_ids = logits.argmax(-1).to(torch.int32)
        if batch.draft_tokens is not None:
            kept = accept_greedy(batch.draft_tokens, token_ids.view(batch.num_reqs, -1))
            return ModelOutput(token_ids=kept.token_ids, num_new=kept.num_accepted + 1)
        return ModelOutput(token_ids=token_ids)

    def tail(self, hidden_rows: torch.Tensor) -> ModelOutput:
        """Logits of hidden rows."""
        return ModelOutput(logits=hidden_rows @ self.head.T)
