"""Reads blocks of a storage as one payload and writes them from it, whatever the storage's layout and block size.

`quire.spec.payload` defines a payload. A storage says where its blocks lie (`BlockPlaces`); the rest is here.

Invariants
    B1  a call reads or writes only the bytes of its tokens. If its caller alone may touch these blocks, it may run in
        any thread, concurrently with any other call; it releases the GIL while it copies.

Cost: one copy by the storage's device (`DeviceMemory.copy_pieces`), on this machine at about the speed of memcpy;
plus about 40 us of arithmetic (28 layers), several times that when the copies in between evict its data from the core's
caches. `BlockWriter` computes most of that ahead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import ArgumentError
from quire.memory.block_pieces import BlockPieces, BlockPlaces, at_places
from quire.memory.device_memory import DeviceMemory
from quire.memory.state_slots import StateSlots
from quire.spec import KVGroup, KVSpec
from quire.step import Int64Array, StepPlan

__all__ = ["BlockStorage", "BlockWriter", "node_table"]

_MAX_PLACES = 512  # buffers for one payload


class BlockStorage:
    """A storage of blocks: a subclass says where blocks lie; turning their bytes into a payload is the same for all.

    Attributes: see `Storage`; here also `block_size` (tokens), `device` (owns the memory and copies it) and
    `block_pieces` (of this spec).

    Tables of blocks are those of `node_table`: int [columns, nodes], a column for each group, or several for a group
    with several blocks to a node.
    """

    spec: KVSpec
    block_size: int
    num_blocks: int
    device: DeviceMemory
    block_pieces: BlockPieces
    states: StateSlots | None = None  # None: the model has no state layers

    def block_places(self, group: KVGroup, block_ids: np.ndarray) -> BlockPlaces:
        """Places of blocks, int64 [blocks]; a prepared plan, or one whose copies were run, uses all of them."""
        raise NotImplementedError

    def close_states(self) -> None:
        """Give back the memory of state slots, if the storage has any. Twice is harmless."""
        if self.states is not None:
            self.states.close()

    def run_copies(self, plan: StepPlan) -> None:
        """Commit memory for the blocks of a plan and run its copies, for a caller that writes their bytes itself.

        Like `prepare`, but it makes no tables and takes no row, which only running sequences have.
        """
        raise NotImplementedError

    def forget(self, sequence_ids: Int64Array) -> None:
        """See `Storage.forget`."""
        raise NotImplementedError

    def commit_ahead(self, first: int, stop: int) -> bool:
        """Commit memory for blocks `first` .. `stop` before anything is written there; from any thread. Returns whether
        it was done; False in a storage whose blocks get memory in the first step that needs them."""
        return False

    def read_blocks(
        self,
        block_ids: Any,
        num_tokens: int,
        *,
        first: int = 0,
        origins: Sequence[int] | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The payload of tokens 0 .. `num_tokens`, uint8; the call reads those from `first` on.

        block_ids: int [columns, nodes], see `BlockStorage`; node 0 begins with token 0. Bytes of blocks whose id is -1,
        and bytes before `first`, stay unchanged (zeros in a new payload). origins: the token at which the payload
        begins in each group, 0 .. num_tokens; it lacks the tokens before. out: a payload to fill.
        """
        if out is None:
            num_bytes = self.block_pieces.layout.num_bytes(num_tokens, self._checked_origins(origins))
            whole = first == 0 and not any(origins or ()) and (np.asarray(block_ids) >= 0).all()
            out = np.empty(num_bytes, np.uint8) if whole else np.zeros(num_bytes, np.uint8)
        self._copy_payload(block_ids, out, num_tokens, first, origins, to_storage=False)
        return out

    def write_blocks(
        self,
        block_ids: Any,
        payload: np.ndarray,
        num_tokens: int,
        *,
        first: int = 0,
        origins: Sequence[int] | None = None,
    ) -> None:
        """Writes tokens `first` .. `num_tokens` of a payload of that many tokens, or of more, into blocks; see
        `read_blocks`.

        The number of tokens of a payload follows from its length. Tokens behind `num_tokens` are not written, nor are a
        group's tokens before its origin.
        """
        self._copy_payload(block_ids, payload, num_tokens, first, origins, to_storage=True)

    def block_writer(self, block_ids: Any) -> BlockWriter:
        """A writer of many payloads into the blocks of one table."""
        return BlockWriter(self, block_ids)

    def _copy_payload(
        self,
        block_ids: Any,
        payload: np.ndarray,
        num_tokens: int,
        first: int,
        origins: Sequence[int] | None,
        *,
        to_storage: bool,
    ) -> None:
        block_ids = np.asarray(block_ids, np.int64)
        origins = self._checked_origins(origins)
        groups, layout = self.spec.groups, self.block_pieces.layout
        total = layout.num_tokens(payload.nbytes, origins)
        if payload.dtype != np.uint8 or not payload.flags.c_contiguous or total is None:
            raise ArgumentError(
                f"expected a dense payload of uint8, {layout.bytes_per_token} for each token, got "
                f"{payload.nbytes} bytes of {payload.dtype}, which begin at {list(origins)}"
            )
        if not 0 <= first <= num_tokens <= total:
            raise ArgumentError(
                f"expected tokens {first} .. {num_tokens} within a payload of {total}, which begins at {list(origins)}"
            )
        node = self.spec.tokens_per_node(self.block_size)
        num_columns, num_nodes = sum(group.blocks_per_node for group in groups), -(-num_tokens // node)
        if block_ids.ndim != 2 or len(block_ids) != num_columns or block_ids.shape[1] < num_nodes:
            raise ArgumentError(
                f"expected blocks [{num_columns}, {num_nodes}] for {num_tokens} tokens in blocks "
                f"of {node}, got {block_ids.shape}"
            )
        if block_ids.size and not (block_ids.min() >= -1 and block_ids.max() < self.num_blocks):
            raise ArgumentError(
                f"expected blocks of -1 to {self.num_blocks - 1}, got {block_ids.min()} to {block_ids.max()}"
            )
        if first == num_tokens:
            return
        parts: list[np.ndarray] = []
        for group, own in zip(groups, _by_group(groups, block_ids), strict=True):
            origin, size = origins[group.index], group.tokens_per_block(self.block_size)
            blocks = np.arange(first // size, -(-num_tokens // size))
            kept = blocks[(own[blocks] >= 0) & ((blocks + 1) * size > origin)]
            if len(kept):
                starts, stops = (
                    np.maximum(kept * size, max(first, origin)),
                    np.minimum((kept + 1) * size, num_tokens),
                )
                places = self.block_places(group, own[kept])
                table = self.block_pieces.pieces(group, places, total, origins, kept * size, starts, stops)
                parts.append(table)
        if parts:
            pieces = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self.device.copy_pieces(payload, pieces, to_storage)

    def _checked_origins(self, origins: Sequence[int] | None) -> Sequence[int]:
        num_groups = len(self.spec.groups)
        if origins is None:
            return (0,) * num_groups
        if len(origins) != num_groups or min(origins) < 0:
            raise ArgumentError(f"expected {num_groups} origins of at least 0, got {list(origins)}")
        return origins


class BlockWriter:
    """Repeated `write_blocks` into the blocks of one table, with the arithmetic done ahead where possible.

    block_ids: int [columns, nodes], in use by a prepared plan for as long as the writer is.

    Every other payload is written from its last piece back. Otherwise threads that write neighbouring payloads into
    untouched memory would fault on the same pages at the same time: the system would zero a page for each thread and
    discard all but one.
    """

    def __init__(self, storage: BlockStorage, block_ids: Any) -> None:
        self._storage = storage
        self._block_ids = np.asarray(block_ids, np.int64)
        self._per_node = [group.blocks_per_node for group in storage.spec.groups]
        self._node_tokens = storage.spec.tokens_per_node(storage.block_size)
        self._node_bytes = storage.block_pieces.layout.num_bytes(self._node_tokens)
        self._places: list[BlockPlaces] = []  # of each group; empty if an id is -1 or out of range
        if self._block_ids.size and self._block_ids.min() >= 0 and self._block_ids.max() < storage.num_blocks:
            groups = storage.spec.groups
            self._places = [
                storage.block_places(group, own)
                for group, own in zip(groups, _by_group(groups, self._block_ids), strict=True)
            ]
        self._templates: dict[int, list[np.ndarray]] = {}  # by number of nodes
        self._in_order: dict[int, tuple[np.ndarray, list[Any]] | None] = {}  # likewise

    def write(
        self, first_node: int, stop_node: int, payload: np.ndarray, num_tokens: int, *, first: int = 0
    ) -> None:
        """Writes tokens `first` .. `num_tokens` of a payload that begins with node `first_node` of the table."""
        count = stop_node - first_node
        is_whole = first == 0 and num_tokens == count * self._node_tokens and count > 0
        if not (
            is_whole
            and self._places
            and first_node >= 0
            and stop_node <= self._block_ids.shape[1]
            and payload.nbytes == count * self._node_bytes
            and payload.dtype == np.uint8
            and payload.flags.c_contiguous
        ):
            self._storage.write_blocks(
                self._block_ids[:, first_node:stop_node], payload, num_tokens, first=first
            )
            return
        pieces = self._pieces(first_node, stop_node)
        if first_node // count % 2:
            pieces = np.ascontiguousarray(pieces[::-1])
        self._storage.device.copy_pieces(payload, pieces, True)

    def places(self, first_node: int, stop_node: int) -> list[Any] | None:
        """Writable buffers that together take the payload of these nodes, in order, without a copy.

        None if the payload needs more than 512 buffers or lies in another device's memory. The buffers are the
        storage's own memory: they may be written as long as the blocks exist.
        """
        if (
            not self._storage.device.is_host
            or not self._places
            or not 0 <= first_node < stop_node <= self._block_ids.shape[1]
        ):
            return None
        count = stop_node - first_node
        pieces = self._pieces(first_node, stop_node)
        if count not in self._in_order:
            self._in_order[count] = self._order_of(pieces)
        in_order = self._in_order[count]
        if in_order is None:
            return None
        order, kinds = in_order
        addresses = pieces[order, 1].tolist()
        return [kind.from_address(address) for kind, address in zip(kinds, addresses, strict=True)]

    @staticmethod
    def _order_of(pieces: np.ndarray) -> tuple[np.ndarray, list[Any]] | None:
        """The order of pieces in the payload and the type of each piece's buffer, independent of where blocks lie; None
        if a piece has several rows or there are too many."""
        if len(pieces) > _MAX_PLACES or (pieces[:, 2] != 1).any():
            return None
        order = pieces[:, 0].argsort()
        return order, [ctypes.c_uint8 * num_bytes for num_bytes in pieces[order, 3].tolist()]

    def _pieces(self, first_node: int, stop_node: int) -> np.ndarray:
        """int64 [pieces, 5] of a payload of whole nodes, see `DeviceMemory.copy_pieces`."""
        count = stop_node - first_node
        templates = self._templates.get(count)
        if templates is None:
            templates = self._templates[count] = self._templates_of(count)
        parts = [
            at_places(template, places.addresses[:, :, first_node * count : stop_node * count])
            for template, places, count in zip(templates, self._places, self._per_node, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _templates_of(self, count: int) -> list[np.ndarray]:
        groups, none = self._storage.spec.groups, (0,) * len(self._storage.spec.groups)
        found: list[np.ndarray] = []
        for group, places in zip(groups, self._places, strict=True):
            size = group.tokens_per_block(self._storage.block_size)
            starts = np.arange(count * group.blocks_per_node) * size
            found.append(
                self._storage.block_pieces.template(
                    group, places, count * self._node_tokens, none, starts, starts, starts + size
                )
            )
        return found


def node_table(spec: KVSpec, tables: Sequence[np.ndarray]) -> np.ndarray:
    """The block tables of one sequence, one for each group, as int32 [columns, nodes]: a column for each block of a
    group in a node (`KVGroup.blocks_per_node`), -1 behind a table's end and where a window has given a block back."""
    counts = [group.blocks_per_node for group in spec.groups]
    num_nodes = max(-(-len(table) // count) for table, count in zip(tables, counts, strict=True))
    rows: list[np.ndarray] = []
    for table, count in zip(tables, counts, strict=True):
        padded = np.full(num_nodes * count, -1, np.int32)
        padded[: len(table)] = table
        rows.append(padded.reshape(num_nodes, count).T)
    return np.concatenate(rows)


def _by_group(groups: Sequence[KVGroup], block_ids: np.ndarray) -> list[np.ndarray]:
    """The block table of each group, from int [columns, nodes]."""
    found: list[np.ndarray] = []
    at = 0
    for group in groups:
        columns = block_ids[at : at + group.blocks_per_node]
        found.append(columns[0] if len(columns) == 1 else columns.T.reshape(-1))
        at += group.blocks_per_node
    return found
