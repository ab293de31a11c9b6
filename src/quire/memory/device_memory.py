"""The memory of a device: the allocator of a storage's bytes, and the only calls that move them.

Storages, tiers, swap and snapshots name bytes by address and let the device touch them. So a device whose memory Python
cannot reach works like this machine's own. `quire.devices.device` has a device's attention and linear layers; its
`Device` combines them with this.

Not here: the content of blocks (`quire.cache`), the place of a block in an allocation (`quire.memory.paged`).

Invariants
    D1  an address is an integer that only the device's own calls dereference. Tensors made of an allocation carry it
        (`data_ptr`), and their shapes and strides; only the device reads and writes their elements.
    D2  copies are ordered with the device's attention: each call sees the bytes that the call before it wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch

from quire.backends import extension
from quire.memory.free_memory import free_address_bytes, free_memory_bytes, taken_bytes
from quire.memory.heap import Heap, physical_bytes
from quire.memory.placement import MemfdBackend, PlacementBackend
from quire.torch_threads import one_torch_thread

__all__ = [
    "HOST",
    "Allocation",
    "DeviceMemory",
    "HostMemory",
    "MappedMemory",
    "PageAllocation",
    "page_allocation",
]


class Allocation(Protocol):
    """A range of the device's addresses; `quire.memory.heap.Heap` says what each call does on this machine.

    `prefer_huge_pages` may do nothing, and `commit` may return False: not done.
    """

    def tensor(self, dtype: torch.dtype) -> torch.Tensor: ...
    def prefer_huge_pages(self, start: int, stop: int) -> None: ...
    def commit(self, start: int, stop: int) -> bool: ...
    def release(self, start: int, stop: int) -> None: ...
    def committed_bytes(self, start: int = 0, stop: int | None = None) -> int: ...
    def close(self) -> None: ...


class PageAllocation(Allocation, Protocol):
    """An allocation that has memory only where `commit` was called: touching any other byte is a fault of the device.

    `commit` raises CapacityError if there is no memory; nothing has changed then. `commit_ahead` does the same soon, by
    a thread of its own, or nothing. page_bytes: unit of its memory. commits_on_write: False.
    """

    page_bytes: int
    commits_on_write: bool

    def commit_ahead(self, start: int, stop: int) -> None: ...


def page_allocation(allocation: Allocation) -> PageAllocation | None:
    """The allocation, if its user has to commit before a write; None if a write commits."""
    return None if getattr(allocation, "commits_on_write", True) else cast(PageAllocation, allocation)


class DeviceMemory(Protocol):
    """The allocator and the copies of a device."""

    @property
    def is_host(self) -> bool:
        """Whether any code may read and write its bytes in place. Only such a device has storages of rows other than
        `virtual`, disk reads straight into a block, and the extension's fused layers."""
        ...

    @property
    def has_torch_views(self) -> bool:
        """Whether torch's own operators on `torch_device` may read and write tensors of its allocations: then any
        forward runs on views of rows in `quire.hf`."""
        ...

    @property
    def has_virtual_rows(self) -> bool:
        """Whether it has memory that can be mapped into rows of addresses (`storage="virtual"`)."""
        ...

    def mapped_memory(self) -> MappedMemory:
        """That memory; its own, if any of it can be mapped. *raises:* BackendError: it has none, with the reason."""
        ...

    @property
    def is_elastic(self) -> bool:
        """Whether a reservation takes memory only where it is written and gives it back by `release`. Otherwise it
        takes all of it at once: then a storage reserves its blocks and no more, and never grows."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where the model's modules compute."""
        ...

    def total_bytes(self) -> int:
        """Total memory of the device: an allocation is never larger."""
        ...

    def free_bytes(self) -> int:
        """Bytes that this process can still take. Read when a budget is made."""
        ...

    def reserve(self, num_bytes: int) -> Allocation:
        """Addresses for `num_bytes`; a write commits the memory, so a storage reserves all that it may ever need. Any
        thread may call it and close the allocation. *raises:* CapacityError: not enough addresses."""
        ...

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        """Copy the first tokens of blocks, row after row, in every layer of every pool.

        pools: [layers, blocks, kv_heads, block_size, head_dim] each, tensors of an allocation. copies: int [m, 3],
        source block, destination block, number of tokens; already checked. Cost: a copy of those bytes.
        """
        ...

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        """Gather pieces of an allocation into host memory, or scatter them from there. May be called by any thread.

        payload: dense uint8, in host memory. pieces: int64 [pieces, 5], columns: offset in the payload (bytes),
        address, rows, bytes of a row, bytes from one row to the next at the address; rows are adjacent in the payload.
        The call returns when the payload may be used again. Cost: a copy of those bytes.
        """
        ...

    def is_lost(self) -> bool:
        """Whether every call of the device fails from now on. Asked after an error."""
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory as the model's modules take it; the same object if the device is the host."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result of the model in host memory; waits for it."""
        ...


class MappedMemory(DeviceMemory, Protocol):
    """Memory of a device that can be mapped into rows of addresses, and its copies."""

    def open_placement(self) -> PlacementBackend:
        """The calls that map it."""
        ...


class HostMemory:
    """This machine's own memory. copied_by: name of the back end whose code copies, see `quire.backends.extension`."""

    is_host = is_elastic = has_virtual_rows = has_torch_views = True
    torch_device = torch.device("cpu")
    copied_by: str | None = None

    def mapped_memory(self) -> MappedMemory:
        return self

    def open_placement(self) -> PlacementBackend:
        return MemfdBackend()

    def total_bytes(self) -> int:
        """At most half of what the process's address limit leaves; the other half is for everything else."""
        return min(physical_bytes(), free_address_bytes() // 2)

    def free_bytes(self) -> int:
        return max(0, free_memory_bytes() - taken_bytes())

    def reserve(self, num_bytes: int) -> Allocation:
        return Heap(num_bytes)

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        with one_torch_thread():  # a copy is too short for a second thread to be worth waking
            for source, destination, num_tokens in copies.tolist():
                for pool in pools:
                    pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        """By the extension, which releases the GIL, at about the speed of memcpy; without it a memmove for each row."""
        native = extension(self.copied_by)
        if native is not None:
            native.copy_rows(payload, pieces, to_device)
            return
        base = payload.ctypes.data
        for offset, address, num_rows, row_bytes, stride in pieces.tolist():
            for row in range(num_rows):
                ours, theirs = base + offset + row * row_bytes, address + row * stride
                ctypes.memmove(theirs if to_device else ours, ours if to_device else theirs, row_bytes)

    def is_lost(self) -> bool:
        return False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


HOST = HostMemory()
