"""Where a storage's bytes live: what allocates them, and the only calls that move them.

A storage, a tier, a swap and a snapshot name bytes by address and never touch them: they ask the device. So a device
whose memory Python cannot reach serves as well as this machine's own. Attention and linear layers of a device are in
`quire.attention.devices`, whose `Device` is this and those in one object.

Not here: which block holds what (`quire.cache`), where a block lies in an allocation (`quire.memory.paged`).

Invariants
    D1  an address is an integer that only the device's own calls follow. Tensors made of an allocation carry it
        (`data_ptr`), and their shapes and strides; their elements are read and written by the device alone.
    D2  the copies are in order with the device's attention: what one wrote the next one reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.backends import extension
from quire.memory.free_memory import free_address_bytes, free_memory_bytes, taken_bytes
from quire.memory.heap import Heap, physical_bytes

__all__ = ["HOST", "Allocation", "DeviceMemory", "HostMemory"]


class Allocation(Protocol):
    """A range of the device's addresses; `quire.memory.heap.Heap` says what each call does on this machine.

    `prefer_huge_pages` may do nothing, and `commit` may answer False: it was not done.
    """

    def tensor(self, dtype: torch.dtype) -> torch.Tensor: ...
    def prefer_huge_pages(self, start: int, stop: int) -> None: ...
    def commit(self, start: int, stop: int) -> bool: ...
    def release(self, start: int, stop: int) -> None: ...
    def committed_bytes(self, start: int = 0, stop: int | None = None) -> int: ...
    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """The allocator and the copies of a device."""

    @property
    def is_host(self) -> bool:
        """Whether any code may read and write its bytes where they are. Only then are there storages other than
        `paged` (`virtual` rows and views of rows in `quire.hf`), reads of a disk straight into a block, and the
        extension's fused layers."""
        ...

    def total_bytes(self) -> int:
        """Memory that it has: an allocation is never larger."""
        ...

    def free_bytes(self) -> int:
        """Bytes of it that this process can still take. Asked for when a budget is made."""
        ...

    def reserve(self, num_bytes: int) -> Allocation:
        """Addresses for `num_bytes`; memory is taken behind them as they are written, so a storage asks for all that it
        may ever need. May be called, and what it gives closed, by any thread. *raises:* CapacityError where it has not
        so many."""
        ...

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        """Copy the first tokens of blocks, row after row, in every layer of every pool.

        pools: [layers, blocks, kv_heads, block_size, head_dim] each, of an allocation. copies: int [m, 3], source
        block, destination block, number of tokens; checked. Cost: a copy of those bytes.
        """
        ...

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        """Gather pieces of an allocation into host memory, or scatter them from there. May be called by any thread.

        payload: dense uint8, in host memory. pieces: int64 [pieces, 5], where each begins in the payload (bytes), its
        address, rows, bytes of a row, bytes from one row to the next at the address; rows lie side by side in the
        payload. It returns when the payload may be used again. Cost: a copy of those bytes.
        """
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory as the model's modules take it; the very same where that is the device's."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the model has computed, in host memory; waits for it."""
        ...


class HostMemory:
    """This machine's own memory. copied_by: the back end whose code copies, as of `quire.backends.extension`."""

    is_host = True
    copied_by: str | None = None

    def total_bytes(self) -> int:
        """No more than half of what a limit of the process leaves: the other half is for everything else."""
        return min(physical_bytes(), free_address_bytes() // 2)

    def free_bytes(self) -> int:
        return max(0, free_memory_bytes() - taken_bytes())

    def reserve(self, num_bytes: int) -> Allocation:
        return Heap(num_bytes)

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        for source, destination, num_tokens in copies.tolist():
            for pool in pools:
                pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        """By the extension, which lets go of Python's lock, at about the speed of memcpy; else a call for each row."""
        native = extension(self.copied_by)
        if native is not None:
            native.copy_rows(payload, pieces, to_device)
            return
        base = payload.ctypes.data
        for offset, address, num_rows, row_bytes, stride in pieces.tolist():
            for row in range(num_rows):
                ours, theirs = base + offset + row * row_bytes, address + row * stride
                ctypes.memmove(theirs if to_device else ours, ours if to_device else theirs, row_bytes)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


HOST = HostMemory()
