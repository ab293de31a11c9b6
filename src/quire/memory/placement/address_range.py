"""A reserved range of addresses, and the block mapped at each position of it.

Not an owner of memory: the memory behind an address belongs to the heap. `PlacementHeap.reserve` makes ranges, `map`
and `unmap` change them.

A range has `num_positions` consecutive pieces of addresses for each of the heap's *layer buffers* it uses (the keys of
a layer, say). Position p is mapped in all layer buffers together, to one block's piece of each; so blocks at
consecutive positions are one contiguous tensor in each layer buffer. The layer buffers lie one after another in one
reservation, between two margins where nothing is ever mapped: tensors may begin before a layer buffer and end behind
it.

Invariants
    A1  an address never changes; tensors made of a range keep its reservation alive, also after
        `PlacementHeap.release`.
    A2  touching an address without a block kills the process. Making a tensor touches no address.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from quire.errors import ArgumentError
from quire.memory.placement.backend import PlacementBackend

__all__ = ["AddressRange"]


class _Reservation:
    """The addresses themselves. The last reference to it releases them, and the mappings they count."""

    def __init__(self, backend: PlacementBackend, num_bytes: int, alignment: int) -> None:
        self.address = backend.reserve(num_bytes, alignment)
        self.num_mappings = [1]
        backend.budget.add(1)
        release = weakref.finalize(
            self, _release, backend, self.address, num_bytes, self.num_mappings, os.getpid()
        )
        release.atexit = False  # the end of the process frees all, and a tensor may still exist


def _release(
    backend: PlacementBackend, address: int, num_bytes: int, num_mappings: list[int], process_id: int
) -> None:
    if os.getpid() == process_id:  # a child may have other things at these addresses
        backend.release(address, num_bytes)
        backend.budget.add(-num_mappings[0])


class AddressRange:
    """Made by `PlacementHeap.reserve`. piece_bytes: bytes of a position in each layer buffer of the heap, 0 if
    unused."""

    def __init__(
        self,
        backend: PlacementBackend,
        num_positions: int,
        piece_bytes: Sequence[int],
        alignment: int,
        margin_bytes: int = 0,
    ) -> None:
        self.num_positions = num_positions
        self.piece_bytes = tuple(piece_bytes)
        self.offsets: list[int] = []
        self._margin_bytes = num_bytes = -(-margin_bytes // alignment) * alignment
        for size in self.piece_bytes:
            self.offsets.append(num_bytes)
            num_bytes += -(-num_positions * size // alignment) * alignment
        num_bytes += self._margin_bytes
        self.num_bytes = num_bytes
        self._backend = backend
        self._reservation = _Reservation(backend, num_bytes, alignment)
        self.address = self._reservation.address
        # For each position the block's number plus one, 0 for none, between two zeros: every position has neighbours,
        # and unused entries cost no memory.
        self.entries = np.zeros(num_positions + 2, np.int32)
        self.leaving = np.zeros(num_positions, bool)  # to be unmapped when the running step ends
        self.open = True

    @property
    def num_mappings(self) -> int:
        """Upper bound of the mappings that the operating system keeps for the range."""
        return self._reservation.num_mappings[0]

    @num_mappings.setter
    def num_mappings(self, value: int) -> None:
        self._reservation.num_mappings[0] = value

    @property
    def num_mapped(self) -> int:
        """Positions with a block behind them."""
        return int(np.count_nonzero(self.entries))

    def block_ids(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """int32, the block mapped at each position of [start, stop), -1 without one."""
        stop = self.num_positions if stop is None else stop
        return self.entries[start + 1 : stop + 1] - 1

    def tensor(
        self,
        layer_buffer: int,
        dtype: torch.dtype,
        *,
        before: int = 0,
        behind: int = 0,
        owner: object = None,
    ) -> torch.Tensor:
        """All addresses of a layer buffer as one 1-D tensor, num_positions x piece_bytes[layer_buffer] bytes; touches
        no address.

        It shows the blocks that are mapped, now and later. before, behind: bytes in front of the layer buffer and after
        it that the tensor covers too, up to the range's margin; they belong to other layer buffers or are unmapped.
        owner: kept alive by the tensor.
        """
        if not (0 <= before <= self._margin_bytes and 0 <= behind <= self._margin_bytes):
            raise ArgumentError(
                f"expected up to {self._margin_bytes} bytes before and behind a layer buffer, got {before} and {behind}"
            )
        if not 0 <= layer_buffer < len(self.piece_bytes) or not self.piece_bytes[layer_buffer]:
            used = [index for index, size in enumerate(self.piece_bytes) if size]
            raise ArgumentError(f"expected a layer buffer that the range uses, of {used}, got {layer_buffer}")
        num_bytes = before + self.num_positions * self.piece_bytes[layer_buffer] + behind
        first = self.address + self.offsets[layer_buffer] - before
        return self._backend.tensor(first, num_bytes, dtype, (self._reservation, owner))  # A1
