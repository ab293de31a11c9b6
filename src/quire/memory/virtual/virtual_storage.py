"""The virtual storage: every sequence has a row of addresses, which the machine's page tables map to its blocks.

Not a pool, not a scheduler: the cache knows the content of blocks. Before a step `prepare` compares the blocks of each
sequence with those its row leads to, and maps the differences; a kernel then sees one contiguous tensor for each
sequence and needs no block table.

A block is `block_size` tokens, or several times as many: in every layer of its group one piece of keys and one of
values, whole pages, at a place of the placement heap that its number fixes. So consecutive blocks are one mapping. Rows
are token-major, [token, kv_head, head_dim], and `row_tokens` long; only mapped blocks cost memory. A table has one
entry, the row: slot = row * row_tokens + position. All groups of layers use the same rows, so there is one table:
`row_places`. With `step_tokens`, rows of groups with a window are mirror rings, with a table for each kind of window:
`window_ring`.

    used    a row of an open sequence
    parked  a row of an ended sequence: still mapped; a new sequence with most of its blocks there adopts it

Invariants
    U1  after `prepare`, the row of each of the step's sequences leads to its blocks, in every layer of every group, and
        a row that is not a ring has no mapping where a window has given blocks back.
    U2  the heap holds a block from the first step that needs it until `give_back` or `resize`: its bytes stay.
    U3  a `prepare` that fails has changed no row of an open sequence.

Cost: `prepare` compares [sequences, blocks] in numpy, tens of us, less if they equal those of the step before; then
about 10 us for each new piece, two pieces a layer (docs/virtual-memory.md). `view` makes two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import ArgumentError, BackendError, CapacityError
from quire.memory.block_bytes import BlockStorage
from quire.memory.block_pieces import BlockPieces, BlockPlaces
from quire.memory.device_memory import HOST, MappedMemory
from quire.memory.heap import physical_bytes
from quire.memory.placement import PlacementBackend, PlacementHeap, unsupported_reason
from quire.memory.placement.memfd import MemfdBackend
from quire.memory.storage import Capabilities, TablePlan
from quire.memory.view import KVView
from quire.memory.virtual.page_sizes import (
    check_block_size,
    layer_buffer_bytes,
    piece_bytes_of,
    run_blocks,
    virtual_block_size,
)
from quire.memory.virtual.row_map import RowMap
from quire.memory.virtual.row_places import RowShape, placements
from quire.memory.virtual.rows import Rows
from quire.memory.virtual.window_ring import make_places
from quire.spec import KVGroup, KVSpec, format_of
from quire.step import GroupPlan, Int64Array, StepPlan

__all__ = ["VirtualStorage", "virtual_block_size"]


class VirtualStorage(BlockStorage):
    """Keys and values of all layers of `spec`, in `num_blocks` blocks that are mapped where sequences need them.

    Args:
        spec: the model's KV shape.
        num_blocks: blocks to begin with.
        block_size: tokens of a block (of the smallest, `KVGroup.block_factor`), such that pieces are whole pages: see
            `virtual_block_size`.
        max_model_len: maximum tokens of a sequence, the length of a row. max_num_seqs: number of rows.
        max_blocks: blocks `resize` can reach; as many as the machine's memory holds if not given.
        backend: of the placement heap; the device's if not given.
        step_tokens: maximum tokens that a step adds to a sequence, lookahead included; if given, groups with a window
            have rings.
        device: its page tables translate, and its copies move bytes.

    Raises:
        ArgumentError: an argument out of range.
        BackendError: this machine cannot map memory at chosen addresses; the text says what to do.
        CapacityError: the address space cannot be reserved.
    """

    capabilities = Capabilities(shares_prefix=True, elastic=True)
    generation = 0  # views cover all rows, so they stay valid

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_blocks: int | None = None,
        backend: PlacementBackend | None = None,
        step_tokens: int | None = None,
        device: MappedMemory = HOST,
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("step_tokens", 1 if step_tokens is None else step_tokens),
        ):
            if value < 1:
                raise ArgumentError(f"expected a {name} of at least 1, got {value}")
        if max_blocks is not None and max_blocks < num_blocks:
            raise ArgumentError(f"expected max_blocks of at least num_blocks={num_blocks}, got {max_blocks}")
        if backend is None and not device.is_host:
            backend = device.open_placement()
        elif backend is None:
            if (reason := unsupported_reason()) is not None:
                raise BackendError(
                    f"storage virtual does not work on this machine: {reason}; use storage paged"
                )
            backend = MemfdBackend()
        self.spec = spec
        self.device = device
        self.block_size = block_size
        self.dtype = format_of(spec.dtype).torch_dtype
        self.block_pieces = BlockPieces(spec)
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self._home = {
            layer: (group, slot) for group in spec.groups for slot, layer in enumerate(group.layers)
        }
        check_block_size(block_size, spec, backend.page_bytes)

        # Lanes: keys and values of slot j, which has the j-th layer of every group, as large as the largest group's; no
        # lane for values of a slot with latent layers only.
        num_slots = max(len(group.layers) for group in spec.groups)
        piece_bytes = [piece_bytes_of(group, num_slots, block_size) for group in spec.groups]
        largest = layer_buffer_bytes(spec, block_size)
        used = [lane for lane, size in enumerate(largest) if size]
        self._buffer_of = {lane: index for index, lane in enumerate(used)}
        layer_buffers = [largest[lane] for lane in used]
        piece_bytes = [[sizes[lane] for lane in used] for sizes in piece_bytes]
        self.run_blocks = run_blocks(layer_buffers)
        total_bytes = physical_bytes() if device.is_host else device.total_bytes()
        self.max_blocks = max_blocks or max(num_blocks, total_bytes // sum(layer_buffers))
        self._heap = PlacementHeap(layer_buffers, max_blocks=self.max_blocks, backend=backend)
        # Rows of all groups have equally many tokens: whole nodes.
        node_tokens, frame = spec.tokens_per_node(block_size), self._heap.frame_blocks
        nodes_per_row = -(-max_model_len // node_tokens)
        if nodes_per_row * max(group.blocks_per_node for group in spec.groups) >= frame:
            # Every row begins on a huge page, like the runs of blocks that it leads to.
            nodes_per_row = -(-nodes_per_row // frame) * frame
        self.row_tokens = nodes_per_row * node_tokens
        shapes = [
            RowShape(
                max_num_seqs,
                nodes_per_row * group.blocks_per_node,
                group.tokens_per_block(block_size),
                self.dtype,
                self._buffer_of,
            )
            for group in spec.groups
        ]
        try:
            self._places = [
                make_places(self._heap, group, sizes, shape, step_tokens)
                for group, sizes, shape in zip(spec.groups, piece_bytes, shapes, strict=True)
            ]
        except CapacityError as error:
            raise CapacityError(
                f"{error} - {max_num_seqs} rows of {self.row_tokens} tokens; lower max_model_len or max_num_seqs"
            ) from error
        self._ranges = [places.range for places in self._places]
        # One table for plain rows and one for the rings of each kind of window, made from the first such group.
        kinds = [places.span and (places.span, places.block_size) for places in self._places]
        self._first_group_of_table = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
        self._table_of = [[kinds[i] for i in self._first_group_of_table].index(kind) for kind in kinds]
        self._rows = Rows(max_num_seqs)
        self._map = RowMap(self._heap, self._places, self._rows, self.max_blocks)
        # Sequences, cache tables and table entries of the previous step, while the rows still lead there.
        self._previous: tuple[list[int], list[np.ndarray], list[np.ndarray]] | None = None

    # Properties

    @property
    def num_tables(self) -> int:
        return len(self._first_group_of_table)

    def table_of(self, layer: int) -> int:
        return self._table_of[self._home[self.spec.stored_in(layer)][0].index]

    @property
    def block_bytes(self) -> int:
        """Maximum bytes of one block: its pieces in every slot."""
        return self._heap.block_bytes

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory the heaps take now (disk blocks of their files), parked and free blocks included."""
        return self._heap.committed_bytes

    @property
    def bytes_reserved(self) -> int:
        """Bytes of address space of its rows, mapped or not."""
        return sum(address_range.num_bytes for address_range in self._ranges)

    @property
    def num_mappings(self) -> int:
        """Upper bound of the process's memory mappings that it uses."""
        return self._heap.num_mappings

    def row_of(self, sequence_id: int) -> int | None:
        """The row of an open sequence that has been in a step; without a ring `view(layer).k[row]` are its keys."""
        return self._rows.row_of.get(sequence_id)

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (of the layer whose KV it shares, where it does).

        [entries, kv_heads, row_tokens, head_dim]; only addresses that a step mapped may be touched. An entry is a row,
        or a stretch of a ring.
        """
        group, slot = self._home[self.spec.stored_in(layer)]
        return self._places[group.index].view(slot)

    # Steps

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        """Map the blocks of the step's sequences and run the plan's copies; see `Storage.prepare`."""
        ids = np.asarray(sequence_ids).tolist()
        groups = plan.groups
        tables = [group.block_tables for group in groups]
        entries = self._previous_entries(ids, tables)  # the usual case
        if entries is None or any(len(group.copies) for group in groups):
            entries = self._find_entries(ids, tables, groups)
        return placements(plan, entries, self.row_tokens)

    def run_copies(self, plan: StepPlan) -> None:
        """Hold the plan's blocks, commit all of their memory, and run the plan's copies; see
        `BlockStorage.run_copies`."""
        for index, address_range in enumerate(self._ranges):
            group = plan.group(index)
            block_ids = np.unique(group.block_tables[group.block_tables >= 0])
            self._map.hold(block_ids)
            self._heap.commit(block_ids, address_range.piece_bytes)
            self._copy(group.copies, index)

    def block_places(self, group: KVGroup, block_ids: np.ndarray) -> BlockPlaces:
        """Where blocks of a group lie in the heap, for `quire.memory.block_bytes`; `run_copies` has committed them."""
        sizes = tuple(dim * self.dtype.itemsize for dim in group.row_elements)
        addresses = np.stack(
            [
                [
                    self._heap.addresses(block_ids, self._buffer_of[2 * slot + kind])
                    for slot in range(len(group.layers))
                ]
                for kind in range(len(sizes))
            ]
        )
        return BlockPlaces(addresses, sizes, tuple(group.num_kv_heads * size for size in sizes))

    def forget(self, sequence_ids: Int64Array) -> None:
        """Park the rows of ended sequences: they stay mapped, for later sequences."""
        self._park(
            [sequence for sequence in np.asarray(sequence_ids).tolist() if sequence in self._rows.row_of]
        )

    # Memory given back

    def give_back(self, block_ids: Any) -> None:
        """Give the memory of these blocks back to the operating system, wherever they lie. Their content is lost.

        They may be used again at any time. Rows that still lead to these blocks are unmapped there.

        Args:
            blocks: distinct integers [m], of no open sequence.

        Raises:
            CapacityError: the system refuses to unmap; nothing has changed then.
        """
        self._previous = None
        ids = np.asarray(block_ids, np.int64).reshape(-1)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_blocks):
            raise ArgumentError(
                f"expected blocks of 0 to {self.num_blocks - 1}, got {ids.min()} to {ids.max()}"
            )
        self._map.give_back(ids)

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks to `num_blocks`; the memory of dropped blocks goes back at once.

        The caller makes sure that no block at or above `num_blocks` is in use.

        Raises:
            ArgumentError: fewer than one block.
            CapacityError: more than `max_blocks`; nothing was changed.
        """
        if num_blocks < 1:
            raise ArgumentError(f"expected at least 1 block, got {num_blocks}")
        if num_blocks > self.max_blocks:
            raise CapacityError(
                f"cannot grow the KV storage to {num_blocks} blocks of {self.block_bytes} bytes: it was built for "
                f"{self.max_blocks}; build it with a larger max_blocks"
            )
        if num_blocks < self.num_blocks:
            self.give_back(np.arange(num_blocks, self.num_blocks))
        self.num_blocks = num_blocks

    def fill(self, value: float) -> None:
        """Set every element of every block, which commits them all. For tests that poison unwritten slots."""
        block_ids = np.arange(self.num_blocks)
        self._map.hold(block_ids)
        for row_range in self._ranges:
            every = self._heap.reserve(self.num_blocks, row_range.piece_bytes)
            self._heap.map([(every, block_ids, block_ids)])
            for layer_buffer, size in enumerate(row_range.piece_bytes):
                if size:
                    every.tensor(layer_buffer, self.dtype).fill_(value)
            self._heap.release(every)

    def check(self) -> None:
        """Check the invariants of the heap and the rings. *raises:* InvariantError."""
        self._heap.check()
        for places in self._places:
            places.check()

    def close(self) -> None:
        """Give all memory back; views must not be touched any more. Twice is harmless."""
        self._heap.close()
        self.close_states()
        self._previous = None
        self._rows.row_of.clear()
        self._map.is_held[:] = False

    # Internals

    def _previous_entries(self, ids: list[int], tables: list[np.ndarray]) -> list[np.ndarray] | None:
        """The entries of the previous step, if it had the same sequences and blocks; else None."""
        if self._previous is None or self._previous[0] != ids:
            return None
        same = all(np.array_equal(table, last) for table, last in zip(tables, self._previous[1], strict=True))
        return self._previous[2] if same else None

    def _find_entries(
        self, ids: list[int], tables: list[np.ndarray], groups: Sequence[GroupPlan]
    ) -> list[np.ndarray]:
        """Map the blocks of the tables into the rows of these sequences, and run the copies."""
        self._previous = None
        adopted = self._rows.adopt(ids, tables, self._places)
        rows = np.array([self._rows.row_of[sequence] for sequence in ids], np.int64)
        try:
            self._map.map_rows(rows, tables)
            for index, group in enumerate(groups):
                self._copy(group.copies, index)
        except BaseException:
            self._park(adopted)
            raise
        entries = [self._places[index].entries(rows, tables[index]) for index in self._first_group_of_table]
        self._previous = ids, tables, entries
        return entries

    def _park(self, sequences: list[int]) -> None:
        if sequences:
            self._previous = None
        self._rows.park(sequences)

    def _copy(self, copies: np.ndarray, index: int) -> None:
        """Copy blocks in every layer of the group. copies: rows of (source block, target block, tokens)."""
        if len(copies):
            tokens = self._places[index].block_size
            token_bytes = [size // tokens for size in self._ranges[index].piece_bytes]
            for source, target, tokens in np.asarray(copies).tolist():
                self._heap.copy(source, target, [tokens * size for size in token_bytes])
