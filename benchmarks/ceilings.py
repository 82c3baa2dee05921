"""What the device can do at most: bytes read and bf16 operations a second, measured in the run that uses them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of the device under test.

    Attributes:
        read_bytes_per_s: of a large sum.
        flops_per_s: of a square matrix product of random data, a multiply and an add counted as two.
    """

    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """What one operation takes at least: its bytes or its arithmetic, whichever is longer."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.flops_per_s)


def synchronize(device: str) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def elapsed_s(call: Callable[[], object], device: str) -> float:
    """Device time of a call: between two events on a GPU, wall time on a CPU."""
    if device != "cuda":
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_ceilings(device: str) -> Ceilings:
    """Thirty reads of 4 GiB and thirty products of 8192 cubed, the best of each; small ones on a CPU."""
    ceilings = _measured(device)
    if device == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _measured(device: str) -> Ceilings:
    is_gpu = device == "cuda"
    data = torch.zeros(1 << (32 if is_gpu else 24), dtype=torch.uint8, device=device).view(torch.int32)
    read_s = min(elapsed_s(lambda: data.sum(dtype=torch.int32), device) for _ in range(30))
    size = 8192 if is_gpu else 256
    dtype = torch.bfloat16 if is_gpu else torch.float32
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = min(elapsed_s(lambda: left @ right, device) for _ in range(30))
    return Ceilings(data.numel() * 4 / read_s, 2 * size**3 / product_s)
