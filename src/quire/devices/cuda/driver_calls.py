"""`CudaDriver`: the driver's calls on one card's memory, through cuda-bindings; one method each, errors as Quire's.

Not a policy: `driver_memory` and its neighbours decide the order of calls and undo failed changes. Importing this file
imports nothing of CUDA; making a `CudaDriver` does. Any thread may call it: the first call of a thread makes the card's
primary context current, which torch uses too.

Errors
    CapacityError      the card has no memory or no addresses for the call; nothing has changed
    DeviceLostError    the context is lost (an illegal access, a failed launch): no call works any more
    BackendError       any other refusal; nothing has changed

Cost: 3 to 10 us in addition to the call itself.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from quire.errors import BackendError, CapacityError, DeviceLostError, QuireError

__all__ = ["CudaDriver", "StreamFence", "virtual_memory_reason"]

_OUT_OF_MEMORY, _NOT_READY = 2, 600
_LOST = {
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
}  # after which every call of the context fails
_HOST, _DEVICE = 1, 2  # CUmemorytype
_MANAGES_ADDRESSES = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_NON_BLOCKING, _NO_TIMING = 1, 2  # flags of a stream and of an event
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # kinds of an allocation, a location and an access


def virtual_memory_reason(ordinal: int = 0) -> str | None:
    """None if card `ordinal` has virtual memory that Quire can manage, else the reason in one sentence for a user."""
    try:
        CudaDriver(ordinal)
    except QuireError as error:
        return str(error)
    return None


class CudaDriver:
    """The calls for card `ordinal`. Addresses, handles and streams are integers; sizes are bytes.

    granularity: unit of addresses, handles and mappings, 2 MiB on today's cards.

    *raises:* BackendError: no cuda-bindings, no driver, no such card, or one without virtual memory.
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.driver")
            result = int(self._api.cuInit(0)[0])
        except (ImportError, RuntimeError) as error:
            raise BackendError(
                f"expected the package cuda-bindings and a driver of CUDA, got: {error}; pip install cuda-bindings, "
                "or take another device"
            ) from error
        if result:
            raise BackendError(f"expected a driver of CUDA that starts, got error {result} of cuInit")
        self._context: Any = None
        self._current = threading.local()
        self._lock = threading.Lock()
        self._events: list[Any] = []
        self.ordinal = ordinal
        self._device = self._value("cuDeviceGet", ordinal)
        if not self._value("cuDeviceGetAttribute", self._attribute(_MANAGES_ADDRESSES), self._device):
            raise BackendError(
                f"expected a card with virtual memory, got card {ordinal}; use torch's allocator"
            )
        self._context = self._value("cuDevicePrimaryCtxRetain", self._device)
        location = self._api.CUmemLocation()
        location.type, location.id = self._api.CUmemLocationType(_ON_DEVICE), ordinal
        self._allocation = self._api.CUmemAllocationProp()
        self._allocation.type = self._api.CUmemAllocationType(_PINNED)
        self._allocation.location = location
        access = self._api.CUmemAccessDesc()
        access.location, access.flags = location, self._api.CUmemAccess_flags(_READ_WRITE)
        self._access = [access]
        minimum = self._api.CUmemAllocationGranularity_flags(0)
        self.granularity = int(self._value("cuMemGetAllocationGranularity", self._allocation, minimum))

    # Memory

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Bytes of the card that are free to any process, and all of them."""
        free_bytes, total_bytes = self._values("cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """The address, a multiple of `alignment`, of reserved addresses without memory."""
        return int(self._value("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free_addresses(self, address: int, num_bytes: int) -> None:
        """Give a whole reservation back; nothing is mapped in it."""
        self._values("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> int:
        """A handle of memory of the card, mapped nowhere; its bytes are undefined."""
        return int(self._value("cuMemCreate", num_bytes, self._allocation, 0))

    def destroy(self, handle: int) -> None:
        """Give a handle back; its memory goes with its last mapping."""
        self._values("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map all of a handle at reserved addresses, where nothing is mapped; `allow` opens them for access."""
        self._values("cuMemMap", address, num_bytes, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the card read and write these addresses, all of them mapped."""
        self._values("cuMemSetAccess", address, num_bytes, self._access, 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap whole mappings. No running kernel may use them."""
        self._values("cuMemUnmap", address, num_bytes)

    # Bytes. A call on host memory that is not pinned returns when that memory may be used again.

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy bytes within the card."""
        self._values("cuMemcpyDtoDAsync", target, source, num_bytes, stream)

    def copy_rows(
        self, host: int, address: int, num_rows: int, row_bytes: int, stride: int, to_card: bool, stream: int
    ) -> None:
        """Copy rows between host memory, where they are adjacent, and the card, where they begin every `stride`
        bytes."""
        if num_rows == 1 or stride == row_bytes:
            num_bytes = num_rows * row_bytes
            if to_card:
                self._values("cuMemcpyHtoDAsync", address, host, num_bytes, stream)
            else:
                self._values("cuMemcpyDtoHAsync", host, address, num_bytes, stream)
            return
        copy = self._api.CUDA_MEMCPY2D()
        copy.WidthInBytes, copy.Height = row_bytes, num_rows
        ends = ("src", "dst") if to_card else ("dst", "src")
        for end, kind, place, pitch in zip(
            ends, (_HOST, _DEVICE), (host, address), (row_bytes, stride), strict=True
        ):
            setattr(copy, f"{end}MemoryType", self._api.CUmemorytype(kind))
            setattr(copy, f"{end}Host" if kind == _HOST else f"{end}Device", place)
            setattr(copy, f"{end}Pitch", pitch)
        self._values("cuMemcpy2DAsync", copy, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Set bytes to zero."""
        self._values("cuMemsetD8Async", address, 0, num_bytes, stream)

    # Streams and fences

    def make_stream(self) -> int:
        """A stream that does not wait for the default one."""
        return int(self._value("cuStreamCreate", _NON_BLOCKING))

    def synchronize(self, stream: int) -> None:
        """Wait until all work of a stream is done."""
        self._values("cuStreamSynchronize", stream)

    def fence(self, stream: int) -> StreamFence:
        """A fence behind all work that the stream has been given so far."""
        with self._lock:
            event = self._events.pop() if self._events else None
        if event is None:
            event = self._value("cuEventCreate", _NO_TIMING)
        try:
            self._values("cuEventRecord", event, stream)
        except BaseException:
            self._put_event(event)
            raise
        return StreamFence(self, event)

    def has_passed(self, event: Any) -> bool:
        """Whether the work before the event's last record is done."""
        result = int(self._api_of("cuEventQuery")(event)[0])
        if result not in (0, _NOT_READY):
            raise self._error("cuEventQuery", result)
        return result == 0

    def wait_for(self, event: Any) -> None:
        """Wait until the work before the event's last record is done."""
        self._values("cuEventSynchronize", event)

    def _put_event(self, event: Any) -> None:
        with self._lock:
            self._events.append(event)

    # Calls

    def _value(self, name: str, *args: Any) -> Any:
        return self._values(name, *args)[0]

    def _values(self, name: str, *args: Any) -> tuple[Any, ...]:
        result, *values = self._api_of(name)(*args)
        if int(result):
            raise self._error(name, int(result))
        return tuple(values)

    def _api_of(self, name: str) -> Any:
        """The call `name`, in a thread with the card's context."""
        if self._context is not None and not getattr(self._current, "is_set", False):
            result = int(self._api.cuCtxSetCurrent(self._context)[0])
            if result:
                raise self._error("cuCtxSetCurrent", result)
            self._current.is_set = True
        return getattr(self._api, name)

    def _attribute(self, number: int) -> Any:
        return self._api.CUdevice_attribute(number)

    def _error(self, name: str, number: int) -> QuireError:
        text = self._api.cuGetErrorString(self._api.CUresult(number))[1]
        text = text.decode() if isinstance(text, bytes) else f"error {number}"
        where = f"{name} on card {self.ordinal}"
        if number == _OUT_OF_MEMORY:
            return CapacityError(
                f"the card gives no memory: {text}, got error {number} in {where}; close sequences, lower kv_memory, "
                "or end other processes on this card"
            )
        if number in _LOST:
            return DeviceLostError(
                f"expected a card that answers, got {_LOST[number]}: {text}, in {where}; no call works any more, so "
                "the engine has to end: start the process anew"
            )
        return BackendError(f"expected the driver to accept {where}, got error {number}: {text}")


class StreamFence:
    """A point in a stream: passed when all work given to the stream before it is done. Made by `CudaDriver.fence`."""

    def __init__(self, driver: CudaDriver, event: Any) -> None:
        self._driver = driver
        self._event = event  # None once passed: the driver uses it again

    def is_passed(self) -> bool:
        """Whether it has been passed; does not wait."""
        if self._event is not None and self._driver.has_passed(self._event):
            self._put()
        return self._event is None

    def wait(self) -> None:
        """Wait until it is passed."""
        if self._event is not None:
            self._driver.wait_for(self._event)
            self._put()

    def wait_outside(self) -> None:
        """Wait until it is passed, or a little longer, in another thread than the one that uses it."""
        event = self._event
        if event is not None:
            self._driver.wait_for(event)

    def _put(self) -> None:
        self._driver._put_event(self._event)
        self._event = None
