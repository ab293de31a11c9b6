"""The numbers of blocks of each group in a node of the tree, and the tokens in each.

A node stands for `size` tokens. A group with blocks of that size has one block in it; a group with smaller blocks has
several. The blocks of a node, group after group, are its *columns*: column c is block `part` of its group in the node,
and begins at the node's token `starts[c]`. A partial node has blocks in the columns that begin before its end.

In most caches all groups have one block to a node: a column is a group then.
Numbers only; made once. Cost: O(columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.types import Int32Array
from quire.spec import Span

__all__ = ["GroupShape", "NodeShape"]


@dataclass(frozen=True)
class GroupShape:
    """One group. tokens: of a block. per_node: blocks of a whole node. first_column: of its blocks in a node."""

    span: Span
    tokens: int
    per_node: int
    first_column: int

    def num_blocks(self, num_tokens: int) -> int:
        """Entries of a table of so many tokens."""
        return -(-num_tokens // self.tokens)

    def first_needed(self, position: int) -> int:
        """The first entry that the query at `position` may read."""
        return self.span.first_needed(position) // self.tokens

    def in_node(self, node: int, num_tokens: int) -> range:
        """The entries of the node at this depth, 0 for the first, that begin before token `num_tokens`."""
        first = node * self.per_node
        return range(first, min(first + self.per_node, self.num_blocks(num_tokens)))


class NodeShape:
    """The shape of nodes of `size` tokens. blocks_per_node: of each group, each a divisor of `size`."""

    def __init__(self, spans: Sequence[Span], size: int, blocks_per_node: Sequence[int]) -> None:
        self.size = size
        self.groups: list[GroupShape] = []
        self.starts: list[int] = []
        self.is_full: list[bool] = []  # by column, whether its group keeps everything
        for span, count in zip(spans, blocks_per_node, strict=True):
            self.groups.append(GroupShape(span, size // count, count, len(self.starts)))
            self.starts += [part * (size // count) for part in range(count)]
            self.is_full += [span.kind == "full"] * count
        self.num_columns = len(self.starts)
        # Tokens of the smallest blocks: the possible ends of a hit inside a node that has lost blocks.
        self.step = min(group.tokens for group in self.groups)

    def columns_of(self, tables: Sequence[Int32Array], num_nodes: int) -> Int32Array:
        """Block tables, one for each group, as int32 [columns, nodes]; -1 after a table's end."""
        rows: list[Int32Array] = []
        for group, table in zip(self.groups, tables, strict=True):
            padded = np.full(num_nodes * group.per_node, -1, np.int32)
            padded[: min(len(table), len(padded))] = table[: len(padded)]
            rows.append(padded.reshape(num_nodes, group.per_node).T)
        return np.concatenate(rows)
