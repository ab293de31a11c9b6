"""`TierEvents`: KV events of the tiers: blocks stored in a tier and lost by it, in the form of the pool's events.

Tiers report segments, by key, from their own threads (`tiers.tier_changes`); the engine's thread reads the reports and
derives the blocks. A block's hash is chained from the start of its sequence, which a segment does not contain:
`TierStores` and `TierLoads` report it (`on_segment`) before a segment is stored or loaded, and it follows for a segment
that continues a known one. A segment is followed from then on; other segments have no events (`num_untold`).

A block is reported as stored when a tier has acknowledged it (a disk: when it is durable), and as removed when the tier
evicts it, finds it damaged, does not find it, or is cleared. A Redis server, and a folder that another process uses,
report no removals: these are noticed at a lookup, at the latest at a failed load. A block that a load finds and that
was not reported before is reported then.

Invariants
    E1  per medium, stored and removed alternate for each block, beginning with stored: a block in several segments of a
        tier (its own, and a longer one) is removed with the last of them. These events are the tier's content;
        subscribers get those whose parent was reported in some medium (`observe.known_parents`, which alternates too).
    E2  at most `max_segments` segments are followed. The segment unseen for longest is dropped: its blocks are reported
        as removed ("forgotten"), and as stored again when a load finds them.

A tier may have a block without those before it: memory gives up the end of a prefix first. Subscribers get no event of
a block whose parent is in no medium.

Cost: without subscribers none. With: a hash for each block that a tier stores, some 100 bytes and the token ids for
each segment; reading the index of host and disk when the first subscriber comes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.block_hash import block_number, chained_hashes, namespace_digest, root_hash, root_key
from quire.observe.kv_events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.tiers.segment_key import SegmentKey
from quire.tiers.tier import SegmentInfo

if TYPE_CHECKING:
    from quire.offload.store import TierStores
    from quire.offload.tier_load import TierLoads
    from quire.tiers.stack import TierStack

__all__ = ["TierEvents"]

_MAX_SEGMENTS = 65536


class _FollowedSegment:
    """before: hash of the block that it continues. tiers: by tier, (whether it has the segment, number of the change).

    A report of a missing segment may come late, when it has been stored again: a stored segment counts from the number
    of its change, a lost one from the mark of its report.
    """

    __slots__ = ("before", "extra_keys", "hashes", "key", "namespace", "tiers")

    def __init__(self, key: SegmentKey, namespace: bytes, before: bytes, block_size: int) -> None:
        self.key = key
        self.namespace = namespace
        self.before = before
        extra_keys = {at - key.start: extra for at, extra in key.extra_keys}
        self.hashes = chained_hashes(before, key.tokens, extra_keys, block_size)
        self.extra_keys = [
            tuple(
                (at - first, extra)
                for at, extra in sorted(extra_keys.items())
                if first <= at < first + block_size
            )
            for first in range(0, len(key.tokens), block_size)
        ]
        self.tiers: dict[str, tuple[bool, int]] = {}


class TierEvents:
    """See the module's text. For one thread. fingerprint, block_size: of `TierStores`, and of its cache."""

    def __init__(
        self,
        stack: TierStack,
        stores: TierStores,
        loads: TierLoads,
        fingerprint: bytes,
        block_size: int,
        *,
        max_segments: int = _MAX_SEGMENTS,
    ) -> None:
        self._stack = stack
        self._stores = stores
        self._loads = loads
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._max_segments = max_segments
        self.namespaces: Callable[[], Iterable[bytes]] = tuple
        """Namespaces that tiers may have content of from before, in addition to the empty one."""
        self.num_untold = 0
        """Segments found in tiers whose preceding blocks were unknown."""
        self._segments: OrderedDict[bytes, _FollowedSegment] = (
            OrderedDict()
        )  # by hash, in order of last sight
        self._roots: dict[bytes, bytes] = {}  # namespaces
        self._holders: dict[str, Counter[int]] = {}  # by tier: how many of its segments have the block
        self._events: list[KVEvent] = []

    # -- for `KVEventSubscribers` -----------------------------------------------------------------------

    def start(self) -> None:
        """Starts recording, and reads the tiers' present content (see `snapshot`)."""
        self._stack.changes.record(True)
        self._stores.on_segment = self._loads.on_segment = self.follow_segment
        self._read_contents()
        self._events.clear()

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Follows segments of another model from now on, and reports those of the old one as forgotten."""
        self._fingerprint = fingerprint
        if self._stores.on_segment is None:  # not started
            return
        for segment in list(self._segments.values()):
            for tier, (is_there, _) in segment.tiers.items():
                if is_there:
                    self._remove(tier, segment, "forgotten")
        self._segments.clear()
        self._holders.clear()
        self._read_contents()

    def _read_contents(self) -> None:
        """Reads the present content of the tiers."""
        changes = self._stack.changes
        known = {b"", *self.namespaces(), *self._stores.namespaces()}
        self._roots = {root_key(self._fingerprint, namespace): namespace for namespace in known}
        ends = self._stores.segment_ends()
        for tier in self._stack.tier_names:
            seen = changes.mark()
            for key, info in sorted(self._stack.contents(tier, list(self._roots)), key=_start):
                self._add_holder(tier, _segment_key(key, info), seen, seen, ends)

    def stop(self) -> None:
        """Stops recording."""
        self._stack.changes.record(False)
        self._stores.on_segment = self._loads.on_segment = None
        self._segments.clear()
        self._holders.clear()
        self._events.clear()

    def pop_events(self) -> list[KVEvent]:
        """The events of the tiers since the last call, in order."""
        for change in self._stack.changes.pop_all():
            if change.stored is not None:
                self._add_holder(change.tier, change.stored, change.seen, change.number)
                continue
            assert change.reason is not None
            for key in change.lost:
                self._remove_holder(change.tier, key, change.reason, change.seen)
            if change.reason == "cleared":
                self._events.append(AllBlocksCleared(_medium(change.tier)))
        taken, self._events = self._events, []
        return taken

    def snapshot(self) -> list[KVEvent]:
        """Stored events of the content up to the last `pop_events`; a parent before its children."""
        events: list[KVEvent] = []
        known: dict[str, set[int]] = {tier: set() for tier in self._stack.tier_names}
        for segment in sorted(self._segments.values(), key=lambda segment: segment.key.start):
            for tier, (is_there, _) in segment.tiers.items():
                if is_there:
                    is_new = [block_number(block) not in known[tier] for block in segment.hashes]
                    events += self._stored(tier, segment, is_new)
                    known[tier].update(map(block_number, segment.hashes))
        return events

    # -- segments followed -----------------------------------------------------------------------------

    def follow_segment(self, key: SegmentKey, namespace: bytes, before: bytes) -> None:
        """Follows a segment from now on. before: the mirror's hash of the block it continues, or `root_hash`."""
        if key.hash in self._segments:
            self._segments.move_to_end(key.hash)
        elif self._is_aligned(key):
            self._follow(key, namespace, before)

    def _is_aligned(self, key: SegmentKey) -> bool:
        """False for a segment of an engine with another block size."""
        return key.start % self._block_size == 0 and len(key.tokens) % self._block_size == 0

    def _follow(self, key: SegmentKey, namespace: bytes, before: bytes) -> _FollowedSegment:
        segment = _FollowedSegment(key, namespace, before, self._block_size)
        self._segments[key.hash] = segment
        if len(self._segments) > self._max_segments:  # E2
            _, oldest = self._segments.popitem(last=False)
            for tier, (is_there, _) in oldest.tiers.items():
                if is_there:
                    self._remove(tier, oldest, "forgotten")
        return segment

    def _find(self, key: SegmentKey, ends: dict[bytes, tuple[bytes, bytes]]) -> _FollowedSegment | None:
        """The followed segment of a key; or follows it now, if possible. ends: `TierStores.segment_ends`."""
        segment = self._segments.get(key.hash)
        if segment is not None:
            self._segments.move_to_end(key.hash)
            return segment
        if not self._is_aligned(key):
            return None
        if key.start == 0:
            namespace = self._roots.get(key.root, self._stores.namespace_of(key.root))
            return None if namespace is None else self._follow(key, namespace, root_hash(namespace))
        parent = self._segments.get(key.parent)
        if parent is not None:
            return self._follow(key, parent.namespace, parent.hashes[-1])
        return self._follow(key, *ends[key.parent]) if key.parent in ends else None

    # -- the tiers' content ----------------------------------------------------------------------------

    def _add_holder(
        self,
        tier: str,
        key: SegmentKey,
        seen: int,
        number: int,
        ends: dict[bytes, tuple[bytes, bytes]] | None = None,
    ) -> None:
        segment = self._find(key, ends or {})
        if segment is None:
            self.num_untold += 1
            return
        is_there, number_then = segment.tiers.get(tier, (False, 0))
        if number_then > seen and not is_there:
            return
        segment.tiers[tier] = (True, max(number_then, number))
        if is_there:
            return
        holders = self._holders.setdefault(tier, Counter())
        numbers = list(map(block_number, segment.hashes))
        is_new = [number not in holders for number in numbers]  # E1
        holders.update(numbers)
        self._events += self._stored(tier, segment, is_new)

    def _remove_holder(self, tier: str, key: bytes, reason: str, seen: int) -> None:
        segment = self._segments.get(key)
        if segment is None:
            return
        is_there, number_then = segment.tiers.get(tier, (False, 0))
        if number_then > seen:
            return
        segment.tiers[tier] = (False, seen)
        if is_there:
            self._remove(tier, segment, reason)

    def _remove(self, tier: str, segment: _FollowedSegment, reason: str) -> None:
        holders = self._holders[tier]
        removed: list[int] = []
        for number in map(block_number, segment.hashes):
            holders[number] -= 1
            if not holders[number]:  # E1
                del holders[number]
                removed.append(number)
        if removed:
            digest = namespace_digest(segment.namespace)
            self._events.append(BlockRemoved(tuple(removed), digest, reason, _medium(tier)))

    def _stored(self, tier: str, segment: _FollowedSegment, is_new: Sequence[bool]) -> list[KVEvent]:
        """Events of the new blocks of a segment, consecutive blocks in one event."""
        events: list[KVEvent] = []
        size, key = self._block_size, segment.key
        start = 0
        while start < len(is_new):
            if not is_new[start]:
                start += 1
                continue
            stop = start
            while stop < len(is_new) and is_new[stop]:
                stop += 1
            parent = segment.hashes[start - 1] if start else segment.before
            events.append(
                BlockStored(
                    block_hashes=tuple(map(block_number, segment.hashes[start:stop])),
                    parent_block_hash=None if key.start + start == 0 else block_number(parent),
                    token_ids=tuple(key.tokens[start * size : stop * size].tolist()),
                    block_size=size,
                    namespace_digest=namespace_digest(segment.namespace),
                    extra_keys=tuple(segment.extra_keys[start:stop]),
                    medium=_medium(tier),
                )
            )
            start = stop
        return events


def _start(value: tuple[bytes, SegmentInfo]) -> int:
    return value[1].start


def _segment_key(key: bytes, info: SegmentInfo) -> SegmentKey:
    tokens = np.frombuffer(info.tokens, "<i4")
    return SegmentKey(key, info.root, info.parent, info.start, tokens, info.extra_keys)


def _medium(tier: str) -> str:
    return MEDIA.get(tier, tier.upper())
