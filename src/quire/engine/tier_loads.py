"""Prefixes on their way up from the tiers: how much of a waiting sample is there, and its loading.

A sample that begins to wait is looked up in the stack's threads. What is found beyond what memory holds is loaded where
that is expected to take less time than computing it: its sequence is opened, the units are reserved, and the stack's
threads write each segment into them. When the load has ended, by whatever way, what has arrived is committed as if it
had been computed; the rest is computed.

The names of a chain: whole segments of `segment_tokens`, then single blocks behind the last whole one that is there.

Invariants
    U1  only the units of the loading sequence are written, only beyond what it found in memory, and never after
        `finish` has returned.
    U2  tokens are committed only up to the first segment that did not arrive.

Cost: a chain's hashes (about 1 us for each block) when a sample begins to wait; a load costs the engine's thread one
reservation and one commit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.engine.preemption import UnitBytes
from quire.engine.request import Sample
from quire.engine.speeds import Speeds
from quire.tiers.keys import root_key
from quire.tiers.names import SegmentName, segment_names
from quire.tiers.stack import TierStack
from quire.tiers.transfer import Load

__all__ = ["Search", "TierLoad", "TierLoads"]


@dataclass(eq=False)
class Search:
    """How far a sample's tokens are in the tiers; `done` once that is known."""

    tokens: np.ndarray
    extra_keys: tuple[tuple[int, bytes], ...]
    root: bytes
    chain: list[SegmentName] = field(default_factory=list)
    where: list[str] = field(default_factory=list)  # the tier of each
    done: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that could be loaded: the last one known is always computed."""
        return min(self.chain[-1].end, len(self.tokens) - 1) if self.chain else 0


@dataclass(eq=False)
class TierLoad:
    """A load under way into the units of an open sequence. found: tokens that were in memory when it began."""

    load: Load
    chain: list[SegmentName]
    found: int
    num_tokens: int

    @property
    def done(self) -> bool:
        return self.load.done.is_set()


class TierLoads:
    """Looks samples up and loads them. fingerprint: of the model, see `quire.tiers.keys.root_key`."""

    def __init__(
        self,
        cache: Any,
        storage: UnitBytes,
        stack: TierStack,
        fingerprint: bytes,
        segment_tokens: int,
        speeds: Speeds,
    ) -> None:
        self._cache = cache
        self._storage = storage
        self._stack = stack
        self._fingerprint = fingerprint
        self._segment_tokens = segment_tokens
        self._block_size: int = cache.block_size
        self._speeds = speeds
        self.changed = threading.Event()
        """Set when a search or a load has ended."""
        self.loaded_tokens: Counter[str] = Counter()  # since the start, by tier

    def search(self, sample: Sample) -> None:
        """Begins to look the sample up; `sample.search` says how far it has come."""
        request = sample.request
        sample.search = self.look_up(sample.token_ids(), request.namespace, request.extra_keys)

    def look_up(self, tokens: np.ndarray, namespace: bytes, extra_keys: Mapping[int, bytes] | None) -> Search:
        """Begins to look tokens up; what is returned says how far that has come."""
        search = Search(
            tokens, tuple(sorted((extra_keys or {}).items())), root_key(self._fingerprint, namespace)
        )
        whole = len(tokens) // self._segment_tokens * self._segment_tokens
        names = segment_names(search.root, tokens[:whole], self._segment_tokens, extra_keys=search.extra_keys)
        self._ask(search, names, is_tail=False)
        return search

    def _ask(self, search: Search, names: list[SegmentName], *, is_tail: bool) -> None:
        if not names:
            self._asked(search, names, (), is_tail)
            return
        self._stack.lookup(
            [name.key for name in names],
            on_done=lambda lookup: self._asked(search, names, lookup.where, is_tail),
        )

    def _asked(
        self, search: Search, names: list[SegmentName], where: tuple[str, ...] | list[str], is_tail: bool
    ) -> None:
        """Some thread's: notes the answer, and goes on with the single blocks behind the last whole segment."""
        search.chain += names[: len(where)]
        search.where += where
        if not is_tail and self._segment_tokens > self._block_size:
            start = search.chain[-1].end if search.chain else 0
            stop = (
                min(start + self._segment_tokens, len(search.tokens)) // self._block_size * self._block_size
            )
            behind = search.chain[-1].key if search.chain else None
            tail = segment_names(
                search.root,
                search.tokens[start:stop],
                self._block_size,
                start=start,
                parent=behind,
                extra_keys=search.extra_keys,
            )
            self._ask(search, tail, is_tail=True)
            return
        search.done = True
        self.changed.set()

    def num_worth_loading(self, sample: Sample, found: int) -> int:
        """Tokens that the sample, of which memory has `found`, had better have after loading; `found` if none."""
        search = sample.search
        if search is None or not search.done or search.num_tokens <= found:
            return found
        num_bytes: Counter[str] = Counter()
        per_token = self._cache.spec.bytes_per_token
        for name, tier in zip(search.chain, search.where, strict=True):
            if name.end > found:
                num_bytes[tier] += per_token * len(name.tokens)
        load_s = sum(self._stack.estimate_seconds(count, tier) for tier, count in num_bytes.items())
        return search.num_tokens if load_s <= self._speeds.compute_s(search.num_tokens - found) else found

    def begin(self, sample: Sample, sequence: Any, plan: Any, num_tokens: int) -> None:
        """Starts to load up to `num_tokens` into the sequence, for which the plan has reserved them."""
        found = sequence.num_computed_tokens
        self._storage.settle(plan)
        search = sample.search
        assert search is not None
        chain = [name for name in search.chain if name.end > found]
        tables = np.stack([sequence.block_table(group) for group in range(self._cache.num_groups)])
        size = self._block_size

        def write(index: int, payload: np.ndarray) -> None:
            name = chain[index]
            units = tables[:, name.start // size : name.end // size]
            count = min(name.end, num_tokens) - name.start
            self._storage.write_units(units, payload, count, first=max(0, found - name.start))

        load = self._stack.load(chain, into=write, on_done=lambda _: self.changed.set())
        sample.load = TierLoad(load, chain, found, num_tokens)

    def finish(self, sample: Sample) -> dict[str, int]:
        """Ends the sample's load, commits what has arrived; tokens that came from each tier."""
        under_way = sample.load
        assert under_way is not None
        sample.load = sample.search = None
        under_way.load.cancel()  # U1
        arrived, by_tier = under_way.found, Counter[str]()
        for name, tier in zip(under_way.chain, under_way.load.tiers, strict=False):
            stop = min(name.end, under_way.num_tokens)
            by_tier[tier] += stop - arrived
            arrived = stop
        if arrived > under_way.found:
            self._cache.commit(sample.sequence, arrived)
            self.loaded_tokens.update(by_tier)
        sample.num_computed = arrived
        return dict(by_tier)
