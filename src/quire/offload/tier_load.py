"""Prefixes on their way up from the tiers: how much of a waiting sequence is there, and its loading.

A sequence that begins to wait is looked up in the stack's threads. What is found beyond what memory holds is loaded
where that is expected to take less time than computing it: its sequence is opened, the blocks are reserved, and the
stack's threads write each segment into them. When the load has ended, by whatever way, what has arrived is committed
as if it had been computed; the rest is computed.

The names of a chain: whole segments of `segment_tokens`, and single blocks where a prefix may end within one: behind
the leading ones that are there, behind the last one that is, and where memory ended when the search began. What memory
has need not be in a tier: with policy "eviction" the tail of a prefix is stored long before its head.

Invariants
    U1  only the blocks of the loading sequence are written, only beyond what it found in memory, and never after
        `finish` has returned.
    U2  tokens are committed only up to the first segment that did not arrive; of a model with state layers all of them,
        with the state at their end, or none.

Cost: a chain's hashes (about 1 us for each block) when a sequence begins to wait; a load costs the engine's thread one
reservation and one commit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.cache.block_hash import block_hashes, root_hash, root_key
from quire.cache.protocol import CacheSequence, PrefixKVCache
from quire.cache.state_cache import StateCache
from quire.memory.block_bytes import BlockStorage, node_table
from quire.offload.offloaded_sequence import OffloadedSequence
from quire.offload.states import StateStores, state_names
from quire.offload.store import OnName
from quire.offload.throughputs import Throughputs
from quire.step import StepPlan
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack
from quire.tiers.transfer import Load, Lookup

__all__ = ["Search", "TierLoad", "TierLoads"]


@dataclass(eq=False)
class Search:
    """How far a sequence's tokens are in the tiers; `done` once that is known.

    is_seen: whether the scheduler has found it done, at the begin of a step: what ends within one counts from the next.
    lookups: those made for it. states: of a model with state layers, the states that are there, each ending where its
    name does, with its tier; None for another model.
    """

    tokens: np.ndarray
    extra_keys: tuple[tuple[int, bytes], ...]
    root: bytes
    stored: list[tuple[SegmentKey, str]] = field(
        default_factory=list
    )  # with the tier of each, in order, with holes
    ended: threading.Event = field(default_factory=threading.Event)
    lookups: list[Lookup] = field(default_factory=list)
    states: list[tuple[SegmentKey, str]] | None = None
    is_seen: bool = False

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def beyond(self, found: int) -> list[tuple[SegmentKey, str]]:
        """What could be loaded behind the `found` tokens that memory has: without a hole, from the token `found` on."""
        run: list[tuple[SegmentKey, str]] = []
        at = found
        for name, tier in self.stored:
            if name.end <= at:
                continue
            if name.start > at:
                break
            run.append((name, tier))
            at = name.end
        return run

    def num_tokens(self, found: int) -> int:
        """Tokens that there would be then: the last one known is always computed, and a hit ends where a state does."""
        run = self.beyond(found)
        reach = max(found, min(run[-1][0].end, len(self.tokens) - 1)) if run else found
        if self.states is None:
            return reach
        return max((name.end for name, _ in self.states if found < name.end <= reach), default=found)


@dataclass(eq=False)
class TierLoad:
    """A load under way into the blocks of an open sequence. found: tokens that were in memory when it began.

    state: of a model with state layers, the load of its state, which goes to `slots` once all is there.
    """

    load: Load
    chain: list[SegmentKey]
    found: int
    num_tokens: int
    state: Load | None = None
    slots: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        return self.load.done.is_set() and (self.state is None or self.state.done.is_set())


class TierLoads:
    """Looks sequences up and loads them. fingerprint: of the model, see `quire.cache.block_hash.root_key`."""

    def __init__(
        self,
        cache: PrefixKVCache,
        storage: BlockStorage,
        stack: TierStack,
        fingerprint: bytes,
        segment_tokens: int,
        speeds: Throughputs,
        states: StateStores | None = None,
    ) -> None:
        self._cache = cache
        self._states = states
        self._storage = storage
        self._stack = stack
        self._fingerprint = fingerprint
        self._segment_tokens = segment_tokens
        self._node_tokens: int = cache.node_tokens
        self._speeds = speeds
        self.changed = threading.Event()
        """Set when a search or a load has ended."""
        self.on_name: OnName | None = None
        """Called with each segment before its load begins, where anybody wants to know."""
        self.loaded_tokens: Counter[str] = Counter()  # since the start, by tier

    def renew(self, fingerprint: bytes) -> None:
        """Look for what is stored of another model from now on. Nothing is searched or loaded then."""
        self._fingerprint = fingerprint

    def search(self, sequence: OffloadedSequence) -> None:
        """Begins to look the sequence up; `sequence.search` says how far it has come."""
        request = sequence.request
        sequence.search = self.look_up(sequence.token_ids(), request.key.namespace, request.key.extra_keys)

    def look_up(self, tokens: np.ndarray, namespace: bytes, extra_keys: Mapping[int, bytes] | None) -> Search:
        """Begins to look tokens up; what is returned says how far that has come."""
        search = Search(
            tokens, tuple(sorted((extra_keys or {}).items())), root_key(self._fingerprint, namespace)
        )
        search.states = None if self._states is None else []
        whole = len(tokens) // self._segment_tokens * self._segment_tokens
        names = segment_keys(search.root, tokens[:whole], self._segment_tokens, extra_keys=search.extra_keys)
        in_memory = self._cache.match(tokens, namespace=namespace, extra_keys=extra_keys).num_tokens
        self._ask(
            search,
            names,
            lambda found: self._ask_tails(search, names, found, in_memory // self._segment_tokens),
        )
        return search

    def _ask(
        self, search: Search, names: list[SegmentKey], then: Callable[[tuple[str | None, ...]], None]
    ) -> None:
        """then: called in some thread, with the tier of each name."""
        if not names:
            then(())
            return
        keys = [name.key for name in names]
        search.lookups.append(self._stack.lookup(keys, on_done=lambda lookup: then(lookup.found)))

    def _ask_tails(
        self, search: Search, names: list[SegmentKey], found: tuple[str | None, ...], in_memory: int
    ) -> None:
        """Some thread's: notes which whole segments there are, and asks for single blocks of some that are not.

        in_memory: whole segments that memory has.
        """
        search.stored += [(name, tier) for name, tier in zip(names, found, strict=True) if tier is not None]
        there = [tier is not None for tier in found]
        leading = there.index(False) if False in there else len(there)
        behind_last = len(there) - there[::-1].index(True) if True in there else 0
        tails: list[SegmentKey] = []
        if self._segment_tokens > self._node_tokens:
            for index in sorted({leading, behind_last, in_memory}):
                if index >= len(there) or not there[index]:
                    tails += self._blocks(search, names, index)
        self._ask(search, tails, lambda where: self._asked_tails(search, tails, where))

    def _blocks(self, search: Search, names: list[SegmentKey], index: int) -> list[SegmentKey]:
        """The names of the single blocks that the segment `index` of a search consists of."""
        start = index * self._segment_tokens
        stop = min(start + self._segment_tokens, len(search.tokens)) // self._node_tokens * self._node_tokens
        return segment_keys(
            search.root,
            search.tokens[start:stop],
            self._node_tokens,
            start=start,
            parent=names[index - 1].key if index else None,
            extra_keys=search.extra_keys,
        )

    def _asked_tails(self, search: Search, names: list[SegmentKey], found: tuple[str | None, ...]) -> None:
        search.stored += [(name, tier) for name, tier in zip(names, found, strict=True) if tier is not None]
        search.stored.sort(key=lambda one: one[0].start)
        self._ask_states(search)

    def _ask_states(self, search: Search) -> None:
        """Which states there are of what is stored."""
        if search.states is None or not search.stored:
            self._end(search)
            return
        size = self._node_tokens
        ends = {end for name, _ in search.stored for end in range(name.start + size, name.end + 1, size)}
        stop = min(max(ends), len(search.tokens) - 1)
        names = [
            name
            for name in state_names(search.root, search.tokens[:stop], size, search.extra_keys)
            if name.end in ends
        ]
        self._ask(search, names, lambda where: self._asked_states(search, names, where))

    def _asked_states(self, search: Search, names: list[SegmentKey], found: tuple[str | None, ...]) -> None:
        search.states = [(name, tier) for name, tier in zip(names, found, strict=True) if tier is not None]
        self._end(search)

    def _end(self, search: Search) -> None:
        search.ended.set()
        self.changed.set()

    def losses(self, search: Search, at: int) -> dict[str, float]:
        """Which tiers have given up what held the token `at` of a search, alone or in a segment; seconds ago."""
        whole = len(search.tokens) // self._segment_tokens * self._segment_tokens
        names = segment_keys(
            search.root, search.tokens[:whole], self._segment_tokens, extra_keys=search.extra_keys
        )
        index = at // self._segment_tokens
        holders = [*names[index : index + 1], *self._blocks(search, names, index)]
        return self._stack.losses([name.key for name in holders if name.start <= at < name.end])

    def unanswered(self) -> dict[str, int]:
        """By tier, how many calls have failed, or were not made as it is given a rest after a failure."""
        return self._stack.unanswered()

    def waited_for(self, search: Search) -> tuple[str, ...]:
        """The tiers whose answer a search waits for now: the one that is asked, or all where it waits for its turn."""
        if search.done:
            return ()
        asked = [lookup.asked for lookup in search.lookups if not lookup.done.is_set()]
        return tuple(name for name in asked if name is not None) or self._stack.tier_names

    def num_worth_loading(self, sequence: OffloadedSequence, found: int) -> int:
        """Tokens that the sequence, of which memory has `found`, had better have after loading; `found` if none."""
        search = sequence.search
        if search is None or not search.done:
            return found
        stop = search.num_tokens(found)
        num_bytes: Counter[str] = Counter()
        per_token = self._cache.spec.bytes_per_token
        for name, tier in search.beyond(found):
            if name.start < stop:
                num_bytes[tier] += per_token * len(name.tokens)
        for name, tier in search.states or ():
            if name.end == stop and self._states is not None:
                num_bytes[tier] += self._states.layout.bytes_per_state
        load_s = sum(self._stack.estimate_seconds(count, tier) for tier, count in num_bytes.items())
        return stop if load_s <= self._speeds.compute_s(stop - found) else found

    def begin(
        self, sequence: OffloadedSequence, cache_sequence: CacheSequence, plan: StepPlan, num_tokens: int
    ) -> None:
        """Starts to load up to `num_tokens` into the sequence, for which the plan has reserved them."""
        found = cache_sequence.num_computed_tokens
        states = plan.states
        if states is not None and self._states is not None:
            self._states.slots.apply(states.operations)
        self._storage.run_copies(plan)
        search = sequence.search
        assert search is not None
        chain = [name for name, _ in search.beyond(found) if name.start < num_tokens]
        if self.on_name is not None:
            self._tell_names(self.on_name, chain, sequence.request.key.namespace, search)
        tables = [cache_sequence.block_table(group) for group in range(self._cache.num_groups)]
        size = self._node_tokens
        writer = self._storage.block_writer(node_table(self._cache.spec, tables))

        def write(index: int, payload: np.ndarray) -> None:
            name = chain[index]
            count = min(name.end, num_tokens) - name.start
            writer.write(
                name.start // size, name.end // size, payload, count, first=max(0, found - name.start)
            )

        def places(index: int) -> list[Any] | None:
            name = chain[index]
            is_whole = found <= name.start and name.end <= num_tokens
            return writer.places(name.start // size, name.end // size) if is_whole else None

        load = self._stack.load(
            chain,
            into=write,
            places=places,
            on_done=lambda _: self.changed.set(),
            cache_priority=sequence.request.cache_priority,
        )
        sequence.load = TierLoad(load, chain, found, num_tokens)
        if isinstance(self._cache, StateCache) and self._states is not None:
            sequence.load.slots = self._cache.slots_to_load(cache_sequence)
            sequence.load.state = self._stack.load(
                [name for name, _ in search.states or () if name.end == num_tokens],
                on_done=lambda _: self.changed.set(),
                cache_priority=sequence.request.cache_priority,
                layout=self._states.layout,
            )

    def _tell_names(self, tell: OnName, chain: list[SegmentKey], namespace: bytes, search: Search) -> None:
        if not chain:
            return
        size, tokens = self._cache.block_size, search.tokens[: chain[-1].start]
        hashes = [root_hash(namespace), *block_hashes(namespace, tokens, dict(search.extra_keys), size)]
        for name in chain:
            tell(name, namespace, hashes[name.start // size])

    def finish(self, sequence: OffloadedSequence) -> dict[str, int]:
        """Ends the sequence's load, commits what has arrived; tokens that came from each tier."""
        under_way = sequence.load
        assert under_way is not None
        sequence.load = sequence.search = None
        under_way.load.cancel()  # U1
        arrived, by_tier = under_way.found, Counter[str]()
        for name, tier in zip(under_way.chain, under_way.load.tiers, strict=False):
            stop = min(name.end, under_way.num_tokens)
            by_tier[tier] += stop - arrived
            arrived = stop
        if under_way.state is not None and not self._take_state(under_way, under_way.state, arrived):
            arrived = under_way.found
            by_tier.clear()
        if arrived > under_way.found:
            self._cache.commit(sequence.cache_sequence, arrived)
            self.loaded_tokens.update(by_tier)
        sequence.num_computed = arrived
        return dict(by_tier)

    def _take_state(self, under_way: TierLoad, state: Load, arrived: int) -> bool:
        """Whether the state is there and all that it stands behind; its slots have it then."""
        state.cancel()
        if self._states is None or arrived < under_way.num_tokens or not state.payloads:
            return False
        for slot in under_way.slots:
            self._states.slots.write(slot, state.payloads[0])
        return True
