"""What tiers have, as KV events: blocks stored in a tier and given up by it, in the form the pool's blocks are told in.

Tiers tell of segments, by key, from their own threads (`tiers.notices`); the engine's thread takes that and names the
blocks. A block's name is chained from the start of its sequence, which a segment alone does not know: `TierStores` and
`TierLoads` say it (`on_name`) of each segment before it goes down or comes up, and what continues a segment that is
known is known as well. So a segment is followed from then on; of the rest nothing is told (`num_untold`).

A block is told as stored when a tier has acknowledged it - a disk: when it is durable -, and as removed when the tier
evicts it, finds it damaged, does not find it, or gives up all it had. Of a Redis server, and of a folder that another
process uses, what is gone is noticed when somebody asks for it, at the latest when it cannot be loaded; what a load
finds that was not told before is told then.

Invariants
    E1  per medium, stored and removed take turns for each block, beginning with stored: a block that several segments
        of a tier hold (its own, and the one of several blocks that it grew into) is removed with the last of them.
        What is said here is what the tier has; subscribers are told of it while its parent is told in some medium
        (`observe.known_parents`, which keeps the turns).
    E2  at most `max_segments` segments are followed. The one longest not seen falls out; what tiers have of it is told
        as removed ("forgotten"), and as stored again when a load finds it.

In a tier a block may be there without those before it: memory gives up the end of a prefix first. Subscribers are not
told of one whose parent is nowhere.

Cost: off, while nobody listens: nothing. On: a hash for each block that a tier stores, and some 100 bytes and the
token ids for each of its segments; reading the index of host and disk when the first subscriber comes.
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


class _Segment:
    """before: the hash of the block that it continues. at: by tier, whether it has it, and as of which notice.

    Who has found something missing may say so late, when it has long been stored again: what is held is so as of the
    notice itself, what is gone as of what was seen.
    """

    __slots__ = ("at", "before", "hashes", "keys", "name", "namespace")

    def __init__(self, name: SegmentKey, namespace: bytes, before: bytes, block_size: int) -> None:
        self.name = name
        self.namespace = namespace
        self.before = before
        keys = {at - name.start: key for at, key in name.extra_keys}
        self.hashes = chained_hashes(before, name.tokens, keys, block_size)
        self.keys = [
            tuple((at - first, key) for at, key in sorted(keys.items()) if first <= at < first + block_size)
            for first in range(0, len(name.tokens), block_size)
        ]
        self.at: dict[str, tuple[bool, int]] = {}


class TierEvents:
    """See the module's text. Of one thread. fingerprint, block_size: of `TierStores`, and of its cache."""

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
        """Those that tiers may have something of from before, beside the one without a name."""
        self.num_untold = 0
        """Segments that tiers were found to have while nothing was known of what they continue."""
        self._segments: OrderedDict[bytes, _Segment] = OrderedDict()  # by key, the one seen last at the end
        self._roots: dict[bytes, bytes] = {}  # namespaces
        self._holders: dict[str, Counter[int]] = {}  # by tier: how many of its segments have the block
        self._events: list[KVEvent] = []

    # -- what subscribers use --------------------------------------------------------------------------

    def start(self) -> None:
        """Listens from now on, and reads what the tiers have already (`snapshot` tells it)."""
        self._stack.notices.listen(True)
        self._stores.on_name = self._loads.on_name = self.note
        self._read()
        self._events.clear()

    def renew(self, fingerprint: bytes) -> None:
        """Follow what the tiers have of another model from now on, and no more what they have of the one before."""
        self._fingerprint = fingerprint
        if self._stores.on_name is None:  # nobody listens
            return
        for segment in list(self._segments.values()):
            for tier, (is_there, _) in segment.at.items():
                if is_there:
                    self._remove(tier, segment, "forgotten")
        self._segments.clear()
        self._holders.clear()
        self._read()

    def _read(self) -> None:
        """What the tiers have already."""
        notices = self._stack.notices
        known = {b"", *self.namespaces(), *self._stores.namespaces()}
        self._roots = {root_key(self._fingerprint, namespace): namespace for namespace in known}
        ends = self._stores.ends()
        for tier in self._stack.tier_names:
            seen = notices.mark()
            for key, info in sorted(self._stack.contents(tier, list(self._roots)), key=_start):
                self._held(tier, _name(key, info), seen, seen, ends)

    def stop(self) -> None:
        """Nobody listens any more."""
        self._stack.notices.listen(False)
        self._stores.on_name = self._loads.on_name = None
        self._segments.clear()
        self._holders.clear()
        self._events.clear()

    def take(self) -> list[KVEvent]:
        """What has happened in the tiers since the last call, in order."""
        for notice in self._stack.notices.take():
            if notice.name is not None:
                self._held(notice.tier, notice.name, notice.seen, notice.number)
                continue
            assert notice.reason is not None
            for key in notice.keys:
                self._gone(notice.tier, key, notice.reason, notice.seen)
            if notice.reason == "cleared":
                self._events.append(AllBlocksCleared(_medium(notice.tier)))
        taken, self._events = self._events, []
        return taken

    def snapshot(self) -> list[KVEvent]:
        """What tiers have, as far as it was taken; a parent before its children."""
        events: list[KVEvent] = []
        told: dict[str, set[int]] = {tier: set() for tier in self._stack.tier_names}
        for segment in sorted(self._segments.values(), key=lambda one: one.name.start):
            for tier, (is_there, _) in segment.at.items():
                if is_there:
                    is_new = [block_number(one) not in told[tier] for one in segment.hashes]
                    events += self._stored(tier, segment, is_new)
                    told[tier].update(map(block_number, segment.hashes))
        return events

    # -- what is known of segments ---------------------------------------------------------------------

    def note(self, name: SegmentKey, namespace: bytes, before: bytes) -> None:
        """Follows a segment from now on. before: the mirror's hash of the block it continues (`root_hash`: of none)."""
        if name.key in self._segments:
            self._segments.move_to_end(name.key)
        elif self._is_aligned(name):
            self._follow(name, namespace, before)

    def _is_aligned(self, name: SegmentKey) -> bool:
        """An engine of another block size may have stored it."""
        return name.start % self._block_size == 0 and len(name.tokens) % self._block_size == 0

    def _follow(self, name: SegmentKey, namespace: bytes, before: bytes) -> _Segment:
        segment = _Segment(name, namespace, before, self._block_size)
        self._segments[name.key] = segment
        if len(self._segments) > self._max_segments:  # E2
            _, oldest = self._segments.popitem(last=False)
            for tier, (is_there, _) in oldest.at.items():
                if is_there:
                    self._remove(tier, oldest, "forgotten")
        return segment

    def _find(self, name: SegmentKey, ends: dict[bytes, tuple[bytes, bytes]]) -> _Segment | None:
        """The segment of that name; from what it continues where it was not followed. ends: see `TierStores.ends`."""
        segment = self._segments.get(name.key)
        if segment is not None:
            self._segments.move_to_end(name.key)
            return segment
        if not self._is_aligned(name):
            return None
        if name.start == 0:
            namespace = self._roots.get(name.root, self._stores.namespace_of(name.root))
            return None if namespace is None else self._follow(name, namespace, root_hash(namespace))
        parent = self._segments.get(name.parent)
        if parent is not None:
            return self._follow(name, parent.namespace, parent.hashes[-1])
        return self._follow(name, *ends[name.parent]) if name.parent in ends else None

    # -- what tiers have -------------------------------------------------------------------------------

    def _held(
        self,
        tier: str,
        name: SegmentKey,
        seen: int,
        number: int,
        ends: dict[bytes, tuple[bytes, bytes]] | None = None,
    ) -> None:
        segment = self._find(name, ends or {})
        if segment is None:
            self.num_untold += 1
            return
        is_there, as_of = segment.at.get(tier, (False, 0))
        if as_of > seen and not is_there:
            return
        segment.at[tier] = (True, max(as_of, number))
        if is_there:
            return
        holders = self._holders.setdefault(tier, Counter())
        numbers = list(map(block_number, segment.hashes))
        is_new = [number not in holders for number in numbers]  # E1
        holders.update(numbers)
        self._events += self._stored(tier, segment, is_new)

    def _gone(self, tier: str, key: bytes, reason: str, seen: int) -> None:
        segment = self._segments.get(key)
        if segment is None:
            return
        is_there, as_of = segment.at.get(tier, (False, 0))
        if as_of > seen:
            return
        segment.at[tier] = (False, seen)
        if is_there:
            self._remove(tier, segment, reason)

    def _remove(self, tier: str, segment: _Segment, reason: str) -> None:
        holders = self._holders[tier]
        gone: list[int] = []
        for number in map(block_number, segment.hashes):
            holders[number] -= 1
            if not holders[number]:  # E1
                del holders[number]
                gone.append(number)
        if gone:
            digest = namespace_digest(segment.namespace)
            self._events.append(BlockRemoved(tuple(gone), digest, reason, _medium(tier)))

    def _stored(self, tier: str, segment: _Segment, is_new: Sequence[bool]) -> list[KVEvent]:
        """The blocks of a segment that are new: those one behind the other in one event."""
        events: list[KVEvent] = []
        size, name = self._block_size, segment.name
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
                    parent_block_hash=None if name.start + start == 0 else block_number(parent),
                    token_ids=tuple(name.tokens[start * size : stop * size].tolist()),
                    block_size=size,
                    namespace_digest=namespace_digest(segment.namespace),
                    extra_keys=tuple(segment.keys[start:stop]),
                    medium=_medium(tier),
                )
            )
            start = stop
        return events


def _start(value: tuple[bytes, SegmentInfo]) -> int:
    return value[1].start


def _name(key: bytes, info: SegmentInfo) -> SegmentKey:
    tokens = np.frombuffer(info.tokens, "<i4")
    return SegmentKey(key, info.root, info.parent, info.start, tokens, info.extra_keys)


def _medium(tier: str) -> str:
    return MEDIA.get(tier, tier.upper())
