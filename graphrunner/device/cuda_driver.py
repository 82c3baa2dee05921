"""The few calls of the CUDA driver that torch does not have: virtual addresses and the memory behind them.

Source: the driver API's virtual memory management; reserve addresses, create memory, map it, allow access.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import cache

from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handles", c_int),
        ("location", _Location),
        ("security_attributes", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
}


class DriverError(RuntimeError):
    """A driver call failed; the message names the call and its status."""


class CudaDriver:
    """Virtual memory of one device. The device's context must be current, as it is once torch has used the device.

    Args:
        library: path or name of the driver's library.
        device_index: which device.

    Raises:
        OSError, AttributeError: there is no such library, or it is too old.
    """

    def __init__(self, library: str, device_index: int) -> None:
        driver = ctypes.CDLL(library)
        self._calls = {name: getattr(driver, name) for name in _SIGNATURES}
        for name, signature in _SIGNATURES.items():
            self._calls[name].argtypes, self._calls[name].restype = signature, c_int
        self._device_index = device_index
        location = _Location(_ON_DEVICE, device_index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)

    def has_virtual_memory(self) -> bool:
        """Whether the device can do the rest of this class."""
        answer = c_int(0)
        self._call("cuDeviceGetAttribute", byref(answer), _HAS_VIRTUAL_MEMORY, self._device_index)
        return answer.value == 1

    def granularity_bytes(self) -> int:
        """Sizes and addresses are multiples of this."""
        answer = c_size_t(0)
        self._call("cuMemGetAllocationGranularity", byref(answer), byref(self._properties), 0)
        return answer.value

    def reserve(self, num_bytes: int) -> int:
        """Take `num_bytes` of addresses, no memory; returns the first."""
        address = c_uint64(0)
        self._call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def release(self, address: int, num_bytes: int) -> None:
        """Give back what `reserve` took, unmapped."""
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> None:
        """Put new memory behind reserved addresses. Raises MemoryError when the device has none; nothing stays then."""
        handle = c_uint64(0)
        self._call("cuMemCreate", byref(handle), num_bytes, byref(self._properties), 0)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        finally:
            # The mapping keeps the memory, so that unmapping it is all it takes to give it back.
            self._call("cuMemRelease", handle)
        try:
            self._call("cuMemSetAccess", address, num_bytes, byref(self._access), 1)
        except DriverError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take away the memory of one call of `map`. The device must be idle."""
        self._call("cuMemUnmap", address, num_bytes)

    def _call(self, name: str, *arguments: object) -> None:
        status = self._calls[name](*arguments)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the device is out of memory")
        if status != 0:
            raise DriverError(f"{name} failed with status {status}")


@cache
def cuda_driver(device_index: int) -> CudaDriver | None:
    """The driver, if it is there and has virtual memory for this process. The device must be current."""
    try:
        driver = CudaDriver("libcuda.so.1", device_index)
        if not driver.has_virtual_memory():
            return None
        _try(driver)
    except (OSError, AttributeError, DriverError, MemoryError) as cause:
        log.info("device %d: KV pages will be allocated at once: %s", device_index, cause)
        return None
    return driver


def _try(driver: CudaDriver) -> None:
    """One granule, there and back: what a container may forbid shows here."""
    num_bytes = driver.granularity_bytes()
    address = driver.reserve(num_bytes)
    try:
        driver.map(address, num_bytes)
        driver.unmap(address, num_bytes)
    finally:
        driver.release(address, num_bytes)
