"""The paged storage: turns block ids into bytes.

Not a pool: it does not know which blocks are in use, who owns them, or their content.

The layers of a group lie in *slots*: the j-th layer of every group is in slot j, and block u of a group is block u of
all that group's slots. Each slot is a region of one elastic heap, so blocks of all groups come from one pool, a layer's
blocks lie together, and growing needs no system call. If groups have unequal numbers of layers, there is one slot: it
holds all layers of a block, one after the other. Keys and values of a head are one linear stream:

    block = [kv_head, {K, V}, token, head_dim]

A latent layer has only K.

Invariants
    S1  no two blocks overlap; no block overlaps another slot.
    S2  a block never moves: addresses stay the same through `resize`.
    S3  bytes of blocks at or above `num_blocks` are given back (except the page that the boundary cuts), and committed
        memory never exceeds the blocks' bytes, whatever the page size.
    S4  a write commits memory, or `commit_ahead` does; after the first give-back `commit_ahead` never does again. If a
        device's memory is not committed by a write, a block has memory before a step writes there.
    S5  groups of unequal shape share blocks of the largest size; a smaller group leaves the rest unused;
        `KVSpec.groups` keeps that small (K4).

Cost: `view` makes two tensors, about 10 us (the engine asks once); `copy` two device copies for each row, over all
layers; growing costs nothing, shrinking one system call per slot, `give_back` one per slot and run of neighbours. On a
device whose memory is not committed by a write, `prepare` commits new blocks, and has the page behind them committed
ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import ArgumentError, BackendError, CapacityError
from quire.memory.block_bytes import BlockStorage
from quire.memory.block_pieces import BlockPieces, BlockPlaces
from quire.memory.device_memory import HOST, DeviceMemory, PageAllocation, page_allocation
from quire.memory.heap import HUGE_PAGE_BYTES
from quire.memory.storage import Capabilities, TablePlan
from quire.memory.view import KVView
from quire.spec import KVGroup, KVSpec, format_of
from quire.step import Int64Array, StepPlan

__all__ = ["MAX_BLOCK_SIZE", "PagedStorage", "paged_block_bytes"]

MAX_BLOCK_SIZE = 512


def paged_block_bytes(spec: KVSpec, block_size: int) -> int:
    """Bytes of one block of a `PagedStorage`, over all slots."""
    return _num_slots(spec) * _block_elements(spec, block_size) * format_of(spec.dtype).torch_dtype.itemsize


def _num_slots(spec: KVSpec) -> int:
    """One slot for each layer of a group if all groups have equally many, else one slot for all."""
    counts = {group.max_layers for group in spec.groups}
    return counts.pop() if len(counts) == 1 else 1


def _block_elements(spec: KVSpec, block_size: int) -> int:
    """Elements of one block in a slot."""
    layers_of_slot = {group.index: group.max_layers // _num_slots(spec) for group in spec.groups}
    return max(
        group.tokens_per_block(block_size)
        * layers_of_slot[group.index]
        * group.num_kv_heads
        * sum(group.row_elements)
        for group in spec.groups
    )


class PagedStorage(BlockStorage):
    """Keys and values of all layers of `spec`, in `num_blocks` blocks of `block_size` tokens.

    Args:
        spec: the model's KV shape.
        num_blocks: blocks to begin with.
        block_size: tokens of a block, 1 to 512; several times as many in a group with a smaller token
            (`KVGroup.tokens_per_block`).
        max_blocks: blocks `resize` can reach; as many as an elastic device's memory holds if not given, else
            `num_blocks`.
        device: owner of the memory; its copies move the bytes.

    Raises:
        ArgumentError: an argument out of range.
        CapacityError: the address space cannot be reserved.
    """

    run_blocks = 1  # of the cache: committed memory stays contiguous
    capabilities = Capabilities(shares_prefix=True, elastic=True)

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        *,
        max_blocks: int | None = None,
        device: DeviceMemory = HOST,
    ) -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ArgumentError(f"expected a block size of 1 to {MAX_BLOCK_SIZE}, got {block_size}")
        if num_blocks < 1:
            raise ArgumentError(f"expected at least 1 block, got {num_blocks}")
        if max_blocks is not None and max_blocks < num_blocks:
            raise ArgumentError(f"expected max_blocks of at least num_blocks={num_blocks}, got {max_blocks}")
        self.spec = spec
        self.device = device
        self.block_size = block_size
        self.dtype = format_of(spec.dtype).torch_dtype
        self.block_pieces = BlockPieces(spec)
        self._first_places: dict[int, tuple[BlockPlaces, np.ndarray]] = {}  # by group
        self.num_blocks = num_blocks
        self.num_tables = len(spec.groups)
        self._committing = threading.Lock()  # held by whoever commits ahead, or gives memory back
        self._gave_back = False
        self.num_slots = _num_slots(spec)
        self._home = {
            layer: (group, place) for group in spec.groups for place, layer in enumerate(group.layers)
        }

        self._block_elements = _block_elements(spec, block_size)

        if max_blocks is None:
            max_blocks = num_blocks
            if device.is_elastic:
                max_blocks = max(num_blocks, device.total_bytes() // self.block_bytes)
            try:
                self._reserve(max_blocks)
            except CapacityError:
                # An address-space limit: reserve `num_blocks`, without room to grow.
                self._reserve(num_blocks)
        else:
            self._reserve(max_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all slots."""
        return paged_block_bytes(self.spec, self.block_size)

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory the storage takes now, as the operating system counts them."""
        return sum(
            self._heap.committed_bytes(start, start + self.num_blocks * block_bytes)
            for start, block_bytes in self._slots()
        )

    @property
    def generation(self) -> int:
        """Equal to `num_blocks`: a view covers all blocks and changes with their number."""
        return self.num_blocks

    def table_of(self, layer: int) -> int:
        return self._home[layer][0].index

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        """Run the plan's copies; its placements are the plan's own tables."""
        if self._pages is not None:
            with self._committing:
                self._back(self._written_blocks(plan))
        tables: list[TablePlan] = []
        for index, group in enumerate(plan.groups):
            if len(copies := group.copies):
                self.copy(copies, index)
            tables.append((group.block_tables, group.slot_mapping))
        return tables

    def run_copies(self, plan: StepPlan) -> None:
        """See `BlockStorage.run_copies`: the plan's copies."""
        if self._pages is not None:
            with self._committing:
                self._back(np.concatenate([group.block_tables.reshape(-1) for group in plan.groups]))
        for index, group in enumerate(plan.groups):
            self.copy(group.copies, index)

    def forget(self, sequence_ids: Int64Array) -> None:
        """Does nothing: the storage keeps no data of a sequence."""

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (of the layer whose KV it shares, where it does).

        The view covers the present `num_blocks`: call again after `resize`.
        """
        group, place = self._home[self.spec.stored_in(layer)]
        return KVView.of_rows([part[place] for part in self._tensors(group)], group.layer)

    def block_places(self, group: KVGroup, block_ids: np.ndarray) -> BlockPlaces:
        """Where blocks of a group lie, for `quire.memory.block_bytes`."""
        first = self._first_places.get(group.index)
        if first is None:
            first = self._first_places[group.index] = self._places_of_block_0(group)
        places, block_strides = first
        return replace(places, addresses=places.addresses + block_strides * block_ids)

    def _places_of_block_0(self, group: KVGroup) -> tuple[BlockPlaces, np.ndarray]:
        """The places of block 0, and int64 [kinds, 1, 1], bytes from one block to the next. A heap never moves, so they
        stay valid."""
        parts = self._tensors(group)
        itemsize = self.dtype.itemsize
        layers = np.arange(len(group.layers))[:, None]
        addresses = np.stack([part.data_ptr() + layers * (part.stride(0) * itemsize) for part in parts])
        block_strides = np.array([part.stride(1) * itemsize for part in parts])[:, None, None]
        places = BlockPlaces(
            addresses,
            tuple(part.stride(2) * itemsize for part in parts),
            tuple(part.stride(3) * itemsize for part in parts),
            parts[-1].data_ptr() - parts[0].data_ptr(),
        )
        return places, block_strides

    def copy(self, copies: npt.ArrayLike, group: int = 0) -> None:
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
        tokens = self.spec.groups[group].tokens_per_block(self.block_size)
        if rows.min() < 0 or rows[:, :2].max() >= self.num_blocks or rows[:, 2].max() > tokens:
            raise ArgumentError(
                f"expected copies among {self.num_blocks} blocks of {tokens} tokens, got {rows.tolist()}"
            )
        self.device.copy_blocks(self._tensors(self.spec.groups[group]), rows)

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks to `num_blocks`. Shrinking gives the memory of the dropped blocks back at once.

        The caller makes sure that no block at or above `num_blocks` is in use.

        Raises:
            ArgumentError: fewer than one block.
            CapacityError: more than the reserved address space holds; nothing was changed.
        """
        if num_blocks < 1:
            raise ArgumentError(f"expected at least 1 block, got {num_blocks}")
        if num_blocks > self.max_blocks:
            raise CapacityError(
                f"cannot grow the KV storage to {num_blocks} blocks: memory was reserved for "
                f"{self.max_blocks} of {self.block_bytes} bytes, the number given at the start or allowed by the "
                "process's limits; build it with a larger max_blocks, or raise the limit (ulimit -v)"
            )
        if num_blocks < self.num_blocks:
            with self._giving_back():
                (first,), _ = self._unbacked(np.array([num_blocks]), np.array([self.num_blocks - 1]))
                for start, block_bytes in self._slots():
                    self._heap.release(
                        start + int(first) * block_bytes, start + self.num_blocks * block_bytes
                    )
                self.num_blocks = num_blocks
        self.num_blocks = num_blocks
        self._prefer_huge_pages()

    def give_back(self, block_ids: Any) -> None:
        """Give the memory of these blocks back to the operating system, wherever they lie. Their content is lost.

        They may be used again at any time. Only whole pages go: a page shared with another block stays. Memory behind
        the last block belongs to no block and goes with it.

        Args:
            blocks: distinct integers [m].
        """
        ids = np.sort(np.asarray(block_ids, np.int64).reshape(-1))
        if ids.size == 0:
            return
        if ids[0] < 0 or ids[-1] >= self.num_blocks:
            raise ArgumentError(f"expected blocks of 0 to {self.num_blocks - 1}, got {ids[0]} to {ids[-1]}")
        ends = np.flatnonzero(np.diff(ids) != 1)
        firsts, lasts = ids[np.r_[0, ends + 1]], ids[np.r_[ends, ids.size - 1]]
        with self._giving_back():
            self._release(*self._unbacked(firsts, lasts))

    def commit_ahead(self, first: int, stop: int) -> bool:
        """Commit memory for blocks `first` .. `stop` before anything is written there; their content stays.

        Any thread may make this call, concurrently with any other. Returns whether it was done. It is not done beyond
        `num_blocks`, after memory was given back (the pool shrinks then), or if the kernel cannot.
        """
        with self._committing:
            if self._gave_back or not 0 <= first < stop <= self.num_blocks:
                return False
            if self._pages is not None:
                try:
                    self._back(np.arange(first, stop))
                except CapacityError:
                    return False
                return True
            return all(
                self._heap.commit(start + first * block_bytes, start + stop * block_bytes)
                for start, block_bytes in self._slots()
            )

    def fill(self, value: float) -> None:
        """Set every element of every block, which commits them all. For tests that poison unwritten slots."""
        if self._pages is not None:
            with self._committing:
                self._back(np.arange(self.num_blocks))
        elements = self._heap.tensor(self.dtype)
        for start, block_bytes in self._slots():
            first = start // self.dtype.itemsize
            elements[first : first + self.num_blocks * block_bytes // self.dtype.itemsize] = value

    def close(self) -> None:
        """Give all memory back."""
        self._first_places.clear()
        self.close_states()
        with self._giving_back():
            self._heap.close()

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        with self._committing:
            self._gave_back = True
            yield

    # Memory that a write does not commit

    def _written_blocks(self, plan: StepPlan) -> np.ndarray:
        """The blocks that a step writes: those of new tokens, of lookahead positions, and targets of copies."""
        found: list[np.ndarray] = []
        for group, kind in zip(plan.groups, self.spec.groups, strict=True):
            tokens = kind.tokens_per_block(self.block_size)
            found += [group.slot_mapping // tokens, group.lookahead_slots // tokens, group.copies[:, 1]]
        return np.concatenate(found)

    def _back(self, block_ids: np.ndarray) -> None:
        """Commit memory for these blocks, -1 for none.

        *raises:* CapacityError: the device has not so much; the memory of blocks is as before then.
        """
        pages, backed = self._pages, self._is_backed
        assert pages is not None
        if backed[block_ids].all():  # the last entry stands for -1
            return
        lacking = np.unique(block_ids[~backed[block_ids]])
        ends = np.flatnonzero(np.diff(lacking) != 1)
        firsts, lasts = lacking[np.r_[0, ends + 1]], lacking[np.r_[ends, lacking.size - 1]]
        try:
            try:
                self._commit(pages, firsts, lasts)
            except CapacityError:
                # Pages that were committed ahead make way.
                edges = np.r_[-1, np.flatnonzero(backed[: self.num_blocks]), self.num_blocks]
                gaps = np.flatnonzero(np.diff(edges) > 1)
                self._release(edges[gaps] + 1, edges[gaps + 1] - 1)
                self._commit(pages, firsts, lasts)
        except BaseException:
            with suppress(CapacityError, BackendError):
                self._release(*self._unbacked(firsts, lasts))
            raise
        backed[lacking] = True
        first = int(lasts[-1]) + 1
        for start, block_bytes in self._slots() if first < self.num_blocks else []:
            stop = min(first + -(-pages.page_bytes // block_bytes), self.num_blocks)
            pages.commit_ahead(start + first * block_bytes, start + stop * block_bytes)

    def _commit(self, pages: PageAllocation, firsts: np.ndarray, lasts: np.ndarray) -> None:
        """Commit runs of blocks in every slot."""
        for start, block_bytes in self._slots():
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                pages.commit(start + first * block_bytes, start + (last + 1) * block_bytes)

    def _unbacked(self, firsts: np.ndarray, lasts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Runs of blocks that lose their memory, extended by the neighbours without any: so a page that several blocks
        share goes with the last of them."""
        if self._pages is None:
            return firsts, lasts
        backed = self._is_backed
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            backed[first : last + 1] = False
        edges = np.r_[-1, np.flatnonzero(backed[: self.num_blocks]), self.num_blocks]
        behind = np.searchsorted(edges, firsts)
        return edges[behind - 1] + 1, edges[behind] - 1

    def _release(self, firsts: np.ndarray, lasts: np.ndarray) -> None:
        """Give the memory of runs of blocks back; that behind the last block goes with it."""
        for start, block_bytes in self._slots():
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                size = (last + 1) * block_bytes if last + 1 < self.num_blocks else self._slot_bytes
                self._heap.release(start + first * block_bytes, start + size)

    def _reserve(self, max_blocks: int) -> None:
        # Regions begin on huge pages, so that giving back a region's tail does not split its neighbour's huge page.
        size = max_blocks * self._block_elements * self.dtype.itemsize
        self._slot_bytes = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._heap = self.device.reserve(self.num_slots * self._slot_bytes)
        self._pages = page_allocation(self._heap)  # None: a write commits
        # Whether each block has memory, and a last entry for "no block"; unused if a write commits.
        self._is_backed = np.zeros(1 if self._pages is None else max_blocks + 1, bool)
        self._is_backed[-1] = True
        self.max_blocks = max_blocks
        self._prefer_huge_pages()

    def _prefer_huge_pages(self) -> None:
        # Only huge pages wholly within present blocks: a storage never commits more than its blocks.
        for start, block_bytes in self._slots():
            self._heap.prefer_huge_pages(start, start + self.num_blocks * block_bytes)

    def _slots(self) -> list[tuple[int, int]]:
        """Byte offset and bytes per block of every slot."""
        block_bytes = self._block_elements * self.dtype.itemsize
        return [(slot * self._slot_bytes, block_bytes) for slot in range(self.num_slots)]

    def _tensors(self, group: KVGroup) -> tuple[torch.Tensor, ...]:
        """Rows of K and V of all layers of a group: [num_layers, num_blocks, num_kv_heads, tokens of a block, row
        elements]; only K of latent layers."""
        itemsize = self.dtype.itemsize
        elements = self._heap.tensor(self.dtype)
        dims, tokens = group.row_elements, group.tokens_per_block(self.block_size)
        layer_elements = group.num_kv_heads * tokens * sum(dims)
        layer_stride = self._slot_bytes // itemsize if self.num_slots > 1 else layer_elements
        return tuple(
            elements.as_strided(
                (len(group.layers), self.num_blocks, group.num_kv_heads, tokens, dim),
                (layer_stride, self._block_elements, tokens * sum(dims), dim, 1),
                offset,
            )
            for dim, offset in zip(dims, (0, tokens * dims[0]), strict=False)
        )
