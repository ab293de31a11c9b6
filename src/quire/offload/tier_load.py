"""`TierLoads`: looks waiting sequences up in the tiers, and loads their prefixes into the pool.

A sequence that begins to wait is looked up in the stack's threads. Tokens that the tiers have beyond those in memory
are loaded if that is expected to take less time than computing them: the sequence is opened, blocks are reserved, and
the stack's threads write each segment into them. When the load has ended, for any reason, the segments that arrived are
committed as if they had been computed; the rest is computed.

The keys of a chain: whole segments of `segment_tokens`, and single blocks where a prefix may end within a segment:
behind the leading segments found, behind the last one found, and where memory ended when the search began. The prefix
in memory need not be in a tier: with policy "eviction" the tail of a prefix is stored long before its head.

Invariants
    U1  a load writes only blocks of its sequence, only behind the tokens in memory, and never after `finish` has
        returned.
    U2  tokens are committed only up to the first segment that did not arrive; for a model with state layers all of
        them, with the state at their end, or none.

Cost: a chain's hashes (about 1 us for each block) when a sequence begins to wait; a load costs the engine's thread one
reservation and one commit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quire.cache.block_hash import block_hashes, root_hash, root_key
from quire.cache.protocol import CacheSequence, PrefixKVCache
from quire.cache.states.state_cache import StateCache
from quire.memory.block_bytes import BlockStorage, node_table
from quire.offload.offloaded_sequence import OffloadedSequence
from quire.offload.score_stores import ScoreStores
from quire.offload.states import StateStores, state_keys
from quire.offload.store import OnSegment
from quire.offload.throughputs import Throughputs
from quire.offload.tier_budget import TierBudget
from quire.step import StepPlan
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack
from quire.tiers.transfer import Load, Lookup

__all__ = ["LoadedSpan", "Search", "TierLoad", "TierLoads"]


class LoadedSpan(NamedTuple):
    """Tokens `start` to `stop` of a sequence, loaded from a tier."""

    start: int
    stop: int
    tier: str


@dataclass(eq=False)
class Search:
    """A search for a sequence's tokens in the tiers; `done` once its results are there.

    stored: keys found, with their tiers, in order, with gaps. is_seen: the scheduler has found it done, at the
    beginning of a step: a search that ends within a step counts from the next. lookups: those made for it. states: keys
    of the states found, with their tiers; None for a model without state layers. scores: the load of the tokens'
    scores, for a request that asks for them. excluded: tiers that are not asked.
    """

    tokens: np.ndarray
    extra_keys: tuple[tuple[int, bytes], ...]
    root: bytes
    stored: list[tuple[SegmentKey, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lookups: list[Lookup] = field(default_factory=list)
    states: list[tuple[SegmentKey, str]] | None = None
    is_seen: bool = False
    scores: Load | None = None
    excluded: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        return self.ended.is_set() and (self.scores is None or self.scores.done.is_set())

    def chain_behind(self, num_in_memory: int) -> list[tuple[SegmentKey, str]]:
        """The keys to load behind `num_in_memory` tokens, without a gap, with their tiers."""
        run: list[tuple[SegmentKey, str]] = []
        at = num_in_memory
        for key, tier in self.stored:
            if key.end <= at:
                continue
            if key.start > at:
                break
            run.append((key, tier))
            at = key.end
        return run

    def num_tokens(self, num_in_memory: int, max_cached: int | None = None) -> int:
        """Tokens after such a load, at most `max_cached`: the last known token is always computed, and a hit ends where
        a state does."""
        run = self.chain_behind(num_in_memory)
        most = len(self.tokens) - 1 if max_cached is None else min(max_cached, len(self.tokens) - 1)
        reach = max(num_in_memory, min(run[-1][0].end, most)) if run else num_in_memory
        if self.states is None:
            return reach
        return max(
            (key.end for key, _ in self.states if num_in_memory < key.end <= reach), default=num_in_memory
        )


@dataclass(eq=False)
class TierLoad:
    """A load into the blocks of an open sequence. num_in_memory: tokens that were in memory when it began.

    state: for a model with state layers, the load of its state, written to `slots` once all segments are there.
    tier: the one with most of its segments. began_s, ended_s: by the stack's clock; the latter empty until the end.
    """

    load: Load
    chain: list[SegmentKey]
    num_in_memory: int
    num_tokens: int
    tier: str
    began_s: float
    ended_s: list[float]
    state: Load | None = None
    slots: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        return self.load.done.is_set() and (self.state is None or self.state.done.is_set())


class TierLoads:
    """See the module's text. fingerprint: of the model, see `quire.cache.block_hash.root_key`. budgeted: tiers on other
    machines, which may be slow at any time: their look-ups and trials have a `TierBudget`."""

    def __init__(
        self,
        cache: PrefixKVCache,
        storage: BlockStorage,
        stack: TierStack,
        fingerprint: bytes,
        segment_tokens: int,
        speeds: Throughputs,
        states: StateStores | None = None,
        scores: ScoreStores | None = None,
        budgeted: Collection[str] = (),
    ) -> None:
        self._cache = cache
        self._states = states
        self._scores = scores
        self._storage = storage
        self._stack = stack
        self._fingerprint = fingerprint
        self._segment_tokens = segment_tokens
        self._node_tokens: int = cache.node_tokens
        self._speeds = speeds
        self._budget = TierBudget(speeds)
        self._budgeted = budgeted
        self.changed = threading.Event()
        """Set when a search or a load has ended."""
        self.on_segment: OnSegment | None = None
        """Called with each segment before its load begins, if set."""
        self.loaded_tokens: Counter[str] = Counter()  # since the start, by tier

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Looks for segments of another model from now on. No search or load may be under way."""
        self._fingerprint = fingerprint

    def search(self, sequence: OffloadedSequence, *, is_wanted: bool = False) -> None:
        """Begins to look the sequence up, in `sequence.search`. is_wanted: every tier is worth its time."""
        request, tokens = sequence.request, sequence.token_ids()
        key = request.key
        excluded = () if is_wanted else self._too_slow_tiers()
        search = self.look_up(tokens, key.namespace, key.extra_keys, excluded)
        if request.scores is not None and self._scores is not None:
            search.scores = self._scores.load(
                key.namespace,
                tokens,
                search.extra_keys,
                request.scores.start,
                lambda _: self.changed.set(),
                request.cache_priority,
            )
        sequence.search = search

    def _too_slow_tiers(self) -> tuple[str, ...]:
        """The tiers whose look-ups would make requests wait for too long; counts the request for each."""
        excluded = tuple(
            tier
            for tier, seconds in self._stack.round_trips().items()
            if tier in self._budgeted and not self._budget.may_look_up(tier, seconds)
        )
        for tier in excluded:
            self._stack.count_not_asked(tier)
        return excluded

    def look_up(
        self,
        tokens: np.ndarray,
        namespace: bytes,
        extra_keys: Mapping[int, bytes] | None,
        excluded: tuple[str, ...] = (),
    ) -> Search:
        """Begins to look tokens up in the tiers but `excluded`."""
        search = Search(
            tokens,
            tuple(sorted((extra_keys or {}).items())),
            root_key(self._fingerprint, namespace),
            excluded=excluded,
        )
        search.states = None if self._states is None else []
        whole = len(tokens) // self._segment_tokens * self._segment_tokens
        keys = segment_keys(search.root, tokens[:whole], self._segment_tokens, extra_keys=search.extra_keys)
        in_memory = self._cache.match(tokens, namespace=namespace, extra_keys=extra_keys).num_tokens
        self._look_up_keys(
            search,
            keys,
            lambda tiers: self._look_up_tails(search, keys, tiers, in_memory // self._segment_tokens),
        )
        return search

    def _look_up_keys(
        self, search: Search, keys: list[SegmentKey], on_done: Callable[[tuple[str | None, ...]], None]
    ) -> None:
        """on_done: called in a thread of the stack with the tier of each key, or None."""
        if not keys:
            on_done(())
            return

        def end(lookup: Lookup) -> None:
            for tier, seconds in lookup.seconds.items():
                self._budget.add_look_up(tier, seconds)
            on_done(lookup.tiers)

        hashes = [key.hash for key in keys]
        search.lookups.append(self._stack.lookup(hashes, excluded=search.excluded, on_done=end))

    def _look_up_tails(
        self, search: Search, keys: list[SegmentKey], tiers: tuple[str | None, ...], in_memory: int
    ) -> None:
        """In a thread of the stack: adds the whole segments found, and looks single blocks of missing ones up.

        in_memory: number of whole segments in memory.
        """
        search.stored += [(key, tier) for key, tier in zip(keys, tiers, strict=True) if tier is not None]
        there = [tier is not None for tier in tiers]
        leading = there.index(False) if False in there else len(there)
        behind_last = len(there) - there[::-1].index(True) if True in there else 0
        tails: list[SegmentKey] = []
        if self._segment_tokens > self._node_tokens:
            for index in sorted({leading, behind_last, in_memory}):
                if index >= len(there) or not there[index]:
                    tails += self._blocks(search, keys, index)
        self._look_up_keys(search, tails, lambda tiers: self._add_tails(search, tails, tiers))

    def _blocks(self, search: Search, keys: list[SegmentKey], index: int) -> list[SegmentKey]:
        """The keys of the single blocks of a search's segment `index`."""
        start = index * self._segment_tokens
        stop = min(start + self._segment_tokens, len(search.tokens)) // self._node_tokens * self._node_tokens
        return segment_keys(
            search.root,
            search.tokens[start:stop],
            self._node_tokens,
            start=start,
            parent=keys[index - 1].hash if index else None,
            extra_keys=search.extra_keys,
        )

    def _add_tails(self, search: Search, keys: list[SegmentKey], tiers: tuple[str | None, ...]) -> None:
        search.stored += [(key, tier) for key, tier in zip(keys, tiers, strict=True) if tier is not None]
        search.stored.sort(key=lambda one: one[0].start)
        self._look_up_states(search)

    def _look_up_states(self, search: Search) -> None:
        """Looks the states up at the ends of the blocks found."""
        if search.states is None or not search.stored:
            self._end(search)
            return
        size = self._node_tokens
        ends = {end for key, _ in search.stored for end in range(key.start + size, key.end + 1, size)}
        stop = min(max(ends), len(search.tokens) - 1)
        keys = [
            key
            for key in state_keys(search.root, search.tokens[:stop], size, search.extra_keys)
            if key.end in ends
        ]
        self._look_up_keys(search, keys, lambda tiers: self._add_states(search, keys, tiers))

    def _add_states(self, search: Search, keys: list[SegmentKey], tiers: tuple[str | None, ...]) -> None:
        search.states = [(key, tier) for key, tier in zip(keys, tiers, strict=True) if tier is not None]
        self._end(search)

    def _end(self, search: Search) -> None:
        search.ended.set()
        self.changed.set()

    def losses(self, search: Search, at: int) -> dict[str, float]:
        """By tier that has evicted the block or segment of a search's token `at`, seconds since then."""
        whole = len(search.tokens) // self._segment_tokens * self._segment_tokens
        keys = segment_keys(
            search.root, search.tokens[:whole], self._segment_tokens, extra_keys=search.extra_keys
        )
        index = at // self._segment_tokens
        holders = [*keys[index : index + 1], *self._blocks(search, keys, index)]
        return self._stack.losses([key.hash for key in holders if key.start <= at < key.end])

    def num_unanswered(self) -> dict[str, int]:
        """By tier, the number of calls that failed or were skipped after a failure."""
        return self._stack.num_unanswered()

    def pending_tiers(self, search: Search) -> tuple[str, ...]:
        """The tiers that a search waits for now: those being asked, or all if it waits for its turn."""
        if search.done:
            return ()
        names = [lookup.current_tier for lookup in search.lookups if not lookup.done.is_set()]
        return tuple(name for name in names if name is not None) or self._stack.tier_names

    def num_worth_loading(
        self, sequence: OffloadedSequence, num_in_memory: int, *, is_wanted: bool = False
    ) -> int:
        """Tokens that the sequence should have after a load; `num_in_memory` if none is worth loading.

        is_wanted: every load is worth its time."""
        search = sequence.search
        if search is None or not search.done:
            return num_in_memory
        stop = search.num_tokens(num_in_memory, sequence.max_cached_tokens)
        if is_wanted:
            return stop
        num_bytes, num_segments = Counter[str](), Counter[str]()
        per_token = self._cache.spec.bytes_per_token
        for key, tier in search.chain_behind(num_in_memory):
            if key.start < stop:
                num_bytes[tier] += per_token * len(key.tokens)
                num_segments[tier] += 1
        for key, tier in search.states or ():
            if key.end == stop and self._states is not None:
                num_bytes[tier] += self._states.layout.bytes_per_state
        load_s = sum(
            self._stack.estimate_seconds(count, tier, num_segments[tier]) for tier, count in num_bytes.items()
        )
        loss_s = load_s - self._speeds.compute_s(stop - num_in_memory)
        if loss_s <= 0 or all(
            tier in self._budgeted and self._budget.may_try(tier, loss_s) for tier in num_bytes
        ):
            return stop
        for tier in num_bytes:
            self._stack.count_not_loaded(tier)
        return num_in_memory

    def begin(
        self, sequence: OffloadedSequence, cache_sequence: CacheSequence, plan: StepPlan, num_tokens: int
    ) -> None:
        """Starts to load up to `num_tokens` tokens into the sequence, for which the plan has reserved blocks."""
        num_in_memory = cache_sequence.num_computed_tokens
        states = plan.states
        if states is not None and self._states is not None:
            self._states.slots.apply(states.operations)
        self._storage.run_copies(plan)
        search = sequence.search
        assert search is not None
        pairs = [pair for pair in search.chain_behind(num_in_memory) if pair[0].start < num_tokens]
        chain = [key for key, _ in pairs]
        if self.on_segment is not None:
            self._report_segments(self.on_segment, chain, sequence.request.key.namespace, search)
        tables = [cache_sequence.block_table(group) for group in range(self._cache.num_groups)]
        size = self._node_tokens
        writer = self._storage.block_writer(node_table(self._cache.spec, tables))

        def write(index: int, payload: np.ndarray) -> None:
            key = chain[index]
            count = min(key.end, num_tokens) - key.start
            writer.write(
                key.start // size, key.end // size, payload, count, first=max(0, num_in_memory - key.start)
            )

        def places(index: int) -> list[Any] | None:
            key = chain[index]
            is_whole = num_in_memory <= key.start and key.end <= num_tokens
            return writer.places(key.start // size, key.end // size) if is_whole else None

        began_s, ended_s = self._stack.clock(), list[float]()

        def end(_: Load) -> None:
            ended_s.append(self._stack.clock())
            self.changed.set()

        load = self._stack.load(
            chain,
            into=write,
            places=places,
            on_done=end,
            cache_priority=sequence.request.cache_priority,
        )
        [(tier, _)] = Counter(tier for _, tier in pairs).most_common(1) or [("", 0)]
        sequence.load = TierLoad(load, chain, num_in_memory, num_tokens, tier, began_s, ended_s)
        if isinstance(self._cache, StateCache) and self._states is not None:
            sequence.load.slots = self._cache.slots_to_load(cache_sequence)
            sequence.load.state = self._stack.load(
                [key for key, _ in search.states or () if key.end == num_tokens],
                on_done=lambda _: self.changed.set(),
                cache_priority=sequence.request.cache_priority,
                layout=self._states.layout,
            )

    def _report_segments(
        self, on_segment: OnSegment, chain: list[SegmentKey], namespace: bytes, search: Search
    ) -> None:
        if not chain:
            return
        size, tokens = self._cache.block_size, search.tokens[: chain[-1].start]
        hashes = [root_hash(namespace), *block_hashes(namespace, tokens, dict(search.extra_keys), size)]
        for key in chain:
            on_segment(key, namespace, hashes[key.start // size])

    def finish(self, sequence: OffloadedSequence) -> list[LoadedSpan]:
        """Ends the sequence's load and commits the tokens that arrived; returns where they come from."""
        tier_load = sequence.load
        assert tier_load is not None
        sequence.load = sequence.search = None
        tier_load.load.cancel()  # U1
        arrived, spans = tier_load.num_in_memory, list[LoadedSpan]()
        for key, tier in zip(tier_load.chain, tier_load.load.tiers, strict=False):
            stop = min(key.end, tier_load.num_tokens)
            spans.append(LoadedSpan(arrived, stop, tier))
            arrived = stop
        if tier_load.state is not None and not self._write_state(tier_load, tier_load.state, arrived):
            arrived = tier_load.num_in_memory
            spans.clear()
        if arrived > tier_load.num_in_memory:
            self._cache.commit(sequence.cache_sequence, arrived)
            for start, stop, tier in spans:
                self.loaded_tokens[tier] += stop - start
        [ended_s] = tier_load.ended_s
        self._budget.add_load(tier_load.tier, ended_s - tier_load.began_s, arrived - tier_load.num_in_memory)
        sequence.num_computed = arrived
        return spans

    def _write_state(self, tier_load: TierLoad, state: Load, arrived: int) -> bool:
        """Writes the state to its slots, if it and all tokens before it have arrived; True if so."""
        state.cancel()
        if self._states is None or arrived < tier_load.num_tokens or not state.payloads:
            return False
        for slot in tier_load.slots:
            self._states.slots.write(slot, state.payloads[0])
        return True
