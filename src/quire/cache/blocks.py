"""Blocks with content: the pool and the prefix tree joined by the four moves everything else is made of.

    take      a table names the unit of a node
    allocate  a table gets a unit of its own, evicting the least recently used content if it must
    release   a table names it no more: it stays findable if the tree knows its content
    remove    the tree forgets a node

The order in which these put units on the lists decides every later block id; docs/architecture.md, "The
cache", states it, and the native back end follows it too. Cost: O(groups) per move and O(log siblings).

Invariant: `node_of[unit]` is the node that has `unit` as the unit of some group, or None; one node at most.
"""

from __future__ import annotations

from quire.cache.pool import NO_WRITER, Pool
from quire.cache.prefix import HOLE, Node, PrefixTree
from quire.spec import Retention

__all__ = ["Blocks"]


class Blocks:
    """The pool and the tree of one cache, and the clock of its steps."""

    def __init__(
        self, retentions: list[Retention], num_blocks: int, block_size: int, overlapped_steps: bool
    ) -> None:
        self.retentions = retentions
        self.pool = Pool(num_blocks)
        self.tree = PrefixTree(block_size)
        self.node_of: list[Node | None] = [None] * num_blocks
        self.overlapped_steps = overlapped_steps
        self.newest_step = 0
        self.completed_step = 0
        self.num_evicted = 0

    # Steps

    @property
    def lease(self) -> int:
        """The step that has to complete before a unit let go of now may be reused; 0 for none."""
        under_way = self.overlapped_steps and self.newest_step > self.completed_step
        return self.newest_step if under_way else 0

    def complete(self, step: int) -> None:
        """Step `step` and all before it have ended: their leases are settled, oldest first."""
        self.completed_step = max(self.completed_step, step)
        while (oldest := self.pool.oldest_lease()) and oldest[1] <= step:
            unit = oldest[0]
            del self.pool.leased[unit]
            self.pool.park(unit, is_known=self.node_of[unit] is not None, lease=0)

    # The four moves

    def take(self, unit: int) -> None:
        """One more table names the unit of a node."""
        self.pool.take(unit)

    def allocate(self, writer: int) -> int:
        """A unit without content for the sequence `writer`. At least one must be available."""
        self._ensure_free()
        unit = self.pool.pop_free()
        self.pool.writer[unit] = writer
        return unit

    def resize(self, num_blocks: int) -> list[int]:
        """Have `num_blocks` units from now on; the units given up, which must have been available."""
        given_up: list[int] = []
        while self.pool.num_blocks > num_blocks:
            self._ensure_free()
            given_up.append(self.pool.give_up())
        self.pool.grow(num_blocks)
        self.node_of += [None] * (self.pool.num_ids - len(self.node_of))
        return given_up

    def release(self, unit: int, sequence: int) -> None:
        """The table of `sequence` names the unit no more."""
        pool = self.pool
        if pool.writer[unit] == sequence:
            pool.writer[unit] = NO_WRITER
        lease = self.lease
        if lease:
            pool.busy_until[unit] = lease
        pool.num_references[unit] -= 1
        if pool.num_references[unit]:
            return
        node = self.node_of[unit]
        if node is not None and self.is_unheld_partial(node) and self.tree.is_prefix_of_sibling(node):
            self.remove(node)
        pool.park(unit, is_known=self.node_of[unit] is not None, lease=lease)

    def remove(self, node: Node) -> None:
        """The tree forgets a node that has no children; its cached units are free."""
        for group, unit in enumerate(node.units):
            if unit != HOLE:
                self.make_hole(node, group)
                self.pool.uncache(unit)
        self.tree.prune(node)

    # Parts of them

    def _ensure_free(self) -> None:
        """Where no unit is free, evict the least recently used content."""
        if not self.pool.free:
            self._evict(next(iter(self.pool.cached)))

    def _evict(self, unit: int) -> None:
        """Give up cached content. A full-attention unit takes its node along, a window's leaves a hole."""
        node = self.node_of[unit]
        assert node is not None
        num_free = len(self.pool.free)
        group = node.units.index(unit)
        if self.retentions[group].kind == "full":
            self.remove(node)
        else:
            self.make_hole(node, group)
            self.pool.uncache(unit)
            self.tree.prune(node)
        self.num_evicted += len(self.pool.free) - num_free

    def make_hole(self, node: Node, group: int) -> None:
        self.node_of[node.units[group]] = None
        node.units[group] = HOLE

    def supply(self, node: Node, group: int, unit: int) -> None:
        """Fill a hole."""
        node.units[group] = unit
        self.node_of[unit] = node
        self.tree.version += 1

    def is_unheld_partial(self, node: Node) -> bool:
        """A partial node that no table names: it is kept only while no sibling says the same and more."""
        return node.num_tokens < self.tree.block_size and not any(
            unit != HOLE and self.pool.num_references[unit] for unit in node.units
        )

    def insert(self, parent: Node, content: bytes, num_tokens: int, units: list[int]) -> Node:
        """A new node made of `units`; the partial node it makes redundant goes."""
        node = self.tree.insert(parent, content, num_tokens, units)
        for unit in units:
            self.node_of[unit] = node
        self._remove_redundant_neighbour(node)
        return node

    def extend(self, node: Node, content: bytes, num_tokens: int) -> None:
        """More tokens for a partial node; the partial node it makes redundant goes."""
        self.tree.extend(node, content, num_tokens)
        self._remove_redundant_neighbour(node)

    def _remove_redundant_neighbour(self, node: Node) -> None:
        # An unheld partial node has no sibling that starts with it, so if it is a prefix of the new content
        # nothing can stand between the two: looking at one neighbour is enough.
        left = self.tree.left_neighbour(node)
        if left is not None and self.is_unheld_partial(left) and node.content.startswith(left.content):
            self.remove(left)

    def reset(self) -> None:
        """Forget all content. No unit may be held."""
        for unit in range(self.pool.num_ids):
            self.node_of[unit] = None
        version = self.tree.version
        self.tree = PrefixTree(self.tree.block_size)
        self.tree.version = version
        self.pool.reset()
