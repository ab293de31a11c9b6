"""The memory of a torch device, by torch's allocator: ranges are tensors, copies are torch's own operators.

Correct on any device that torch knows. A range is taken whole when it is reserved and goes back when it is closed: the
device is not elastic. Every call runs on the device's default stream, in the order of the calls, so each sees the bytes
that the one before it wrote (D2); a copy to host memory waits for them.

Cost: `reserve` that of `torch.empty`. `copy_pieces` is one gather or scatter on the device and one copy over the bus
for each length of rows; its index has 8 bytes for each word of data. `copy_blocks` is two operators for each copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.devices.cuda.driver_calls import virtual_memory_reason
from quire.devices.cuda.driver_memory import DriverMemory
from quire.devices.cuda.step_tensors import has_late_copies
from quire.errors import ArgumentError, BackendError, CapacityError
from quire.memory.device_memory import HOST
from quire.sizes import format_size
from quire.spec.cards import spare_bytes

__all__ = ["TorchMemory", "TorchRange", "require_device"]

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def require_device(device: torch.device) -> None:
    """*raises:* BackendError: this torch has no such device, with what is missing."""
    if device.type == "cpu":
        return
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "is_available"):
        raise BackendError(
            f"expected a device that torch {torch.__version__} has, got {str(device)!r} - in `device`"
        )
    if not module.is_available():
        missing = "no driver or no card was found"
        if device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
            missing = "it was built without CUDA; install a CUDA or ROCm build of torch (pytorch.org)"
        raise BackendError(
            f"expected a device {device.type!r} that torch {torch.__version__} can use, got none: {missing} - in "
            "`device`"
        )
    if (device.index or 0) >= (count := module.device_count()):
        raise BackendError(
            f"expected a device {device.type}:0 to {device.type}:{count - 1}, got {str(device)!r} - in `device`"
        )


class TorchRange:
    """`num_bytes` of a device's memory, uninitialized; see `quire.memory.device_memory.Allocation`."""

    def __init__(self, memory: TorchMemory, num_bytes: int) -> None:
        self._memory = memory
        try:
            with torch.inference_mode(False):  # one made in that mode could not be written outside of it
                self._bytes: torch.Tensor | None = torch.empty(
                    num_bytes, dtype=torch.uint8, device=memory.torch_device
                )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"expected {format_size(num_bytes)} on {memory.torch_device} for K and V, got an allocator without so "
                "much in one piece; lower kv_memory, or end other processes on the card"
            ) from error
        self.start = self._bytes.data_ptr()
        self.num_bytes = num_bytes
        memory.add(self)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        if self._bytes is None:
            raise ArgumentError("expected an open range of a device's memory, got one that was closed")
        return self._bytes[: self.num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)

    def prefer_huge_pages(self, start: int, stop: int) -> None: ...

    def commit(self, start: int, stop: int) -> bool:
        return True

    def release(self, start: int, stop: int) -> None: ...

    def committed_bytes(self, start: int = 0, stop: int | None = None) -> int:
        return (
            0
            if self._bytes is None
            else min(self.num_bytes if stop is None else stop, self.num_bytes) - start
        )

    def close(self) -> None:
        """The memory goes back now, whatever tensors were made of it."""
        if self._bytes is not None:
            self._memory.remove(self)
            if self._memory.torch_device.type != "cpu":
                self._bytes.untyped_storage().resize_(0)
            self._bytes = None


