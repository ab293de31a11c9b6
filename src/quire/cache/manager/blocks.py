"""Blocks with content: joins the pool and the prefix tree by four moves, the base of all other operations.

    take      a table names the block of a node
    allocate  a table gets a new block, after an eviction of cached content if need be
    release   a table no longer names a block: it stays findable if the tree knows its content
    remove    the tree forgets a node

A sequence extends its hit when it is opened and again, until it is admitted or withdrawn (`forget.py`), whenever the
tree or its tokens have changed. `groups.py` decides which hit is valid.

The order in which these put blocks on the lists decides every later block id; docs/contracts.md, "The
cache", states it, and the native back end follows it too. Cost: O(columns) per move and O(log siblings);
`extend_hit` O(blocks of the prompt) after a change, else O(1).

Invariant: `node_of[block_id]` is the node that has `block_id` in some column, or None; one node at most.
"""

from __future__ import annotations

from quire.cache.manager.event_log import EventLog
from quire.cache.manager.eviction import FREQUENCY, MAX_USES, NO_KEY, policy_of
from quire.cache.manager.ghosts import Ghosts
from quire.cache.manager.groups import find_hit
from quire.cache.manager.node_shape import NodeShape
from quire.cache.manager.owners import NO_QUOTA, NOBODY
from quire.cache.manager.pool import NO_WRITER, Pool
from quire.cache.manager.prefix import HOLE, Node, PrefixTree
from quire.cache.manager.sequence import GIVEN_UP, ManagedSequence

__all__ = ["Blocks"]


