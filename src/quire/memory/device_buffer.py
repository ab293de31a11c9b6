"""A buffer of a device's memory whose caller divides it up, and the two calls that move its bytes.

For rows of tokens (`quire.hf`), which are not blocks. On this machine a buffer is a torch tensor, `read` returns the
memory itself, and `write` is one copy. On another device only the device's own calls touch the bytes.

Cost: on this machine that of `torch.empty` and `copy_`; on another device a copy over host memory, some us a call.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.errors import CapacityError
from quire.memory.device_memory import Allocation, DeviceMemory, page_allocation

__all__ = ["DeviceBuffer", "read", "write"]


class DeviceBuffer:
    """`num_bytes` of a device, uninitialised.

    tensor: uint8 [num_bytes]; on another device than this machine it carries addresses (D1 of `device`).

    Raises:
        CapacityError: the device has not enough memory; RuntimeError: torch got no memory from the system.
    """

    def __init__(self, device: DeviceMemory, num_bytes: int) -> None:
        self._allocation: Allocation | None = None
        with torch.inference_mode(False):  # one made in that mode could not be written outside of it
            if device.is_host or not num_bytes:
                self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
            else:
                self._allocation = device.reserve(num_bytes)
                if (pages := page_allocation(self._allocation)) is not None:
                    try:
                        pages.commit(0, num_bytes)
                    except CapacityError:
                        pages.close()
                        raise
                self.tensor = self._allocation.tensor(torch.uint8)[:num_bytes]

    def close(self) -> None:
        """Release the buffer. This machine's memory goes back with its last tensor, another device's now."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            allocation.close()


def read(device: DeviceMemory, source: torch.Tensor) -> torch.Tensor:
    """The bytes of `source` in host memory: on this machine `source` itself, otherwise a dense copy.

    source: uint8, a part of a buffer's tensor, all of whose dimensions but the first are dense.
    """
    if device.is_host:
        return source
    payload = torch.empty(source.shape, dtype=torch.uint8)
    if payload.numel():
        device.copy_pieces(payload.view(-1).numpy(), _piece(source), False)
    return payload


def write(device: DeviceMemory, target: torch.Tensor, payload: torch.Tensor) -> None:
    """Copy the bytes of `payload` to `target`.

    target: as `source` of `read`. payload: uint8 of its shape, in host memory.
    """
    if device.is_host:
        target.copy_(payload)
    elif payload.numel():
        device.copy_pieces(payload.contiguous().view(-1).numpy(), _piece(target), True)


def _piece(part: torch.Tensor) -> np.ndarray:
    """int64 [1, 5], see `DeviceMemory.copy_pieces`."""
    num_rows = 1 if part.is_contiguous() else len(part)
    row_bytes = part.numel() // num_rows
    return np.array([[0, part.data_ptr(), num_rows, row_bytes, part.stride(0)]], np.int64)