class TorchMemory:
    """The memory of `torch_device`; see `quire.memory.device_memory.DeviceMemory`."""

    is_host = is_elastic = False
    has_torch_views = True

    def __init__(self, torch_device: torch.device) -> None:
        require_device(torch_device)
        self.torch_device = torch_device
        self._lock = threading.Lock()
        self._mapped_memory: DriverMemory | None = None
        self._ranges: list[TorchRange] = []  # open ones, in the order of their addresses

    def add(self, new: TorchRange) -> None:
        """Make the addresses of `new` known to `copy_pieces`."""
        with self._lock:
            self._ranges = sorted((*self._ranges, new), key=lambda known: known.start)

    def remove(self, closed: TorchRange) -> None:
        """Undo `add`."""
        with self._lock:
            self._ranges = [known for known in self._ranges if known is not closed]

    def total_bytes(self) -> int:
        return self._memory_info()[1]

    def free_bytes(self) -> int:
        """The driver's free bytes and the unused ones of torch's allocator, less room for a step's tensors."""
        free, total = self._memory_info()
        return max(0, free - spare_bytes(total)) if total else 0

    def _memory_info(self) -> tuple[int, int]:
        """Free bytes and all bytes."""
        module: Any = getattr(torch, self.torch_device.type, None)
        if not hasattr(module, "mem_get_info"):  # memory that the device shares with this machine
            return HOST.free_bytes(), HOST.total_bytes()
        free, total = module.mem_get_info(self.torch_device)
        unused = module.memory_reserved(self.torch_device) - module.memory_allocated(self.torch_device)
        return free + unused, total

    def reserve(self, num_bytes: int) -> TorchRange:
        return TorchRange(self, num_bytes)

    @property
    def has_virtual_rows(self) -> bool:
        return (
            self.torch_device.type == "cuda" and virtual_memory_reason(self.torch_device.index or 0) is None
        )

    def mapped_memory(self) -> DriverMemory:
        """The card's memory by the driver's calls, for rows alone; one object for each device."""
        if self.torch_device.type != "cuda":
            raise BackendError(
                f"expected a card of CUDA, whose memory can be mapped, got {self.torch_device}"
            )
        with self._lock:
            if self._mapped_memory is None:
                self._mapped_memory = DriverMemory(self.torch_device)
        torch.cuda.empty_cache()  # the driver cannot take what torch's allocator holds
        return self._mapped_memory

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        for source, destination, num_tokens in copies.tolist():
            for pool in pools:
                pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        if not len(pieces):
            return
        row_starts = np.repeat(pieces[:, 1], pieces[:, 2])
        payload_starts = np.repeat(pieces[:, 0], pieces[:, 2])
        number = _number_within(pieces[:, 2])
        row_starts = row_starts + number * np.repeat(pieces[:, 4], pieces[:, 2])
        row_bytes = np.repeat(pieces[:, 3], pieces[:, 2])
        payload_starts = payload_starts + number * row_bytes
        ranges = self._ranges  # other threads put another list there
        range_of_row = np.searchsorted([known.start for known in ranges], row_starts, side="right") - 1
        for index, width in sorted(set(zip(range_of_row.tolist(), row_bytes.tolist(), strict=True))):
            chosen = (range_of_row == index) & (row_bytes == width)
            known = ranges[index]
            self._copy_rows(
                known, row_starts[chosen] - known.start, payload, payload_starts[chosen], width, to_device
            )

    @torch.inference_mode()
    def _copy_rows(
        self,
        known: TorchRange,
        offsets: np.ndarray,
        payload: np.ndarray,
        payload_starts: np.ndarray,
        width: int,
        to_device: bool,
    ) -> None:
        """Copy rows of `width` bytes between `known`, at `offsets`, and the payload."""
        size, dtype = next(word for word in _WORDS if width % word[0] == 0 and not (offsets % word[0]).any())
        columns = torch.arange(width // size, device=self.torch_device)
        rows = torch.from_numpy(offsets // size).to(self.torch_device)
        places = (rows[:, None] + columns).view(-1)
        words = known.tensor(dtype)
        in_payload = payload_starts[:, None] + np.arange(width)
        if to_device:
            host = torch.from_numpy(payload[in_payload].reshape(-1)).view(dtype)
            words[places] = host.to(self.torch_device)
        else:
            payload[in_payload] = words[places].cpu().view(torch.uint8).view(len(offsets), width).numpy()

    def is_lost(self) -> bool:
        """After an error in a kernel CUDA answers every call with an error."""
        try:
            if self.torch_device.type != "cpu":
                torch.accelerator.synchronize(self.torch_device)
        except RuntimeError:
            return True
        return False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cpu and has_late_copies(self.torch_device):
            return tensor.pin_memory().to(self.torch_device, non_blocking=True)
        return tensor.to(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()


def _number_within(counts: np.ndarray) -> np.ndarray:
    """0 .. count - 1 for each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
