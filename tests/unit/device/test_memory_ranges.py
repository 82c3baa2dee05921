"""Addresses that stay: the host's, a fixed allocation, and the driver's over a strict fake of it."""

import gc

import pytest
import torch
from fakes.fake_accelerator import DEVICE_INDEX, GRANULE_BYTES, FakeAccelerator, build_driver, install

from graphrunner.device import cuda_driver as driver_module
from graphrunner.device.cuda_driver import CudaDriver, DriverError, cuda_driver
from graphrunner.device.memory_range import FixedRange, HostRange, MemoryRange

CPU = torch.device("cpu")
NUM_BYTES = 5 * GRANULE_BYTES + 100


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return install(monkeypatch, FakeAccelerator(1 << 30))


def make(kind: str, accelerator: FakeAccelerator) -> MemoryRange:
    if kind == "host":
        return HostRange(NUM_BYTES)
    return FixedRange(NUM_BYTES, CPU) if kind == "fixed" else accelerator.memory_range(NUM_BYTES)


@pytest.mark.parametrize("kind", ["host", "fixed", "virtual"])
def test_memory_comes_zeroed_goes_and_comes_again(kind: str, accelerator: FakeAccelerator) -> None:
    memory = make(kind, accelerator)
    assert memory.num_bytes >= NUM_BYTES and memory.num_bytes % memory.granularity_bytes == 0
    memory.commit(100)
    tensor = memory.tensor()
    assert tensor.dtype is torch.uint8 and tensor.numel() == memory.num_bytes
    view = tensor[: 64 * 4].view(torch.float32).view(8, 8)
    assert not view.any()
    view.fill_(3.0)
    memory.commit(NUM_BYTES)
    assert (view == 3.0).all() and not tensor[256:].any()
    tensor[-1] = 7
    address = tensor.data_ptr()
    memory.decommit()
    memory.commit(NUM_BYTES)
    assert not tensor.any() and not view.any()
    view.fill_(2.0)
    assert tensor[:4].view(torch.float32).item() == 2.0
    assert kind == "fixed" or tensor.data_ptr() == address == memory.tensor().data_ptr()


def test_pieces_are_counted_and_addresses_outlive_them(accelerator: FakeAccelerator) -> None:
    memory = accelerator.memory_range(NUM_BYTES)
    assert (accelerator.reserved_range_bytes(), accelerator.page_bytes()) == (6 * GRANULE_BYTES, 0)
    for wanted, granules in ((1, 1), (GRANULE_BYTES, 1), (GRANULE_BYTES + 1, 2), (10, 2), (NUM_BYTES * 9, 6)):
        memory.commit(wanted)
        assert memory.committed_bytes == accelerator.page_bytes() == granules * GRANULE_BYTES
    tensor = memory.tensor()
    del memory
    gc.collect()
    tensor.fill_(1)  # a tensor keeps its range
    assert accelerator.page_bytes() == 6 * GRANULE_BYTES
    del tensor
    gc.collect()
    assert (accelerator.reserved_range_bytes(), accelerator.page_bytes()) == (0, 0)


def test_a_refused_commit_leaves_what_there_is(accelerator: FakeAccelerator) -> None:
    memory = accelerator.memory_range(NUM_BYTES)
    memory.commit(1)
    memory.tensor()[:4] = 9
    accelerator.set_limit(3 * GRANULE_BYTES)
    with pytest.raises(MemoryError, match="cuMemCreate: the device is out of memory"):
        memory.commit(NUM_BYTES)
    assert accelerator.page_bytes() == GRANULE_BYTES and (memory.tensor()[:4] == 9).all()
    memory.commit(3 * GRANULE_BYTES)
    memory.decommit()
    memory.decommit()
    assert accelerator.page_bytes() == 0


def test_errors_of_the_driver_name_the_call(accelerator: FakeAccelerator) -> None:
    wrong = CudaDriver(build_driver(), DEVICE_INDEX + 1)
    with pytest.raises(DriverError, match="cuDeviceGetAttribute failed with status 1"):
        wrong.has_virtual_memory()
    with pytest.raises(DriverError, match="cuMemUnmap failed"):
        accelerator.driver.unmap(4096, GRANULE_BYTES)


def test_no_driver_no_virtual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CudaDriver
    for library in ("/nonexistent/libcuda.so", "libc.so.6"):  # not there; there without the calls
        monkeypatch.setattr(driver_module, "CudaDriver", lambda _, index, library=library: real(library, index))
        cuda_driver.cache_clear()
        assert cuda_driver(DEVICE_INDEX) is None
    path = build_driver()
    monkeypatch.setattr(driver_module, "CudaDriver", lambda _, index: real(path, index))
    for index, is_there in ((DEVICE_INDEX, True), (DEVICE_INDEX + 1, False)):
        cuda_driver.cache_clear()
        assert (cuda_driver(index) is not None) == is_there
    cuda_driver.cache_clear()
