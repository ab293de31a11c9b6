"""One sequence in the block manager: token ids, a block table per group, and how far it is computed.

    tokens      | computed and committed | reserved, not computed | known, no slot yet |
                0                  num_computed               reserved            num_tokens

(with lookahead `reserved` may lie beyond `num_tokens`). It holds numbers only; `block_manager.py` moves blocks.
Cost: O(1) or O(blocks changed); `append` as `KnownTokens` says.
"""

from __future__ import annotations

import numpy as np

from quire.cache.known_tokens import KnownTokens
from quire.cache.manager.elements import ExtraKeys
from quire.cache.manager.node_shape import NodeShape
from quire.cache.manager.prefix import Node
from quire.cache.types import NO_LIMIT, Int32Array, Int64Array

__all__ = ["GIVEN_UP", "BlockTable", "ManagedSequence"]

GIVEN_UP = -1


class BlockTable:
    """Block index -> block, -1 where a block behind a window was given up.

    A plan keeps a view of the table instead of a copy. Entries in a view are never written again: changing such an
    entry moves the table to a new array first; growing, the common case, does not.
    """

    __slots__ = ("_array", "_num_viewed", "length")

    def __init__(self) -> None:
        self._array = np.full(8, GIVEN_UP, np.int32)
        self._num_viewed = 0
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, block: int) -> int:
        return int(self._array[block])

    @property
    def block_ids(self) -> Int32Array:
        """The table now; valid until the next change, not to be kept."""
        return self._array[: self.length]

    def view(self, num_blocks: int) -> Int32Array:
        """The first `num_blocks` entries, which may be kept: later calls do not change them."""
        self._num_viewed = max(self._num_viewed, num_blocks)
        return self._array[:num_blocks]

    def append(self, block_id: int) -> None:
        if self.length == len(self._array):
            self._move(2 * self.length)
        self[self.length] = block_id
        self.length += 1

    def __setitem__(self, block: int, block_id: int) -> None:
        if block < self._num_viewed:
            self._move(len(self._array))
        self._array[block] = block_id

    def truncate(self, num_blocks: int) -> None:
        self.length = min(self.length, num_blocks)

    def _move(self, capacity: int) -> None:
        array = np.full(capacity, GIVEN_UP, np.int32)
        array[: self.length] = self.block_ids
        self._array, self._num_viewed = array, 0


class ManagedSequence(KnownTokens):
    """See the module docstring."""

    def __init__(
        self,
        sequence_id: int,
        tokens: Int32Array,
        keys: ExtraKeys,
        num_groups: int,
        owner_id: int,
        cache_priority: int,
        most_cached: int = NO_LIMIT,
    ) -> None:
        super().__init__(tokens)
        self.id = sequence_id
        # The account of its blocks, and the eviction order of the content it uses.
        self.owner_id = owner_id
        self.cache_priority = cache_priority
        self.extra_keys = keys
        self.tables = [BlockTable() for _ in range(num_groups)]
        # First block of each table that has not been given up.
        self.first_kept = [0] * num_groups
        self.num_computed = 0
        self.num_cached = 0
        self.most_cached = most_cached
        self.reserved = 0
        # The end of a `restore` that has not been committed; 0 without one. Only then may blocks beyond `num_computed`
        # be given up: those that no query from there on reads.
        self.restored_to = 0
        # It, or the sequence it was forked from, has reserved; before that each look extends its hit.
        self.admitted = False
        # (tree version, number of tokens) when it last looked.
        self.looked_at: tuple[int, int] = (-1, -1)
        # The end of its full committed blocks in the tree; None without prefix caching, and once it is withdrawn: its
        # commits are not found then.
        self.node: Node | None = None

    def kept_blocks(self, shape: NodeShape, num_tokens: int) -> list[int]:
        """The blocks that begin at token `num_tokens` or later: deepest node first, in a node group by group, in a
        group the last one first."""
        num_nodes = max(
            -(-len(table) // group.per_node) for group, table in zip(shape.groups, self.tables, strict=True)
        )
        rows: list[Int32Array] = []
        for group, table in zip(shape.groups, self.tables, strict=True):
            block_ids = table.block_ids.copy()
            block_ids[: group.num_blocks(num_tokens)] = GIVEN_UP
            rows.append(block_ids)
        columns = shape.columns_of(rows, num_nodes)
        ordered = [
            columns[group.first_column : group.first_column + group.per_node][::-1] for group in shape.groups
        ]
        by_depth = np.concatenate(ordered).T[::-1]
        return by_depth[by_depth != GIVEN_UP].tolist()

    def partial_blocks(self, shape: NodeShape) -> list[tuple[int, int, int]]:
        """(group, entry of its table, block) for each block with computed tokens of the partly computed node."""
        if self.num_computed % shape.size == 0:
            return []
        node = self.num_computed // shape.size
        return [
            (index, block, table[block])
            for index, (group, table) in enumerate(zip(shape.groups, self.tables, strict=True))
            for block in group.in_node(node, self.num_computed)
            if table[block] != GIVEN_UP
        ]

    def node_blocks(self, shape: NodeShape, node: int, num_tokens: int) -> list[int]:
        """By column of the node at this depth, 0 for the first, its blocks that begin before token `num_tokens`."""
        block_ids = [GIVEN_UP] * shape.num_columns
        for group, table in zip(shape.groups, self.tables, strict=True):
            for part, block in enumerate(group.in_node(node, num_tokens)):
                block_ids[group.first_column + part] = table[block]
        return block_ids

    def forget_tokens(self, position: int) -> None:
        """Removes the tokens and extra keys from `position` on."""
        self.num_tokens = min(self.num_tokens, position)
        self.extra_keys = self.extra_keys.truncated(position)

    def slots(self, group: int, start: int, stop: int, block_size: int) -> Int64Array:
        """Slot (block * block_size + offset) of each position start .. stop - 1; -1 where the block is given up."""
        if stop - start < 2:  # a decode, or no lookahead
            table = self.tables[group]
            blocks = [table[position // block_size] for position in range(start, stop)]
            found = [GIVEN_UP if block < 0 else block * block_size + start % block_size for block in blocks]
            return np.array(found, np.int64)
        positions = np.arange(start, stop, dtype=np.int64)
        block_ids = self.tables[group].block_ids[positions // block_size].astype(np.int64)
        return np.where(block_ids == GIVEN_UP, GIVEN_UP, block_ids * block_size + positions % block_size)
