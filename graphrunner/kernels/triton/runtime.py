"""What the launchers need to know about the device a kernel will run on."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from graphrunner.core.errors import CaptureError
from graphrunner.kernels.tracing import is_tracing

Operand = Tensor | TensorDescriptor | int | float

_FIRST_CAPABILITY_WITH_DEPENDENT_LAUNCH = (9, 0)
_FIRST_CAPABILITY_WITH_FP8 = (8, 9)
_MAJORS_WITH_FP8_PRODUCTS = (9, 10)
_INTERPRETED_NUM_MULTIPROCESSORS = 2  # small, so that persistent loops take several turns in the tests


@functools.lru_cache(maxsize=16)
def _cuda_facts(index: int) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def use_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device are chained by programmatic dependent launch."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _cuda_facts(_index(device))[0] >= _FIRST_CAPABILITY_WITH_DEPENDENT_LAUNCH


def has_tensor_descriptors(device: torch.device) -> bool:
    """Whether kernels on this device load whole tiles through a descriptor (TMA)."""
    return device.type != "cuda" or use_dependent_launch(device)


def has_fp8(device: torch.device) -> bool:
    """Whether kernels can convert e4m3 numbers on this device."""
    return device.type != "cuda" or _cuda_facts(_index(device))[0] >= _FIRST_CAPABILITY_WITH_FP8


def has_fp8_products(device: torch.device) -> bool:
    """Whether the library multiplies e4m3 by e4m3 with a scale per row on this device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _cuda_facts(_index(device))[0][0] in _MAJORS_WITH_FP8_PRODUCTS


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the card; a small constant for the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_NUM_MULTIPROCESSORS
    return _cuda_facts(_index(device))[1]


def device_key(device: torch.device) -> str:
    """Name of the card for tables of measured configurations, such as "sm90x132"."""
    if device.type != "cuda":
        return "interpreter"
    (major, minor), count = _cuda_facts(_index(device))
    return f"sm{major}{minor}x{count}"


_MAX_ARRIVALS = 1 << 14


@functools.lru_cache(maxsize=16)
def _arrivals(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The zeros would be written by that recording's replays, and by no other's.
        raise RuntimeError("counters of arrived programs cannot be made inside a recording")
    return torch.zeros(_MAX_ARRIVALS, dtype=torch.int32, device=device)


def arrival_counters(device: torch.device, num_cells: int) -> Tensor:
    """Counters of the programs of a cell that have arrived, zero between kernels: int32, on the device, one a cell.

    For kernels whose last arriver finishes the cell, and puts its counter back. One kernel uses them at a time: those
    of one stream follow each other.

    Raises:
        RuntimeError: their first use is inside a recording.
    """
    assert num_cells <= _MAX_ARRIVALS, f"{num_cells} cells"
    return torch.empty(1, dtype=torch.int32, device="meta") if device.type == "meta" else _arrivals(device)


def cdiv(value: int, divisor: int) -> int:
    """value / divisor, rounded up. Triton's own is meant for kernels, and costs a host 5 us."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below value (> 0)."""
    return 1 << (value - 1).bit_length()


def largest_power_of_two_divisor(value: int) -> int:
    """The largest power of two that divides value (> 0)."""
    return value & -value


class _Rehearsal:
    """The kinds of launches met so far while nothing may run, each compiled once; None outside. See compile_ahead."""

    met: set[tuple[object, ...]] | None = None


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, kernels are compiled for their operands and not run: what they would have written stays as it was."""
    _Rehearsal.met = set()
    try:
        yield
    finally:
        _Rehearsal.met = None


def _kind(operand: Operand) -> tuple[object, ...]:
    """All of an operand that a compiled kernel can depend on."""
    if isinstance(operand, Tensor):
        return operand.dtype, operand.data_ptr() % 16 == 0
    if isinstance(operand, TensorDescriptor):
        return operand.base.dtype, *operand.block_shape
    return type(operand), operand


_named: set[int] = set()


def name_kernel(kernel: JITFunction) -> None:
    """Let Triton hash a kernel after the functions it calls.

    The hash is its name in the on-disk cache, and without this depends on what the process happened to hash before:
    another process, or the next start, would not find it there.
    """
    _named.add(id(kernel))
    if not isinstance(kernel, JITFunction):  # interpreted
        return
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, JITFunction) and id(called) not in _named:
            name_kernel(called)
    hash(kernel)


def launch(
    kernel: JITFunction,
    grid: tuple[int, ...] | torch.Size,
    *operands: Operand,
    **settings: int | bool | str,
) -> None:
    """Launch on the current stream.

    Args:
        kernel: the jitted function.
        grid: programs along each axis.
        operands: positional arguments.
        settings: constexprs and launch options.

    Raises:
        CaptureError: a compiler traces the forward, and would not see what the kernel does.
    """
    if is_tracing():
        raise CaptureError(f"kernel {kernel.fn.__name__} is no torch operator and cannot be traced")
    if id(kernel) not in _named:
        name_kernel(kernel)
    if _Rehearsal.met is None:
        kernel[tuple(grid)](*operands, **settings)
        return
    kind = (id(kernel), *map(_kind, operands), *settings.items())
    if kind not in _Rehearsal.met:
        _Rehearsal.met.add(kind)
        kernel.warmup(*operands, grid=tuple(grid), **settings)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything it is launched with; tuners compile it ahead, launchers run it.

    Attributes:
        kernel: the jitted function.
        grid: programs along each axis.
        operands: positional arguments.
        settings: constexprs and launch options.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    operands: tuple[Operand, ...]
    settings: dict[str, int | bool | str]

    def run(self) -> None:
        """Launch on the current stream."""
        launch(self.kernel, self.grid, *self.operands, **self.settings)

    def compile(self) -> None:
        """Compile without running; operands may be meta tensors. Fills Triton's on-disk cache."""
        name_kernel(self.kernel)
        self.kernel.warmup(*self.operands, grid=self.grid, **self.settings)
