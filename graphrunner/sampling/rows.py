"""Sampling parameters that stay on the device between steps, one row of the request table each."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from graphrunner.core.scheduled_batch import RowInit
from graphrunner.device.transfer import to_device
from graphrunner.kernels.tracing import has_gpu_kernels
from graphrunner.sampling.pick import RowParams

_FORMAT = struct.Struct("<qqffif")  # row, seed, temperature, top_p, top_k, min_p
_RECORD_BYTES = 32
GREEDY_BELOW = 1e-5


class SamplingRows:
    """Static device tensors that graphs read by row; row 0 is the dummy and greedy.

    Attributes:
        temperature, top_p, min_p: fp32 [num_rows].
        top_k: int32 [num_rows]; 0 keeps all.
        seed: int64 [num_rows].
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=self.device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        self.top_p = torch.ones(num_rows, dtype=torch.float32, device=self.device)
        self.min_p = torch.zeros(num_rows, dtype=torch.float32, device=self.device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=self.device)

    def write(self, row_inits: Sequence[RowInit]) -> None:
        """Fill the rows of new and resumed requests: one copy to the device. Sync: none."""
        records = b"".join(_FORMAT.pack(*_fields(init)) for init in row_inits)
        staged = torch.frombuffer(bytearray(records), dtype=torch.int64).view(len(row_inits), _RECORD_BYTES // 8)
        staged = to_device(staged, self.device)
        rows, floats, ints = staged[:, 0], staged.view(torch.float32), staged.view(torch.int32)
        self.seed.index_copy_(0, rows, staged[:, 1])
        self.temperature.index_copy_(0, rows, floats[:, 4])
        self.top_p.index_copy_(0, rows, floats[:, 5])
        self.top_k.index_copy_(0, rows, ints[:, 6])
        self.min_p.index_copy_(0, rows, floats[:, 7])

    def gather(self, rows: torch.Tensor, positions: torch.Tensor) -> RowParams:
        """The parameters of `rows` (int32 or int64 [R]), for tokens at `positions` [R]."""
        if has_gpu_kernels(self.temperature):
            from graphrunner.kernels.triton import param_rows, sample

            own = sample.SamplingRows(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
            taken = param_rows.take_params(own, rows)
            return RowParams(taken.temperature, taken.top_k, taken.top_p, taken.min_p, taken.seed, positions)
        rows = rows.to(torch.int64)
        return RowParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seed[rows],
            positions=positions,
        )


def _fields(init: RowInit) -> tuple[int, int, float, float, int, float]:
    """What the device row holds. A temperature too small to divide by, and top-k 1, are greedy and stored as such."""
    params = init.sampling_params
    top_k = min(max(params.top_k, 0), (1 << 31) - 1)
    is_greedy = params.temperature < GREEDY_BELOW or top_k == 1
    return init.row, init.seed, 0.0 if is_greedy else params.temperature, params.top_p, top_k, params.min_p
