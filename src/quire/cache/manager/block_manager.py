"""The block manager in plain Python: the "block manager" of the literature, in one readable piece.

A sequence is a list of token ids and, per group of layers, a *block table*: entry b names the block that stores tokens
b * size .., size being that of the group's blocks. The life of a request:

    open      the longest known prefix is found in the tree, and the new table names its blocks
    reserve   the sequence gets blocks for the next tokens; a block about to be written is copied if others see it
    (the engine computes K and V of those tokens into the slots)
    commit    those tokens are computed: their blocks become nodes of the tree, for others to find
    close     the table releases its blocks; content in the tree stays findable until the room is needed

This is the `python` back end of `quire.Cache`, and the oracle of the native one: every rule below is written down in
docs/contracts.md, "The cache". Not thread-safe. Invariants: `invariants.py`.

Cost: open O(blocks of the prompt), reserve and commit O(new blocks + sequences), close and fork O(blocks).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from quire.cache.events import EventArrays
from quire.cache.manager.apply import allocate, write_in_place
from quire.cache.manager.arrays import block_map, content_of, tree_arrays
from quire.cache.manager.blocks import Blocks
from quire.cache.manager.branch import forget_from, share_computed
from quire.cache.manager.commit import make_findable, release_behind_windows
from quire.cache.manager.elements import ExtraKeys
from quire.cache.manager.eviction import FREQUENCY
from quire.cache.manager.forget import drop, withdraw
from quire.cache.manager.groups import explain_hit, find_hit
from quire.cache.manager.invariants import check_invariants
from quire.cache.manager.known_path import evict_path, set_cache_priority
from quire.cache.manager.node_shape import NodeShape
from quire.cache.manager.owners import NOBODY
from quire.cache.manager.reserve import BlockRequest, Copy, blocks_by_owner, decide, make_plan
from quire.cache.manager.sequence import ManagedSequence
from quire.cache.tree_view import TreeArrays
from quire.cache.types import NO_LIMIT, NORMAL, Int32Array, Int64Array
from quire.spec import Span
from quire.step import StepPlan

__all__ = ["PythonBlockManager"]


class PythonBlockManager:
    """The calls of the contract (`cache/protocol.py`) on ids and arrays. Each call means the same as there.

    `quire._native.BlockManager` has the same calls with the same answers, block ids included. The rules for arrays and
    errors below hold for it as well.

    sequence(s)     ids: an int, or contiguous int64 [n]
    a prompt        (tokens, namespace, key_positions, keys). tokens: contiguous int32 [n], values >= 0. key_positions:
                    int64 [m], strictly increasing, within 0 .. n - 1; keys: m of them
    arrays given    have right types, shapes and dtypes, and values that are right in any state: `quire.Cache`
                    checks them first
    arrays returned are never written again
    KeyError        an id that is unknown or closed; nothing has changed. `SequenceClosedError` of the contract
    ValueError      a value that the state excludes: `ArgumentError` of the contract, with the same text
    """

    def __init__(
        self,
        spans: SequenceOf[tuple[str, int]],
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        watermark_blocks: int,
        overlapped_steps: bool,
        run_blocks: int,
        blocks_per_node: SequenceOf[int] = (),
        eviction: str = FREQUENCY,
    ) -> None:
        """`spans`: ("full", 0), ("window", size) or ("chunked", size) for each group, in order. block_size: tokens of a
        node of the tree. blocks_per_node: blocks of each group in a node, divisors of block_size; 1 each if empty."""
        self.num_groups = len(spans)
        self.shape = NodeShape(
            [Span(kind, size) for kind, size in spans],  # type: ignore[arg-type]
            block_size,
            blocks_per_node or [1] * len(spans),
        )
        self.prefix_caching = prefix_caching
        self.watermark_blocks = watermark_blocks
        self.blocks = Blocks(self.shape, num_blocks, overlapped_steps, run_blocks, eviction)
        self.sequences: dict[int, ManagedSequence] = {}
        self.num_opened = 0
        self.num_admitted = 0
        self.num_hit_tokens = self.num_query_tokens = 0
        self.num_copied = self.num_deduplicated = 0
        self.most_blocks = 0  # most blocks held and in flight together at the end of a `reserve`

    # Finding a prefix

    def match(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> int:
        root = self.blocks.tree.roots.get(namespace)
        extra_keys = ExtraKeys(key_positions.tolist(), keys)
        return find_hit(self.blocks.tree, self.shape, root, tokens, extra_keys).num_tokens

    def explain(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> tuple[int, int, Int32Array]:
        """(`match`, tokens that the tree's nodes share with the prompt, tokens of the nearest block where they end)."""
        root = self.blocks.tree.roots.get(namespace)
        extra_keys = ExtraKeys(key_positions.tolist(), keys)
        num_hit = find_hit(self.blocks.tree, self.shape, root, tokens, extra_keys).num_tokens
        return num_hit, *explain_hit(self.blocks.tree, root, tokens, extra_keys)

    def open(
        self,
        tokens: Int32Array,
        namespace: bytes,
        key_positions: Int64Array,
        keys: list[bytes],
        owner_id: int = NOBODY,
        cache_priority: int = NORMAL,
        most_cached: int = NO_LIMIT,
    ) -> int:
        """The id of the new sequence. most_cached: limit of its hit in tokens, now, later and after a rewind."""
        extra_keys = ExtraKeys(key_positions.tolist(), list(keys))
        sequence = ManagedSequence(
            self.num_opened, tokens, extra_keys, self.num_groups, owner_id, cache_priority, most_cached
        )
        self.num_opened += 1
        self.sequences[sequence.id] = sequence
        if self.prefix_caching:
            sequence.node = self.blocks.tree.root(namespace)
            sequence.node.num_sequences += 1
            self.blocks.extend_hit(sequence)
        return sequence.id

    # Properties of a sequence

    def append(self, sequence: int, tokens: Int32Array) -> None:
        self.sequences[sequence].append(tokens)

    def tokens(self, sequence: int) -> Int32Array:
        return self.sequences[sequence].tokens.copy()

    def num_tokens(self, sequence: int) -> int:
        return self.sequences[sequence].num_tokens

    def num_cached_tokens(self, sequence: int) -> int:
        state = self.sequences[sequence]
        self.blocks.extend_hit(state)
        return state.num_cached

    def num_computed_tokens(self, sequence: int) -> int:
        state = self.sequences[sequence]
        self.blocks.extend_hit(state)
        return state.num_computed

    def block_table(self, sequence: int, group: int) -> Int32Array:
        return self.sequences[sequence].tables[group].block_ids.copy()

    # Reserving

    def num_blocks_needed(self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int) -> int:
        requests = self._decide(sequences, num_new_tokens, num_lookahead)
        return sum(blocks_by_owner(requests, self.shape).values())

    def reserve(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> StepPlan | None:
        return self._apply(self._decide(sequences, num_new_tokens, num_lookahead))

    def num_blocks_to_restore(self, sequence: int, num_computed_tokens: int) -> int:
        requests = self._decide_to_restore(sequence, num_computed_tokens)
        return sum(blocks_by_owner(requests, self.shape).values())

    def restore(self, sequence: int, num_computed_tokens: int) -> StepPlan | None:
        plan = self._apply(self._decide_to_restore(sequence, num_computed_tokens))
        if plan is not None:
            self.sequences[sequence].restored_to = num_computed_tokens
        return plan

    def _decide_to_restore(self, sequence: int, num_computed_tokens: int) -> list[BlockRequest]:
        state = self.sequences[sequence]
        if not state.num_computed < num_computed_tokens <= state.num_tokens:
            raise ValueError(
                f"expected {state.num_computed + 1} .. {state.num_tokens} computed tokens for sequence {sequence} "
                f"({state.num_computed} computed, {state.num_tokens} known), got {num_computed_tokens} in restore"
            )
        num_new = num_computed_tokens - state.num_computed
        return decide(self.blocks, [state], [num_new], 0, restores=True)

    def _apply(self, requests: list[BlockRequest]) -> StepPlan | None:
        needs = blocks_by_owner(requests, self.shape)
        new = [request.sequence for request in requests if not request.sequence.admitted]
        num_others = self.num_admitted - (len(requests) - len(new))
        alone = len(requests) == 1 and num_others == 0
        takes_over = alone and requests[0].can_write_in_place and not self.blocks.pool.fits(needs, 0)
        if takes_over:
            sequence = requests[0].sequence
            needs[sequence.owner_id] -= len(sequence.partial_blocks(self.shape))
        if not self.blocks.pool.fits(needs, self.watermark_blocks if new and not alone else 0):
            return None

        if takes_over:
            write_in_place(self.blocks, requests[0])
        for number in needs:
            if needs[number]:
                self.blocks.keep_quota(number)
        self.blocks.newest_step += 1
        copies: list[list[Copy]] = [[] for _ in range(self.num_groups)]
        sources: list[tuple[int, int]] = []
        for request in requests:
            allocate(self.blocks, request, copies, sources)
        for block_id, holder in sources:
            self.blocks.release(block_id, holder)
        self.num_copied += sum(len(rows) for rows in copies)
        for sequence in new:
            sequence.admitted = True
            self.num_admitted += 1
            self.num_hit_tokens += sequence.num_cached
            self.num_query_tokens += sequence.num_tokens
        pool = self.blocks.pool
        self.most_blocks = max(self.most_blocks, pool.num_held + len(pool.in_flight))
        return make_plan(requests, copies, self.blocks.newest_step, self.shape)

    def _decide(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> list[BlockRequest]:
        states = [self.sequences[sequence] for sequence in sequences.tolist()]
        return decide(self.blocks, states, num_new_tokens.tolist(), num_lookahead)

    # Committing

    def commit(self, sequence: int, num_computed_tokens: int) -> None:
        state = self.sequences[sequence]
        limit = min(state.reserved, state.num_tokens)
        if not state.num_computed <= num_computed_tokens <= limit:
            raise ValueError(
                f"expected {state.num_computed} .. {limit} computed tokens for sequence {sequence} "
                f"({state.reserved} reserved, {state.num_tokens} known), got {num_computed_tokens} in commit"
            )
        if num_computed_tokens == state.num_computed:
            return
        if state.restored_to:
            if num_computed_tokens != state.restored_to:
                raise ValueError(
                    f"expected {state.restored_to} computed tokens for sequence {sequence}, which was restored to "
                    f"these, got {num_computed_tokens} in commit"
                )
            # Blocks behind the windows were not written: they are released before nodes are made.
            release_behind_windows(self.blocks, state, num_computed_tokens)
            state.restored_to = 0
        if state.node is not None:
            self.num_deduplicated += make_findable(self.blocks, state, num_computed_tokens)
        state.num_computed = num_computed_tokens
        release_behind_windows(self.blocks, state, num_computed_tokens)

    def advance(self, sequences: Int64Array, num_computed_tokens: Int64Array, tokens: Int32Array) -> None:
        for index, (sequence, count) in enumerate(
            zip(sequences.tolist(), num_computed_tokens.tolist(), strict=True)
        ):
            self.commit(sequence, count)
            self.append(sequence, tokens[index : index + 1])

    def complete(self, step: int) -> None:
        if not 1 <= step <= self.blocks.newest_step:
            raise ValueError(f"expected a step of 1 .. {self.blocks.newest_step}, got {step} in complete")
        if self.blocks.overlapped_steps:
            self.blocks.complete(step)

    # Forking, rewinding, closing

    def fork(self, sequence: int) -> int:
        parent = self.sequences[sequence]
        child = ManagedSequence(
            self.num_opened,
            parent.tokens,
            parent.extra_keys,
            self.num_groups,
            parent.owner_id,
            parent.cache_priority,
            parent.most_cached,
        )
        self.num_opened += 1
        self.sequences[child.id] = child
        share_computed(self.blocks, parent, child)
        self.num_admitted += child.admitted
        return child.id

    def rewind(self, sequence: int, position: int) -> int:
        state = self.sequences[sequence]
        if not 0 <= position <= state.num_tokens:
            raise ValueError(
                f"expected a position of 0 .. {state.num_tokens} for sequence {sequence}, got {position} in rewind"
            )
        return forget_from(self.blocks, state, position)

    def close(self, sequence: int) -> None:
        state = self.sequences.pop(sequence)
        for block_id in state.kept_blocks(self.shape, 0):
            self.blocks.release(block_id, state.id)
        self.num_admitted -= state.admitted
        withdraw(self.blocks.tree, state)

    # Owners

    def set_limits(self, owner_id: int, floor_blocks: int, quota_blocks: int) -> None:
        owner_ids = self.blocks.pool.owner_ids
        others = owner_ids.sum_of_other_floors(owner_id)
        if others + floor_blocks > self.blocks.pool.num_blocks:
            raise ValueError(
                f"expected floors of at most {self.blocks.pool.num_blocks} blocks together, got {floor_blocks} for "
                f"owner {owner_id} beside {others} of the others in set_limits"
            )
        owner_ids.set_limits(owner_id, floor_blocks, quota_blocks)

    def owner_counts(self, owner_id: int) -> tuple[int, int, int]:
        """(held, cached, in flight); over all owners they add up to `counts`."""
        return self.blocks.pool.owner_counts(owner_id)

    def num_available_blocks(self, owner_id: int) -> int:
        return self.blocks.pool.num_available_to(owner_id)

    def max_owner_blocks(self, owner_id: int) -> int:
        return self.blocks.pool.max_owner_blocks(owner_id)

    # The whole cache

    def drop(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> tuple[int, int]:
        """(blocks made free, blocks that left the tree and are still held or in flight). `quire.Cache` handles pins."""
        root = self.blocks.tree.roots.get(namespace)
        extra_keys = ExtraKeys(key_positions.tolist(), keys)
        return drop(self.blocks, self.sequences.values(), root, tokens, extra_keys)

    def set_cache_priority(
        self,
        tokens: Int32Array,
        namespace: bytes,
        key_positions: Int64Array,
        keys: list[bytes],
        cache_priority: int,
        start: int,
    ) -> tuple[int, int]:
        """The entries of `results.PriorityChange`. start: >= 0."""
        root = self.blocks.tree.roots.get(namespace)
        extra_keys = ExtraKeys(key_positions.tolist(), keys)
        return set_cache_priority(self.blocks, root, tokens, extra_keys, cache_priority, start)

    def evict_path(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> int:
        root = self.blocks.tree.roots.get(namespace)
        return evict_path(self.blocks, root, tokens, ExtraKeys(key_positions.tolist(), keys))

    def withdraw(self, sequence: int) -> None:
        withdraw(self.blocks.tree, self.sequences[sequence])

    def is_findable(self, sequence: int) -> bool:
        return self.sequences[sequence].node is not None

    def record_events(self, is_on: bool) -> None:
        self.blocks.record_events(is_on)

    @property
    def num_events(self) -> int:
        return len(self.blocks.events)

    def take_events(self) -> EventArrays:
        return self.blocks.events.take()

    def tree(self) -> TreeArrays:
        return tree_arrays(self.blocks)

    def block_map(self) -> tuple[NDArray[np.uint8], Int32Array]:
        """The first two entries of `block_map.BlockMap`."""
        return block_map(self.blocks)

    def content_of(self, block_id: int) -> tuple[bytes, Int32Array, int] | None:
        """The entries of `block_map.BlockContent`."""
        return content_of(self.blocks, block_id)

    def namespaces(self) -> list[bytes]:
        return sorted(self.blocks.tree.roots)

    def reset(self) -> None:
        if self.sequences:
            raise ValueError(
                f"expected no open sequence in reset, got {len(self.sequences)}; close them first"
            )
        self.blocks.reset()

    def resize(self, num_blocks: int, watermark_blocks: int) -> Int32Array:
        """num_blocks: >= 0. watermark_blocks: replaces the manager's watermark."""
        pool = self.blocks.pool
        num_in_use = pool.num_blocks - pool.num_available_blocks
        if num_blocks < num_in_use:
            raise ValueError(
                f"expected at least {num_in_use} blocks in resize, as {pool.num_held} are held and "
                f"{len(pool.in_flight)} in flight, got {num_blocks}"
            )
        self.watermark_blocks = watermark_blocks
        return np.array(self.blocks.resize(num_blocks), np.int32)

    def counts(self) -> tuple[int, int, int, int]:
        """Blocks now (free, cached, held, in flight); they add up to num_blocks."""
        pool = self.blocks.pool
        return len(pool.free), len(pool.cached), pool.num_held, len(pool.in_flight)

    def stats(self) -> dict[str, int]:
        free, cached, held, in_flight = self.counts()
        return {
            "num_blocks": self.blocks.pool.num_blocks,
            "free": free,
            "cached": cached,
            "held": held,
            "in_flight": in_flight,
            "num_sequences": len(self.sequences),
            "num_nodes": self.blocks.tree.num_nodes,
            "hit_tokens": self.num_hit_tokens,
            "query_tokens": self.num_query_tokens,
            "evicted_blocks": self.blocks.num_evicted,
            "copied_blocks": self.num_copied,
            "deduplicated_blocks": self.num_deduplicated,
        }

    @property
    def num_visited(self) -> int:
        """Tree nodes compared so far: the cost of look-ups."""
        return self.blocks.tree.num_visited

    def check(self) -> None:
        check_invariants(self.blocks, self.sequences)