class Blocks:
    """The pool and the tree of one cache, and the clock of its steps."""

    def __init__(
        self,
        shape: NodeShape,
        num_blocks: int,
        overlapped_steps: bool,
        run_blocks: int,
        eviction: str = FREQUENCY,
    ) -> None:
        self.shape = shape
        self.pool = Pool(num_blocks, run_blocks, policy_of(eviction), counts_uses=eviction == FREQUENCY)
        self.ghosts = Ghosts(num_blocks, shape.size)
        self.tree = PrefixTree(shape.size, shape.starts)
        self.node_of: list[Node | None] = [None] * num_blocks
        self.overlapped_steps = overlapped_steps
        self.newest_step = 0
        self.completed_step = 0
        self.num_evicted = 0
        self.events = EventLog(shape.num_columns, shape.size)

    # Steps

    @property
    def flight(self) -> int:
        """The step that has to complete before a block released now may be reused; 0 for none."""
        under_way = self.overlapped_steps and self.newest_step > self.completed_step
        return self.newest_step if under_way else 0

    def complete(self, step: int) -> None:
        """Step `step` and all before it have ended: their blocks in flight are settled, oldest first."""
        self.completed_step = max(self.completed_step, step)
        while (oldest := self.pool.oldest_flight()) and oldest[1] <= step:
            block_id = oldest[0]
            del self.pool.in_flight[block_id]
            self._park(block_id, flight=0)

    # The four moves

    def take(self, block_id: int, cache_priority: int) -> None:
        """One more table names the block of a node."""
        self.pool.take(block_id, cache_priority)

    def make_room(self, sequence: ManagedSequence, num_blocks: int) -> None:
        """Evict until so many blocks are free; they must be available to the sequence's owner."""
        while len(self.pool.free) < num_blocks:
            block_id = self._next_victim()
            assert block_id is not None
            self._evict(block_id, sequence.owner_id, "evicted")

    def allocate(self, sequence: ManagedSequence, before: int, block: int) -> int:
        """A block without content for table entry `block` of the sequence, whose previous entry is `before`."""
        block_id = self.pool.pop_free(sequence.owner_id, sequence.cache_priority, before, block)
        self.pool.writer[block_id] = sequence.id
        return block_id

    def keep_quota(self, number: int) -> None:
        """Evict the owner's own content until its need fits into its quota."""
        owner_id = self.pool.owner_ids[number]
        while owner_id.quota != NO_QUOTA and owner_id.num_owned + owner_id.need > owner_id.quota:
            block_id = self.pool.cached.first([number])
            assert block_id is not None
            self._evict(block_id, number, "quota")

    def resize(self, num_blocks: int) -> list[int]:
        """Change the number of blocks to `num_blocks`. Returns the blocks given up, which must have been available.

        Floors hold while other blocks can go, and then yield: no other owner takes the room."""
        given_up: list[int] = []
        self.pool.owner_ids.need({})
        while self.pool.num_blocks > num_blocks:
            if not self.pool.free:
                block_id = self._next_victim()
                if block_id is None:
                    block_id = next(iter(self.pool.cached))
                self._evict(block_id, NOBODY, "forgotten")
            given_up.append(self.pool.give_up())
        self.pool.grow(num_blocks)
        self.ghosts.grow(self.pool.num_ids)
        self.node_of += [None] * (self.pool.num_ids - len(self.node_of))
        return given_up

    def release(self, block_id: int, sequence: int) -> None:
        """The table of `sequence` no longer names the block."""
        pool = self.pool
        if pool.writer[block_id] == sequence:
            pool.writer[block_id] = NO_WRITER
        flight = self.flight
        if flight:
            pool.busy_until[block_id] = flight
        pool.num_references[block_id] -= 1
        if pool.num_references[block_id]:
            return
        node = self.node_of[block_id]
        if node is not None and self.is_unheld_partial(node) and self.tree.is_prefix_of_sibling(node):
            self.remove(node)
        self._park(block_id, flight)

    def remove(self, node: Node) -> None:
        """The tree forgets a node that has no children; its cached blocks are free."""
        for column, block_id in enumerate(node.block_ids):
            if block_id != HOLE:
                self.make_hole(node, column)
                self.pool.uncache(block_id)
        self.tree.prune(node)

    # Hits

    def extend_hit(self, sequence: ManagedSequence) -> None:
        """Extend the hit of a sequence not yet admitted by what others have committed since it last looked.

        Does nothing once it is admitted or withdrawn, or while neither the tree nor its tokens have changed."""
        seen = (self.tree.version, sequence.num_tokens)
        if sequence.admitted or sequence.node is None or seen == sequence.looked_at:
            return
        sequence.looked_at = seen
        tokens = sequence.tokens[: sequence.most_cached + 1]  # a hit leaves the last one to compute
        hit = find_hit(self.tree, self.shape, sequence.node.root, tokens, sequence.extra_keys)
        if hit.num_tokens <= sequence.num_computed:
            return
        old = sequence.kept_blocks(self.shape, 0)
        for index, (group, table) in enumerate(zip(self.shape.groups, sequence.tables, strict=True)):
            first, num_blocks = group.first_needed(hit.num_tokens), group.num_blocks(hit.num_tokens)
            columns = hit.block_ids[group.first_column : group.first_column + group.per_node]
            num_counted = group.num_blocks(sequence.num_computed)  # blocks of its earlier, shorter hit
            most_uses = MAX_USES
            table.truncate(0)
            for block, block_id in enumerate(columns.T.reshape(-1)[:num_blocks].tolist()):
                if block >= first:
                    self.take(block_id, sequence.cache_priority)
                    uses = self.pool.cached.uses[block_id]
                    most_uses = (
                        self.pool.cached.count_use(block_id, most_uses) if block >= num_counted else uses
                    )
                table.append(block_id if block >= first else GIVEN_UP)
            sequence.first_kept[index] = min(first, num_blocks)
        for block_id in old:
            self.release(block_id, sequence.id)
        assert hit.node is not None
        self.move_to(sequence, hit.node)
        sequence.num_computed = sequence.num_cached = sequence.reserved = hit.num_tokens

    def move_to(self, sequence: ManagedSequence, node: Node) -> None:
        """The sequence's full committed blocks end in `node` from now on."""
        left = sequence.node
        assert left is not None
        node.num_sequences += 1
        left.num_sequences -= 1
        sequence.node = node
        self.tree.prune(left)

    # Parts of the moves

    def _park(self, block_id: int, flight: int) -> None:
        node = self.node_of[block_id]
        least_key = NO_KEY if node is None or flight else self._highest_key_below(node, block_id)
        self.pool.park(block_id, is_known=node is not None, flight=flight, least_key=least_key)

    def _highest_key_below(self, node: Node, block_id: int) -> float:
        """For a policy: the highest key of the cached full-attention blocks that must go before this one."""
        cached, highest = self.pool.cached, NO_KEY
        if cached.policy is None or not self.shape.is_full[node.block_ids.index(block_id)]:
            return highest
        below = list(node.children)
        for child in below:
            columns = zip(self.shape.is_full, child.block_ids, strict=True)
            tails = [block for is_full, block in columns if is_full and block in cached]
            highest = max([highest, *(cached.rank_of(block)[0] for block in tails)])
            if not tails:  # a gap: an owner may keep what lies below it
                below += child.children
        return highest

    def _next_victim(self) -> int | None:
        """The block that is evicted next, among owners that may still lose one in this call."""
        owner_ids = self.pool.owner_ids.by_number
        return self.pool.cached.first(number for number, owner_id in owner_ids.items() if owner_id.budget > 0)

    def _evict(self, victim: int, owner_id: int, reason: str) -> None:
        """Give up cached content. A full-attention block takes its node along, a window's block leaves a hole.

        Blocks that a table names or another owner may not lose stay in the node, and so do the nodes below."""
        node = self.node_of[victim]
        assert node is not None
        num_free = len(self.pool.free)
        takes_all = self.shape.is_full[node.block_ids.index(victim)]
        if takes_all and self.pool.cached.counts_uses and node.num_tokens == self.tree.block_size:
            self.ghosts.add(node.content, self.pool.cached.uses[victim])
        left = [HOLE] * len(node.block_ids)
        self._charge(victim)
        for column, block_id in enumerate(node.block_ids):
            if block_id == HOLE or (block_id != victim and not (takes_all and self._may_leave(block_id))):
                continue
            left[column] = block_id
            self.make_hole(node, column)
            self.pool.uncache(block_id)
        self.num_evicted += len(self.pool.free) - num_free
        self._note_removed(node, left, owner_id, reason)
        self.tree.prune(node)

    def _may_leave(self, block_id: int) -> bool:
        """Whether a block may go together with another of its node; charges its owner if it loses a block."""
        if block_id not in self.pool.cached:
            return not self.pool.num_references[block_id]
        if self.pool.owner_ids[self.pool.cached.owner_id[block_id]].budget <= 0:
            return False
        self._charge(block_id)
        return True

    def _charge(self, block_id: int) -> None:
        self.pool.owner_ids[self.pool.cached.owner_id[block_id]].budget -= 1

    def forget(self, node: Node) -> int:
        """Make the whole node unfindable. Returns the number of its blocks still in use."""
        left = list(node.block_ids)
        num_free = len(self.pool.free)
        for column, block_id in enumerate(left):
            if block_id != HOLE:
                self.make_hole(node, column)
                self.pool.uncache(block_id)
        num_left = len(left) - left.count(HOLE)
        if num_left:
            self._note_removed(node, left, NOBODY, "forgotten")
            self.tree.prune(node)
        return num_left - (len(self.pool.free) - num_free)

    def write_in_place(self, block_id: int, owner_id: int) -> None:
        """The tree forgets a held block that its sequence will write."""
        node = self.node_of[block_id]
        assert node is not None
        column = node.block_ids.index(block_id)
        self.make_hole(node, column)
        self._note_removed(
            node,
            [block_id if at == column else HOLE for at in range(len(node.block_ids))],
            owner_id,
            "evicted",
        )
        self.tree.prune(node)

    def make_hole(self, node: Node, column: int) -> None:
        self.node_of[node.block_ids[column]] = None
        node.block_ids[column] = HOLE

    def supply(self, node: Node, column: int, block_id: int) -> None:
        """Fill a hole. The block gets as many uses as its head, so no block below it has more."""
        node.block_ids[column] = block_id
        if self.pool.cached.counts_uses:
            self.pool.cached.uses[block_id] = self._uses_above(node, column)
        self.node_of[block_id] = node
        self.tree.version += 1

    def _uses_above(self, node: Node, column: int) -> int:
        """The uses of the nearest block above the node in this column; `MAX_USES` without one."""
        above = node.parent
        while above is not None and above.depth:
            if above.block_ids[column] != HOLE:
                return self.pool.cached.uses[above.block_ids[column]]
            above = above.parent
        return MAX_USES

    def is_unheld_partial(self, node: Node) -> bool:
        """Whether no table names this partial node: it is kept only while no sibling begins with its content."""
        return node.num_tokens < self.tree.block_size and not any(
            block_id != HOLE and self.pool.num_references[block_id] for block_id in node.block_ids
        )

    def insert(self, parent: Node, content: bytes, num_tokens: int, block_ids: list[int]) -> Node:
        """A new node with `block_ids`, some of them holes; removes the partial node that it makes redundant."""
        node = self.tree.insert(parent, content, num_tokens, block_ids)
        for block_id in block_ids:
            if block_id != HOLE:
                self.node_of[block_id] = node
                self.pool.cached.uses[block_id] = 1
        self._recall_uses(node)
        self.note_stored(node, block_ids)
        self._remove_redundant_neighbour(node)
        return node

    def extend(self, node: Node, content: bytes, num_tokens: int, block_ids: list[int]) -> None:
        """More tokens for a partial node; removes the partial node that it makes redundant.

        block_ids: by column, of all its tokens then; those that begin after its old end are new to it."""
        for column, start in enumerate(self.shape.starts):
            if start >= node.num_tokens and block_ids[column] != HOLE:
                node.block_ids[column] = block_ids[column]
                self.node_of[block_ids[column]] = node
        self.tree.extend(node, content, num_tokens)
        self._recall_uses(node)
        self.note_stored(node, node.block_ids)
        self._remove_redundant_neighbour(node)

    def _recall_uses(self, node: Node) -> None:
        """Counts on the uses of a full node's content that was evicted a short time ago: one more, but at most the uses
        of the blocks above, which a hit finds first."""
        if not self.pool.cached.counts_uses or node.num_tokens < self.tree.block_size:
            return
        assert node.parent is not None
        uses, most = self.pool.cached.uses, MAX_USES
        if node.parent.depth:
            above = [
                block_id
                for block_id, is_full in zip(node.parent.block_ids, self.shape.is_full, strict=True)
                if is_full
            ]
            most = min((1 if block_id == HOLE else uses[block_id] for block_id in above), default=1)
        if most == 1:
            return
        uses_before = self.ghosts.pop(node.content)
        for block_id in node.block_ids if uses_before else ():
            if block_id != HOLE:
                uses[block_id] = max(uses[block_id], min(uses_before + 1, most))

    def note_stored(self, node: Node, block_ids: list[int]) -> None:
        """Records that these blocks of the node are findable from now on, if there are any."""
        if self.events.is_on and any(block_id != HOLE for block_id in block_ids):
            first = next(block_id for block_id in block_ids if block_id != HOLE)
            self.events.stored(
                node, block_ids, self.pool.cached.owner_id[first], self._highest_cache_priority(block_ids)
            )

    def _note_removed(self, node: Node, left: list[int], owner_id: int, reason: str) -> None:
        """Records that these blocks left the node."""
        if self.events.is_on:
            self.events.removed(
                node, left, owner_id, reason, self._highest_cache_priority([*left, *node.block_ids])
            )

    def _highest_cache_priority(self, block_ids: list[int]) -> int:
        return max(self.pool.cached.cache_priority[block_id] for block_id in block_ids if block_id != HOLE)

    def record_events(self, is_on: bool) -> None:
        """Turns the log on or off; turned on, it begins with the present content."""
        if is_on and not self.events.is_on:
            self.tree.start_numbering()
            self.events.turn_on()
            for node in self.tree.all_nodes():
                if any(block_id != HOLE for block_id in node.block_ids):
                    self.note_stored(node, node.block_ids)
        elif not is_on:
            self.events.turn_off()

    def _remove_redundant_neighbour(self, node: Node) -> None:
        # An unheld partial node has no sibling that starts with it, so if it is a prefix of the new content
        # the two are neighbours: checking one neighbour is enough.
        left = self.tree.left_neighbour(node)
        if left is not None and self.is_unheld_partial(left) and node.content.startswith(left.content):
            self.remove(left)

    def reset(self) -> None:
        """Forget all content. No block may be held."""
        for block_id in range(self.pool.num_ids):
            self.node_of[block_id] = None
        before = self.tree
        self.tree = PrefixTree(before.block_size, before.column_starts)
        self.tree.version, self.tree.next_id = before.version, before.next_id
        self.pool.reset()
        self.ghosts.clear()
        self.events.cleared()
