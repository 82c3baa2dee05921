"""CUDA devices. Imported only where one is used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from graphrunner.device.cuda_driver import cuda_driver
from graphrunner.device.device import Device, DeviceGraph, DeviceKind, Fence, GraphPool, Stream
from graphrunner.device.memory_range import FixedRange, MemoryRange
from graphrunner.device.virtual_memory import VirtualRange, tensor_at


class _CudaFence(Fence):
    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """See `Fence.record`."""
        self._event.record()

    def wait(self) -> None:
        """See `Fence.wait`."""
        self._event.synchronize()


class CudaGraph(DeviceGraph):
    """One `torch.cuda.CUDAGraph` in a shared pool."""

    def __init__(self, pool: CudaGraphPool, handle: tuple[int, int]) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pool = pool
        self._handle = handle
        self._num_nodes = 0
        self._is_recording = False

    def begin(self) -> None:
        """See `DeviceGraph.begin`."""
        self._graph.capture_begin(pool=self._handle)
        self._is_recording = True

    def end(self) -> None:
        """See `DeviceGraph.end`."""
        self._is_recording = False
        self._graph.capture_end()
        self._num_nodes = _count_nodes(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    def replay(self) -> None:
        """See `DeviceGraph.replay`."""
        self._graph.replay()

    def num_nodes(self) -> int:
        """See `DeviceGraph.num_nodes`."""
        return self._num_nodes

    def release(self) -> None:
        """See `DeviceGraph.release`. A recording that was broken off is ended first, or the stream stays in it."""
        if self._is_recording:
            self._is_recording = False
            try:
                self._graph.capture_end()
            except RuntimeError:
                # It was invalid already, and what broke it is on its way up to the user. Here torch stops before it
                # tells its allocators, which from then on would keep every cached block: say it in its place.
                _end_allocation(self._handle)
                self._pool.abandon()
        self._graph.reset()


def _end_allocation(handle: tuple[int, int]) -> None:
    with suppress(AttributeError, RuntimeError):  # not part of torch's public surface
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), handle)


class CudaGraphPool(GraphPool):
    """A pool handle and a graph that does nothing: the allocators forget a pool when its last graph goes."""

    def __init__(self) -> None:
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._handle = (0, 0)

    def new_graph(self) -> DeviceGraph:
        """See `GraphPool.new_graph`."""
        if self._anchor is None:
            self._handle = torch.cuda.graph_pool_handle()
            self._anchor = _anchor_graph(self._handle)
        return CudaGraph(self, self._handle)

    def release(self) -> None:
        """See `GraphPool.release`. Hands what is free back to the driver."""
        self.abandon()
        torch.cuda.empty_cache()

    def abandon(self) -> None:
        """Leave the pool to the graphs that have it; the next graph starts a new one.

        Also after a broken recording: the allocator of pinned memory takes the old one for busy.
        """
        self._anchor = None


def _anchor_graph(handle: tuple[int, int]) -> torch.cuda.CUDAGraph:
    graph, cell = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=handle)
        cell.zero_()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


class CudaDevice(Device):
    """See `Device`."""

    kind = DeviceKind.CUDA
    has_own_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        # One stream for every recording, so that scratch memory of libraries is reserved once.
        self._capture_stream = torch.cuda.Stream(torch_device)
        assert torch_device.index is not None
        self._driver = cuda_driver(torch_device.index)
        self.has_virtual_memory = self._driver is not None

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_bytes(self) -> int:
        """See `Device.total_bytes`."""
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def reserved_bytes(self) -> int:
        """See `Device.reserved_bytes`."""
        return torch.cuda.memory_reserved(self.torch_device)

    def used_bytes(self) -> int:
        """See `Device.used_bytes`."""
        return self.total_bytes() - self.free_bytes()

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """See `Device.peak_bytes`. Counted in what the allocator took from the driver, so with its rounding."""
        self.synchronize()
        self.trim()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = self.reserved_bytes()
        work()
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch_device) - before

    def trim(self) -> None:
        """See `Device.trim`."""
        torch.cuda.empty_cache()

    def memory_range(self, num_bytes: int) -> MemoryRange:
        """See `Device.memory_range`."""
        if self._driver is None:
            return FixedRange(num_bytes, self.torch_device)
        return VirtualRange(self._driver, num_bytes, self.torch_device)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device.unowned`."""
        if not tensor.is_contiguous() or tensor.numel() == 0:
            return tensor
        flat = tensor_at(tensor.data_ptr(), tensor.nbytes, self.torch_device)
        return flat.view(tensor.dtype).view(tensor.shape)

    def fence(self) -> Fence:
        """See `Device.fence`."""
        return _CudaFence()

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Pinned: a copy from pageable memory would make the host wait for the device."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def capture_scope(self, stream: Stream | None) -> Iterator[None]:
        """See `Device.capture_scope`."""
        inner = stream if isinstance(stream, torch.cuda.Stream) else self._capture_stream
        outer = torch.cuda.current_stream(self.torch_device)
        inner.wait_stream(outer)
        try:
            with torch.cuda.stream(inner):
                yield
        finally:
            outer.wait_stream(inner)
            # Warm-ups leave their scratch cached for the capture stream, where nobody else would find it.
            torch.cuda.empty_cache()

    def graph_pool(self) -> GraphPool:
        """See `Device.graph_pool`."""
        return CudaGraphPool()


def _count_nodes(raw_graph: int) -> int:
    """Nodes of a cudaGraph_t; 0 when the runtime library cannot be asked."""
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
        count = ctypes.c_size_t(0)
        status = runtime.cudaGraphGetNodes(ctypes.c_void_p(raw_graph), None, ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return count.value if status == 0 else 0
