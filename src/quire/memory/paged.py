"""The paged storage: unit ids become bytes.

Not a pool: it does not know which units are in use, by whom, or what they hold.

The layers of a group lie in *slots*: the j-th layer of every group is in slot j, and unit u of a group is block u of
all that group's slots. Each slot is a region of one elastic heap, so units of all groups come from one pool, a layer's
blocks lie together, and growing needs no system call. Two layouts, both reached through strides alone:

    packed   block = [kv_head, {K, V}, token, head_dim]: K and V of a head are one linear stream
    split    each slot has a pool of K blocks and a pool of V blocks, [kv_head, token, head_dim] each

Invariants
    S1  no two units overlap; no unit overlaps another slot.
    S2  a block never moves: addresses stay the same through `resize`.
    S3  bytes of units at or above `num_blocks` are given back (but for the page that the boundary cuts), and no more is
        committed than the units' bytes, whatever the size of pages.
    S4  memory is committed where it is written, or by `commit_ahead`, and by that never again once any was given back.
    S5  groups of unequal shape share blocks of the largest size; a smaller group leaves the rest unused.

Cost: `view` makes two tensors, about 10 us (the engine asks once); `copy` two torch copies for each row, over all
layers; growing costs nothing, shrinking one system call per slot, `give_back` one per slot and run of neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from quire.errors import ArgumentError, CapacityError
from quire.memory.heap import HUGE_PAGE_BYTES, Heap, physical_bytes
from quire.memory.storage import Capabilities, Placement
from quire.memory.unit_bytes import UnitWriter, read_units, write_units
from quire.memory.unit_pieces import UnitPieces, UnitPlaces
from quire.memory.view import KVView
from quire.spec import KVGroup, KVSpec

__all__ = ["MAX_BLOCK_SIZE", "Layout", "PagedStorage"]

Layout = Literal["packed", "split"]
MAX_BLOCK_SIZE = 512


class PagedStorage:
    """Keys and values of all layers of `spec`, in `num_blocks` units of `block_size` tokens.

    Args:
        spec: the model's KV shape.
        num_blocks: units to begin with.
        block_size: tokens of a unit, 1 to 512.
        dtype: of the stored elements; `spec.dtype` if not given.
        layout: how a unit lies in memory, see above.
        max_blocks: units `resize` can reach; as many as the machine's memory holds if not given.

    Raises:
        ArgumentError: an argument out of range.
        CapacityError: the address space cannot be reserved.
    """

    run_blocks = 1  # of the cache: what is committed stays dense
    capabilities = Capabilities(shares_prefix=True, elastic=True)

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        *,
        layout: Layout = "packed",
        max_blocks: int | None = None,
    ) -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ArgumentError(f"expected a block size of 1 to {MAX_BLOCK_SIZE}, got {block_size}")
        if num_blocks < 1:
            raise ArgumentError(f"expected at least 1 block, got {num_blocks}")
        if layout not in ("packed", "split"):
            raise ArgumentError(f"expected the layout packed or split, got {layout!r}")
        if max_blocks is not None and max_blocks < num_blocks:
            raise ArgumentError(f"expected max_blocks of at least num_blocks={num_blocks}, got {max_blocks}")
        self.spec = spec
        self.block_size = block_size
        self.dtype: torch.dtype = dtype if dtype is not None else getattr(torch, spec.dtype)
        self.unit_pieces = UnitPieces(spec, self.dtype.itemsize)
        self._first_places: dict[int, tuple[UnitPlaces, np.ndarray]] = {}  # by group
        self.layout: Layout = layout
        self.num_blocks = num_blocks
        self._committing = threading.Lock()  # held by whoever commits ahead, or gives memory back
        self._gave_back = False
        self.num_slots = max(len(group.layers) for group in spec.groups)
        self._home = {
            layer: (group, slot) for group in spec.groups for slot, layer in enumerate(group.layers)
        }

        # Pools: where blocks lie side by side in a slot, and how many elements one block takes in each.
        k_elements = [block_size * group.num_kv_heads * group.k_head_dim for group in spec.groups]
        v_elements = [block_size * group.num_kv_heads * group.v_head_dim for group in spec.groups]
        if layout == "packed":
            self._pool_strides = [max(k + v for k, v in zip(k_elements, v_elements, strict=True))]
        else:
            self._pool_strides = [max(k_elements), max(v_elements)]

        if max_blocks is None:
            max_blocks = max(num_blocks, physical_bytes() // self.unit_bytes)
            try:
                self._reserve(max_blocks)
            except CapacityError:
                # An address-space limit: room for what was asked, without room to grow.
                self._reserve(num_blocks)
        else:
            self._reserve(max_blocks)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit: a block in every slot."""
        return self.num_slots * sum(self._pool_strides) * self.dtype.itemsize

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory the storage really takes now, as the operating system tells it."""
        return sum(
            self._heap.committed_bytes(start, start + self.num_blocks * block_bytes)
            for start, block_bytes in self._pools()
        )

    @property
    def num_tables(self) -> int:
        return len(self.spec.groups)

    @property
    def generation(self) -> int:
        """A view names the units there are: it changes with their number."""
        return self.num_blocks

    def table_of(self, layer: int) -> int:
        return self._home[layer][0].index

    def prepare(self, plan: Any, sequence_ids: Any) -> list[Placement]:
        """The plan's own tables, once its copies are done."""
        placements: list[Placement] = []
        self.settle(plan)
        for index in range(plan.num_groups):
            group = plan.group(index)
            placements.append(Placement(group.block_tables, group.slot_mapping))
        return placements

    def settle(self, plan: Any) -> None:
        """See `UnitStorage.settle`: the plan's copies."""
        for index in range(plan.num_groups):
            self.copy(plan.group(index).copies, index)

    def forget(self, sequence_ids: Any) -> None:
        """Nothing is kept for a sequence."""

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (of the layer whose KV it shares, where it does).

        The view covers `num_blocks` as of now: ask again after `resize`.
        """
        if not 0 <= layer < len(self.spec.layers):
            raise ArgumentError(f"expected a layer of 0 to {len(self.spec.layers) - 1}, got {layer}")
        owner = self.spec.layers[layer].shares_kv_with
        group, slot = self._home[layer if owner is None else owner]
        k, v = self._tensors(group)
        return KVView(k[slot], v[slot], self.block_size)

    def unit_places(self, group: KVGroup, units: np.ndarray) -> UnitPlaces:
        """Where blocks of a group lie, for `quire.memory.unit_bytes`."""
        first = self._first_places.get(group.index)
        if first is None:
            first = self._first_places[group.index] = self._places_of_unit_0(group)
        places, unit_strides = first
        return replace(places, addresses=places.addresses + unit_strides * units)

    def _places_of_unit_0(self, group: KVGroup) -> tuple[UnitPlaces, np.ndarray]:
        """Where they lie, and int64 [2, 1, 1], from one unit to the next. Good for ever: a heap does not move."""
        parts = self._tensors(group)
        itemsize = self.dtype.itemsize
        slots = np.arange(len(group.layers))[:, None]
        addresses = np.stack([part.data_ptr() + slots * (part.stride(0) * itemsize) for part in parts])
        unit_strides = np.array([part.stride(1) * itemsize for part in parts])[:, None, None]
        k, v = parts
        places = UnitPlaces(
            addresses,
            (k.stride(2) * itemsize, v.stride(2) * itemsize),
            (k.stride(3) * itemsize, v.stride(3) * itemsize),
            v.data_ptr() - k.data_ptr() if self.layout == "packed" else None,
        )
        return places, unit_strides

    def read_units(
        self, units: Any, num_tokens: int, *, first: int = 0, origins: Sequence[int] | None = None
    ) -> np.ndarray:
        """The bytes of tokens in units, see `quire.memory.unit_bytes`."""
        return read_units(self, units, num_tokens, first=first, origins=origins)

    def unit_writer(self, units: Any) -> UnitWriter:
        """What writes many payloads into these units, see `quire.memory.unit_bytes`."""
        return UnitWriter(self, units)

    def write_units(
        self,
        units: Any,
        payload: np.ndarray,
        num_tokens: int,
        *,
        first: int = 0,
        origins: Sequence[int] | None = None,
    ) -> None:
        """Their bytes, put there."""
        write_units(self, units, payload, num_tokens, first=first, origins=origins)

    def copy(self, copies: Any, group: int = 0) -> None:
        """Copy the first tokens of blocks, in every layer of `group`, row after row.

        Args:
            copies: integers [m, 3], rows of source block, destination block, number of tokens.
            group: index of the group whose blocks these are.
        """
        rows = np.asarray(copies)
        if rows.size == 0:
            return
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ArgumentError(f"expected copies as [m, 3], got {rows.shape}")
        if rows.min() < 0 or rows[:, :2].max() >= self.num_blocks or rows[:, 2].max() > self.block_size:
            raise ArgumentError(
                f"expected copies among {self.num_blocks} blocks of {self.block_size} tokens, got {rows.tolist()}"
            )
        k, v = self._tensors(self.spec.groups[group])
        for source, destination, num_tokens in rows.tolist():
            for pool in (k, v):
                pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]

    def resize(self, num_blocks: int) -> None:
        """Have `num_blocks` units from now on. Shrinking gives the memory of the units given up back at once.

        The caller sees to it that nobody needs a unit at or above `num_blocks`.

        Raises:
            ArgumentError: fewer than one block.
            CapacityError: more than the reserved address space holds; nothing was changed.
        """
        if num_blocks < 1:
            raise ArgumentError(f"expected at least 1 block, got {num_blocks}")
        if num_blocks > self.max_blocks:
            raise CapacityError(
                f"cannot grow the KV storage to {num_blocks} blocks: address space was reserved for "
                f"{self.max_blocks} of {self.unit_bytes} bytes; build it with a larger max_blocks"
            )
        if num_blocks < self.num_blocks:
            with self._giving_back():
                for start, block_bytes in self._pools():
                    self._heap.release(
                        start + num_blocks * block_bytes, start + self.num_blocks * block_bytes
                    )
                self.num_blocks = num_blocks
        self.num_blocks = num_blocks
        self._prefer_huge_pages()

    def give_back(self, units: Any) -> None:
        """Give the memory of these units back to the operating system, wherever they lie. What they held is lost.

        They may be used again at any time. Whole pages only: a page that another unit has a part in stays.

        Args:
            units: distinct integers [m].
        """
        ids = np.sort(np.asarray(units, np.int64).reshape(-1))
        if ids.size == 0:
            return
        if ids[0] < 0 or ids[-1] >= self.num_blocks:
            raise ArgumentError(f"expected units of 0 to {self.num_blocks - 1}, got {ids[0]} to {ids[-1]}")
        ends = np.flatnonzero(np.diff(ids) != 1)
        firsts, lasts = ids[np.r_[0, ends + 1]], ids[np.r_[ends, ids.size - 1]]
        with self._giving_back():
            for start, block_bytes in self._pools():
                for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                    self._heap.release(start + first * block_bytes, start + (last + 1) * block_bytes)

    def commit_ahead(self, first: int, stop: int) -> bool:
        """Have memory behind units `first` .. `stop` before anything is written there; what they hold stays.

        The one call that may come from any thread, beside any other. Whether it was done: not beyond the units there
        are, not once any memory was given back (somebody wants less of it), not where the kernel cannot.
        """
        with self._committing:
            if self._gave_back or not 0 <= first < stop <= self.num_blocks:
                return False
            return all(
                self._heap.commit(start + first * block_bytes, start + stop * block_bytes)
                for start, block_bytes in self._pools()
            )

    def fill(self, value: float) -> None:
        """Set every element of every unit, which commits them all. For tests that poison unwritten slots."""
        elements = self._heap.tensor(self.dtype)
        for start, block_bytes in self._pools():
            first = start // self.dtype.itemsize
            elements[first : first + self.num_blocks * block_bytes // self.dtype.itemsize] = value

    def close(self) -> None:
        """Give all memory back."""
        self._first_places.clear()
        with self._giving_back():
            self._heap.close()

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        with self._committing:
            self._gave_back = True
            yield

    def _reserve(self, max_blocks: int) -> None:
        # Regions begin on huge pages, so that a region's tail can be given back without splitting its neighbour's.
        sizes = [max_blocks * stride * self.dtype.itemsize for stride in self._pool_strides]
        self._pool_bytes = [-(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for size in sizes]
        self._heap = Heap(self.num_slots * sum(self._pool_bytes))
        self.max_blocks = max_blocks
        self._prefer_huge_pages()

    def _prefer_huge_pages(self) -> None:
        # Only those wholly among the units in being: a storage never commits more than its units.
        for start, block_bytes in self._pools():
            self._heap.prefer_huge_pages(start, start + self.num_blocks * block_bytes)

    def _pools(self) -> list[tuple[int, int]]:
        """Byte offset and bytes per block of every pool of every slot."""
        pools: list[tuple[int, int]] = []
        start = 0
        for _ in range(self.num_slots):
            for stride, size in zip(self._pool_strides, self._pool_bytes, strict=True):
                pools.append((start, stride * self.dtype.itemsize))
                start += size
        return pools

    def _tensors(self, group: KVGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all layers of a group: [num_layers, num_blocks, num_kv_heads, block_size, head_dim]."""
        itemsize = self.dtype.itemsize
        elements = self._heap.tensor(self.dtype)
        k_dim, v_dim, tokens = group.k_head_dim, group.v_head_dim, self.block_size
        slot_stride = sum(self._pool_bytes) // itemsize
        if self.layout == "packed":
            head_strides = (tokens * (k_dim + v_dim),) * 2
            block_strides = (self._pool_strides[0],) * 2
            offsets = (0, tokens * k_dim)
        else:
            head_strides = (tokens * k_dim, tokens * v_dim)
            block_strides = (self._pool_strides[0], self._pool_strides[1])
            offsets = (0, self._pool_bytes[0] // itemsize)
        k, v = (
            elements.as_strided(
                (len(group.layers), self.num_blocks, group.num_kv_heads, tokens, dim),
                (slot_stride, block_stride, head_stride, dim, 1),
                offset,
            )
            for dim, block_stride, head_stride, offset in zip(
                (k_dim, v_dim), block_strides, head_strides, offsets, strict=True
            )
        )
        return k, v
