"""`DriverMemory`: a card's memory by the driver's calls: ranges of addresses that get memory page by page.

Not torch's allocator: a range (`driver_range`) takes memory where it is committed and gives it back while the engine
serves; blocks can be mapped into rows (`driver_placement`, `storage="virtual"`). Weights and a step's tensors stay with
torch's allocator. `driver_pages` has the invariants.

Cost: `copy_pieces` a call of the driver for each piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.devices.cuda.driver_pages import DriverPages
from quire.devices.cuda.driver_placement import DriverPlacement
from quire.devices.cuda.driver_range import DriverRange
from quire.errors import QuireError

__all__ = ["DriverMemory"]


class DriverMemory(DriverPages):
    """See `quire.memory.device_memory.DeviceMemory`; arguments as `DriverPages`."""

    is_host = False
    is_elastic = has_virtual_rows = has_torch_views = True

    def total_bytes(self) -> int:
        return self.driver.free_and_total_bytes()[1]

    def free_bytes(self) -> int:
        """Bytes that no process has, and free handles."""
        return self.driver.free_and_total_bytes()[0] + self.pool.num_free * self.page_bytes

    @property
    def bytes_created(self) -> int:
        """Bytes of the card that all ranges and the pool take."""
        return self.pool.num_created * self.page_bytes

    def set_limit(self, num_bytes: int | None) -> None:
        """The most bytes that all ranges and the pool may take; see `HandlePool.set_limit`. May be lowered while the
        engine serves: `PagedStorage.resize` or `trim` then gives memory back."""
        with self.lock:
            self.collect()
            self.pool.set_limit(None if num_bytes is None else num_bytes // self.page_bytes)

    def trim(self) -> None:
        """Give all memory without a place back to the card, for other processes. Waits for steps that still use
        some of it."""
        with self.lock:
            self.wait()
            self.pool.trim()

    def reserve(self, num_bytes: int) -> DriverRange:
        """Addresses without memory. *raises:* CapacityError: the card has not so many addresses."""
        return DriverRange(self, num_bytes)

    def mapped_memory(self) -> DriverMemory:
        return self

    def open_placement(self) -> DriverPlacement:
        """The calls that map this memory into rows."""
        return DriverPlacement(self)

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        for source, destination, num_tokens in copies.tolist():
            for pool in pools:
                pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        base, stream = payload.ctypes.data, self.stream()
        for offset, address, num_rows, row_bytes, stride in pieces.tolist():
            self.driver.copy_rows(base + offset, address, num_rows, row_bytes, stride, to_device, stream)
        self.driver.synchronize(stream)

    def is_lost(self) -> bool:
        try:
            self.driver.synchronize(self.stream())
        except QuireError:
            return True
        return False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()
