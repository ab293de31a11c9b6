"""Blocks with content: the pool and the prefix tree joined by the four moves everything else is made of.

    take      a table names the unit of a node
    allocate  a table gets a unit of its own, once the least recently used content has been evicted if it must
    release   a table names it no more: it stays findable if the tree knows its content
    remove    the tree forgets a node

The order in which these put units on the lists decides every later block id; docs/architecture.md, "The
cache", states it, and the native back end follows it too. Cost: O(groups) per move and O(log siblings).

Invariant: `node_of[unit]` is the node that has `unit` as the unit of some group, or None; one node at most.
"""

from __future__ import annotations

from quire.cache.accounts import NO_QUOTA, NOBODY
from quire.cache.event_log import EventLog
from quire.cache.pool import NO_WRITER, Pool
from quire.cache.prefix import HOLE, Node, PrefixTree
from quire.cache.sequence import SequenceState
from quire.spec import Retention

__all__ = ["Blocks"]


class Blocks:
    """The pool and the tree of one cache, and the clock of its steps."""

    def __init__(
        self,
        retentions: list[Retention],
        num_blocks: int,
        block_size: int,
        overlapped_steps: bool,
        run_blocks: int,
    ) -> None:
        self.retentions = retentions
        self.pool = Pool(num_blocks, run_blocks)
        self.tree = PrefixTree(block_size)
        self.node_of: list[Node | None] = [None] * num_blocks
        self.overlapped_steps = overlapped_steps
        self.newest_step = 0
        self.completed_step = 0
        self.num_evicted = 0
        self.events = EventLog(len(retentions), block_size)

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

    def take(self, unit: int, retention: int) -> None:
        """One more table names the unit of a node."""
        self.pool.take(unit, retention)

    def make_room(self, sequence: SequenceState, num_units: int) -> None:
        """Evict until so many units are free, which must be available to the sequence's account."""
        while len(self.pool.free) < num_units:
            unit = self._next_victim()
            assert unit is not None
            self._evict(unit, sequence.account, "evicted")

    def allocate(self, sequence: SequenceState, before: int, block: int) -> int:
        """A unit without content for the sequence to write its block, behind the one that has the unit `before`."""
        unit = self.pool.pop_free(sequence.account, sequence.retention, before, block)
        self.pool.writer[unit] = sequence.id
        return unit

    def keep_quota(self, number: int) -> None:
        """Evict the account's own content until what it needs fits into its quota."""
        account = self.pool.accounts[number]
        while account.quota != NO_QUOTA and account.num_owned + account.need > account.quota:
            unit = self.pool.cached.first([number])
            assert unit is not None
            self._evict(unit, number, "evicted")

    def resize(self, num_blocks: int) -> list[int]:
        """Have `num_blocks` units from now on; the units given up, which must have been available.

        Floors are kept while anything else can go, and then yield: it is not another account that takes the room."""
        given_up: list[int] = []
        self.pool.accounts.need({})
        while self.pool.num_blocks > num_blocks:
            if not self.pool.free:
                unit = self._next_victim()
                if unit is None:
                    unit = next(iter(self.pool.cached))
                self._evict(unit, NOBODY, "forgotten")
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

    def _next_victim(self) -> int | None:
        """The unit that is evicted next, of those accounts that may still lose one in this call."""
        accounts = self.pool.accounts.by_number
        return self.pool.cached.first(number for number, account in accounts.items() if account.budget > 0)

    def _evict(self, victim: int, account: int, reason: str) -> None:
        """Give up cached content. A full-attention unit takes its node along, a window's leaves a hole.

        What another account may not lose stays in the node, and so do the nodes below."""
        node = self.node_of[victim]
        assert node is not None
        num_free = len(self.pool.free)
        takes_all = self.retentions[node.units.index(victim)].kind == "full"
        left = [HOLE] * len(node.units)
        self._charge(victim)
        for group, unit in enumerate(node.units):
            if unit == HOLE or (unit != victim and not (takes_all and self._may_leave(unit))):
                continue
            left[group] = unit
            self.make_hole(node, group)
            self.pool.uncache(unit)
        self.num_evicted += len(self.pool.free) - num_free
        self._note_removed(node, left, account, reason)
        self.tree.prune(node)

    def _may_leave(self, unit: int) -> bool:
        """Whether a unit may go along with another of its node; if its account loses it by that, it is charged."""
        if unit not in self.pool.cached:
            return True
        if self.pool.accounts[self.pool.cached.account[unit]].budget <= 0:
            return False
        self._charge(unit)
        return True

    def _charge(self, unit: int) -> None:
        self.pool.accounts[self.pool.cached.account[unit]].budget -= 1

    def forget(self, node: Node) -> None:
        """What no table names of the node is found no more."""
        left = [HOLE] * len(node.units)
        for group, unit in enumerate(node.units):
            if unit != HOLE and not self.pool.num_references[unit]:
                left[group] = unit
                self.make_hole(node, group)
                self.pool.uncache(unit)
        if any(unit != HOLE for unit in left):
            self._note_removed(node, left, NOBODY, "forgotten")
            self.tree.prune(node)

    def take_over(self, unit: int, group: int, account: int) -> None:
        """The tree forgets a unit that somebody holds and will write."""
        node = self.node_of[unit]
        assert node is not None
        self.make_hole(node, group)
        self._note_removed(
            node, [unit if at == group else HOLE for at in range(len(node.units))], account, "evicted"
        )
        self.tree.prune(node)

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
        """A new node made of `units`, holes among them; the partial node it makes redundant goes."""
        node = self.tree.insert(parent, content, num_tokens, units)
        for unit in units:
            if unit != HOLE:
                self.node_of[unit] = node
        self.note_stored(node, units)
        self._remove_redundant_neighbour(node)
        return node

    def extend(self, node: Node, content: bytes, num_tokens: int) -> None:
        """More tokens for a partial node; the partial node it makes redundant goes."""
        self.tree.extend(node, content, num_tokens)
        self.note_stored(node, node.units)
        self._remove_redundant_neighbour(node)

    def note_stored(self, node: Node, units: list[int]) -> None:
        """For the events: these units of the node are found from now on; of none there is nothing to tell."""
        if self.events.is_on and any(unit != HOLE for unit in units):
            first = next(unit for unit in units if unit != HOLE)
            self.events.stored(node, units, self.pool.cached.account[first], self._highest_retention(units))

    def _note_removed(self, node: Node, left: list[int], account: int, reason: str) -> None:
        """For the events: these units are the node's no more."""
        if self.events.is_on:
            self.events.removed(node, left, account, reason, self._highest_retention([*left, *node.units]))

    def _highest_retention(self, units: list[int]) -> int:
        return max(self.pool.cached.retention[unit] for unit in units if unit != HOLE)

    def record_events(self, is_on: bool) -> None:
        """Turned on, the log begins with what is there."""
        if is_on and not self.events.is_on:
            self.tree.start_numbering()
            self.events.turn_on()
            for node in self.tree.all_nodes():
                if any(unit != HOLE for unit in node.units):
                    self.note_stored(node, node.units)
        elif not is_on:
            self.events.turn_off()

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
        before = self.tree
        self.tree = PrefixTree(before.block_size)
        self.tree.version, self.tree.next_id = before.version, before.next_id
        self.pool.reset()
        self.events.cleared()
