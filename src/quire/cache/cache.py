"""`Cache`, the KV cache of an engine as a library: it says where every token's K and V live. No tensors.

It checks arguments, turns them into arrays, and makes one call to a block manager: the native one if it is built, else
the plain Python one (`manager/block_manager.py`, the one to read). Both give the same results. The contract is
`protocol.PrefixKVCache`: `help(Cache.reserve)` shows its text. This class does not repeat a call whose body the
protocol has.

Not thread-safe: one owner at a time. Cost: checking is O(tokens given) or O(sequences given); then the back end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends import choose_backend, native_module
from quire.cache import arguments
from quire.cache.arguments import call_manager
from quire.cache.block_counts import max_tokens_for, num_blocks_for, num_blocks_in
from quire.cache.block_map import FREE, GIVEN_UP, PINNED, BlockContent, BlockMap
from quire.cache.events import CacheEvents
from quire.cache.memory_use import MemoryUse
from quire.cache.open_sequence import BlockManager, Sequence
from quire.cache.pins import Pins
from quire.cache.protocol import CacheSequence, PrefixKVCache
from quire.cache.report import report
from quire.cache.results import Dropped, Explanation, Match, OwnerCounts, PriorityChange
from quire.cache.states.memory_split import MemorySplit
from quire.cache.tree_view import TreeView
from quire.cache.types import NORMAL, Int32Array, Int64Array
from quire.errors import ArgumentError
from quire.spec import KVSpec
from quire.step import NativePlan, StepPlan

__all__ = ["Cache", "Dropped", "Explanation", "Match", "OwnerCounts", "Sequence"]

MAX_BLOCK_SIZE = 4096  # a piece of 2 MiB has a thousand tokens and more; the native tree counts to 8191
MAX_NODE_TOKENS = 8191  # the limit of the native tree's node counter
MAX_RUN_BLOCKS = 4096  # in units of the smallest pieces, a page: 512 make a huge page

_Sequences = SequenceOf[CacheSequence] | Int64Array
_Counts = SequenceOf[int] | NDArray[np.integer]


class Cache(PrefixKVCache):
    """A paged KV cache with a prefix tree over `num_blocks` blocks.

    A block holds `block_size` tokens for the layers of one group (`spec.groups`), or several times as many if the
    group's token is small (`KVGroup.tokens_per_block`). A token of a model with two groups needs a slot in a block of
    each. All groups draw on one pool.

        sequence = cache.open(prompt)                          # takes the longest known prefix
        plan = cache.reserve([sequence], [num_new_tokens])     # slots for the tokens to compute; None: no room
        ...                                                    # do plan.copies, write K/V to plan.slot_mapping
        cache.commit(sequence, plan.context_lengths[0])        # computed: others may find them

    Not thread-safe: one owner at a time.

    block_bytes: bytes of a block in the storage, for `memory_use`; `spec.block_bytes(block_size)` unless set.
    node_tokens: tokens of a node of the prefix tree, the largest block: the unit that is shared, reported and stored.
    pins: content that stays in memory (`pins.py`).
    """

    block_name = "block"  # the word for a block in messages
    can_fork = True
    exchange: MemorySplit | None = None

    def __init__(
        self,
        spec: KVSpec,
        *,
        num_blocks: int | None = None,
        memory: str | int | None = None,
        block_size: int = 16,
        prefix_caching: bool = True,
        watermark: float = 0.0,
        overlapped_steps: bool = False,
        run_blocks: int = 1,
        backend: str | None = None,
        eviction: str = "frequency",
    ) -> None:
        """
        Parameters
        ----------
        spec
            The cost of a token, and the groups.
        num_blocks, memory
            Size of the pool: blocks, or bytes ("256MiB") that are divided by `spec.block_bytes(block_size)`.
            At most one of the two; 256 MiB if neither is given.
        block_size
            Tokens per block, 1 .. 4096.
        prefix_caching
            Whether committed tokens can be found by other sequences.
        watermark
            Share of the pool, 0 <= w < 1, that a `reserve` which admits a sequence must leave available.
        overlapped_steps
            The owner submits a step before the last one has ended, and calls `complete`.
        run_blocks
            A power of two, 1 .. 4096: a sequence's blocks lie side by side from the start of a run of that many free
            ids, if there is one; the storage's `run_blocks`. With 1 a block only seeks the next free neighbour.
        backend
            "native", "python", or None: the environment variable QUIRE_BACKEND, else native if built.
        eviction
            The eviction order of cached blocks: "frequency" (the highest age / (uses + 1) first), "lru" (the least
            recently used first), or on backend "python" a policy that was registered
            (`quire.cache.manager.eviction`).
        """
        if not isinstance(spec, KVSpec):
            raise ArgumentError(
                f"expected a KVSpec as spec, got {type(spec).__name__}; see KVSpec.from_config"
            )
        self.spec = spec
        self.block_size = arguments.count(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        self.node_tokens = spec.tokens_per_node(self.block_size)
        if self.node_tokens > MAX_NODE_TOKENS:
            limit = MAX_NODE_TOKENS * self.block_size // self.node_tokens
            raise ArgumentError(
                f"expected a block_size of at most {limit}, as the largest blocks of this model have "
                f"{self.node_tokens // self.block_size} times as many tokens, got {self.block_size}"
            )
        self.num_blocks = num_blocks_in(spec, num_blocks, memory, self.block_size)
        # Every id is below it: growing first takes back the ids that `resize` gave up.
        self.num_block_ids = self.num_blocks
        if not isinstance(watermark, (int, float)) or not 0 <= watermark < 1:
            raise ArgumentError(f"expected a watermark of 0 <= w < 1, got {watermark!r}")
        self.watermark = float(watermark)
        self.prefix_caching = bool(prefix_caching)
        self.overlapped_steps = bool(overlapped_steps)
        self.run_blocks = arguments.count(run_blocks, "run_blocks", 1, MAX_RUN_BLOCKS)
        if self.run_blocks & (self.run_blocks - 1):
            raise ArgumentError(f"expected a power of two as run_blocks, got {run_blocks}")
        self.num_groups = len(spec.groups)
        self.backend = choose_backend(backend, needs="BlockManager")
        self.block_bytes = spec.block_bytes(self.block_size)
        self._full_tokens = [
            group.tokens_per_block(self.block_size) for group in spec.groups if group.span.kind == "full"
        ]
        self._open_ids: set[int] = set()
        self.pins = Pins(self)
        self._manager: BlockManager = _make_manager(
            self.backend,
            eviction,
            [(group.span.kind, group.span.size) for group in spec.groups],
            self.num_blocks,
            self.node_tokens,
            self.prefix_caching,
            self._watermark_blocks(self.num_blocks),
            self.overlapped_steps,
            self.run_blocks,
            blocks_per_node=[group.blocks_per_node for group in spec.groups],
        )

    def __repr__(self) -> str:
        return (
            f"Cache(num_blocks={self.num_blocks}, block_size={self.block_size}, groups={self.num_groups}, "
            f"backend={self.backend!r})"
        )

    # Finding a prefix

    def match(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Match:
        return Match(self._manager.match(*arguments.prompt(token_ids, namespace, extra_keys)))

    def explain(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Explanation:
        return Explanation(*self._manager.explain(*arguments.prompt(token_ids, namespace, extra_keys)))

    def drop(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Dropped:
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        if pins := self.pins.in_what_begins_with(prompt[0], namespace=namespace, extra_keys=extra_keys):
            raise ArgumentError(
                "expected content without pins to drop, got content of a pin of "
                f"{len(pins[0].tokens)} tokens; remove the pin first"
            )
        return Dropped(*self._manager.drop(*prompt))

    def set_cache_priority(
        self,
        token_ids: Any,
        cache_priority: int,
        *,
        start: int = 0,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> PriorityChange:
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        change = arguments.priority_change(cache_priority, start, len(prompt[0]))
        return PriorityChange(*self._manager.set_cache_priority(*prompt, *change))

    def evict_path(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        return self._manager.evict_path(*arguments.prompt(token_ids, namespace, extra_keys))

    def namespaces(self) -> list[bytes]:
        return self._manager.namespaces()

    # Sequences

    def open(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        max_num_tokens: int | None = None,
        owner_id: int = 0,
        cache_priority: int = NORMAL,
        max_cached_tokens: int | None = None,
    ) -> Sequence:
        if max_num_tokens is not None:
            arguments.count(max_num_tokens, "max_num_tokens", 1)
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        owner = arguments.owner_and_cache_priority(owner_id, cache_priority)
        return self._opened(self._manager.open(*prompt, *owner, arguments.most_cached(max_cached_tokens)))

    def fork(self, sequence: CacheSequence | int) -> Sequence:
        return self._opened(call_manager(self._manager.fork, self._id(sequence)))

    def has_room_to_fork(self, sequence: CacheSequence | int) -> bool:
        if (sequence_id := self._id(sequence)) not in self._open_ids:
            raise arguments.closed(sequence_id, "Cache")
        return True  # a fork takes no block of its own before it writes

    def _opened(self, sequence_id: int) -> Sequence:
        self._open_ids.add(sequence_id)
        return Sequence(self._manager, sequence_id, self.num_groups)

    def rewind(self, sequence: CacheSequence | int, position: int) -> int:
        position = arguments.count(position, "position", 0)
        return call_manager(self._manager.rewind, self._id(sequence), position)

    def withdraw(self, sequence: CacheSequence | int) -> None:
        call_manager(self._manager.withdraw, self._id(sequence))

    def close(self, sequence: CacheSequence | int) -> None:
        sequence_id = self._id(sequence)
        call_manager(self._manager.close, sequence_id)
        self._open_ids.discard(sequence_id)

    # A step

    def reserve(
        self, sequences: _Sequences, num_new_tokens: _Counts, *, num_lookahead_tokens: int = 0
    ) -> StepPlan | None:
        return self.reserve_unchecked(*self._step_arguments(sequences, num_new_tokens, num_lookahead_tokens))

    def reserve_unchecked(
        self, sequence_ids: Int64Array, num_new_tokens: Int64Array, num_lookahead_tokens: int = 0
    ) -> StepPlan | None:
        plan = call_manager(self._manager.reserve, sequence_ids, num_new_tokens, num_lookahead_tokens)
        return _plan_of(plan)

    def num_blocks_needed(
        self, sequences: _Sequences, num_new_tokens: _Counts, *, num_lookahead_tokens: int = 0
    ) -> int:
        step = self._step_arguments(sequences, num_new_tokens, num_lookahead_tokens)
        return call_manager(self._manager.num_blocks_needed, *step)

    def restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> StepPlan | None:
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        return _plan_of(call_manager(self._manager.restore, self._id(sequence), num_computed))

    def num_blocks_to_restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> int:
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        return call_manager(self._manager.num_blocks_to_restore, self._id(sequence), num_computed)

    def commit(self, sequence: CacheSequence | int, num_computed_tokens: int) -> None:
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        call_manager(self._manager.commit, self._id(sequence), num_computed)

    def advance(self, sequences: _Sequences, num_computed_tokens: _Counts, token_ids: Any) -> None:
        ids, counts, _ = self._step_arguments(sequences, num_computed_tokens, 0)
        self.advance_unchecked(ids, counts, arguments.one_token_each(token_ids, len(ids)))

    def advance_unchecked(
        self, sequence_ids: Int64Array, num_computed_tokens: Int64Array, token_ids: Int32Array
    ) -> None:
        call_manager(self._manager.advance, sequence_ids, num_computed_tokens, token_ids)

    def complete(self, step: int) -> None:
        call_manager(self._manager.complete, arguments.count(step, "step", 1))

    # Size

    def reset(self) -> None:
        call_manager(self._manager.reset)

    def resize(self, num_blocks: int) -> Int32Array:
        count = arguments.count(num_blocks, "num_blocks", 1, 2**31 - 1)
        given_up = call_manager(self._manager.resize, count, self._watermark_blocks(count))
        self.num_blocks = count
        self.num_block_ids = max(self.num_block_ids, count)
        return given_up

    def trim(self, share_kept: float = 0.0) -> Int32Array:
        _, cached, held, in_flight = self._manager.counts()
        num_kept = int(cached * arguments.share(share_kept, "share_kept"))
        if num_kept < cached:
            call_manager(self._manager.resize, held + in_flight + num_kept, 0)
            call_manager(self._manager.resize, self.num_blocks, self._watermark_blocks(self.num_blocks))
        states, _ = self._manager.block_map()
        return np.flatnonzero((states == FREE) | (states == GIVEN_UP)).astype(np.int32)

    def _watermark_blocks(self, num_blocks: int) -> int:
        return math.ceil(self.watermark * num_blocks)

    # Owners

    def set_limits(self, owner_id: int, floor_blocks: int = 0, quota_blocks: int = -1) -> None:
        limits = arguments.owner_limits(owner_id, floor_blocks, quota_blocks)
        call_manager(self._manager.set_limits, *limits)

    def owner_counts(self, owner_id: int) -> OwnerCounts:
        return OwnerCounts(*self._manager.owner_counts(arguments.owner_number(owner_id)))

    def num_available_blocks(self, owner_id: int = 0) -> int:
        return self._manager.num_available_blocks(arguments.owner_number(owner_id))

    def max_owner_blocks(self, owner_id: int = 0) -> int:
        return self._manager.max_owner_blocks(arguments.owner_number(owner_id))

    # What fits

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(self.spec, num_tokens, self.block_size)

    def max_sequence_tokens(self) -> int:
        return max_tokens_for(self.spec, self.num_possible_blocks, self.block_size)

    def blocks_later(self, num_tokens: int, num_reserved: int) -> int:
        return sum(-(-num_tokens // size) - -(-num_reserved // size) for size in self._full_tokens)

    def margin(self, share: float) -> int:
        return math.ceil(share * self.num_possible_blocks)

    # Reports

    def record_events(self, is_on: bool) -> None:
        self._manager.record_events(bool(is_on))

    def take_events(self) -> CacheEvents:
        return CacheEvents.from_arrays(self._manager.take_events())

    def tree(self) -> TreeView:
        return TreeView.from_arrays(self._manager.tree())

    def block_map(self) -> BlockMap:
        states, namespace_index = self._manager.block_map()
        if len(self.pins):
            states = states.copy()
            states[self.pins.block_ids] = PINNED
        return BlockMap(states, namespace_index, self._manager.namespaces())

    def content_of(self, block_id: int) -> BlockContent | None:
        content = call_manager(self._manager.content_of, arguments.count(block_id, "a block", 0))
        return None if content is None else BlockContent(*content)

    @property
    def num_free_blocks(self) -> int:
        free, cached, _, _ = self._manager.counts()
        return free + cached

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with findable content that no sequence holds."""
        return self._manager.counts()[1]

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 .. 1, without cached ones."""
        free, cached, _, _ = self._manager.counts()
        return 1.0 - (free + cached) / self.num_blocks

    def stats(self) -> dict[str, int]:
        stats, pinned = self._manager.stats(), self.pins.num_blocks
        return {**stats, "held": stats["held"] - pinned, "pinned": pinned}

    def memory_use(self) -> MemoryUse:
        _, cached, held, in_flight = self._manager.counts()
        used = 0
        computed = {i: self._manager.num_computed_tokens(i) for i in self._open_ids}
        for group in self.spec.groups:
            size = group.tokens_per_block(self.block_size)
            tokens_in = np.zeros(self.num_block_ids, np.int64)
            for sequence_id, num_computed in computed.items():
                table = self._manager.block_table(sequence_id, group.index)[: -(-num_computed // size)]
                filled = np.minimum(size, num_computed - size * np.arange(len(table)))
                is_kept = table >= 0
                np.maximum.at(tokens_in, table[is_kept], filled[is_kept])
            used += int(tokens_in.sum()) * group.bytes_per_token
        return MemoryUse(
            reserved=(held + in_flight) * self.block_bytes,
            used=used,
            later=0,
            external=0,
            cached=cached * self.block_bytes,
            peak=self._manager.most_blocks * self.block_bytes,
            total=self.num_blocks * self.block_bytes,
        )

    def check(self) -> None:
        self._manager.check()
        self.pins.prove()

    def report(self) -> str:
        """Tables of block states and owners, for a person. O(nodes)."""
        return report(self)

    # Arguments and errors

    def _id(self, sequence: CacheSequence | int) -> int:
        if isinstance(sequence, Sequence):
            return sequence.id_in(self._manager)
        return arguments.count(sequence, "a sequence id", 0)

    def _step_arguments(
        self, sequences: _Sequences, num_new_tokens: _Counts, num_lookahead_tokens: int
    ) -> tuple[Int64Array, Int64Array, int]:
        return arguments.step(sequences, self._id, num_new_tokens, num_lookahead_tokens)


def _plan_of(plan: StepPlan | NativePlan | None) -> StepPlan | None:
    """A manager's plan as a `StepPlan`. The extension has its own class, which is the plan of its group 0 as well."""
    if plan is None or isinstance(plan, StepPlan):
        return plan
    if plan.num_groups == 1:
        return StepPlan([plan])
    return StepPlan([plan, *map(plan.group, range(1, plan.num_groups))])


def _make_manager(backend: str, eviction: str, *args: Any, blocks_per_node: list[int]) -> BlockManager:
    if backend == "native":
        if eviction not in ("frequency", "lru"):
            raise ArgumentError(
                f"expected eviction 'frequency' or 'lru' on backend 'native', the policies there, got {eviction!r}; "
                "use backend='python'"
            )
        return native_module().BlockManager(*args, blocks_per_node=blocks_per_node, eviction=eviction)  # type: ignore[union-attr]
    from quire.cache.manager.block_manager import PythonBlockManager

    return PythonBlockManager(*args, blocks_per_node=blocks_per_node, eviction=eviction)
