"""Whatever changes a disk tier's folder: storing in batches, making room, removing, shrinking. One thread at a time.

It raises what its calls raise (OSError, sqlite3.Error): `disk.DiskTier` makes one clear line of them. The invariants K1
to K5 that the comments name stand there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.tiers.disk_index import DiskIndex, SlabRange
from quire.tiers.disk_schema import PAGE_SIZE
from quire.tiers.slabs import PAGE, Slabs, pages_of
from quire.tiers.tier import Reason, SegmentInfo, TierError

__all__ = ["LOG_SHARE", "MIN_CAP", "DiskWriter", "StoreCall"]

MIN_CAP = 16 << 20
# Of the cap, for SQLite's log and its shared memory.
LOG_SHARE = 4 << 20
_SLAB = 64 << 20
_MAX_REMOVED = 256  # in one transaction, which keeps the log short
_TRIES = 8

_log = logging.getLogger("quire")


@dataclass(eq=False)
class StoreCall:
    """A value to be kept, and what became of it: kept or not, or an error."""

    key: bytes
    parts: Sequence[memoryview]
    num_bytes: int
    info: SegmentInfo
    kept: bool = False
    error: TierError | None = None


class _LostSlabError(Exception):
    """The file of a slab is gone: somebody removed it."""


class DiskWriter:
    """set_aside_bytes: of a damaged index that was kept, which count against the cap. beside_bytes, which do too: see
    `count_beside`.

    spare_bytes: what the file system could give away and still have left what it is to have; negative: too little.
    """

    def __init__(
        self,
        folder: Path,
        index: DiskIndex,
        slabs: Slabs,
        set_aside_bytes: int,
        spare_bytes: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._index = index
        self._slabs = slabs
        self._set_aside_bytes = set_aside_bytes
        self.beside_bytes = 0
        self._spare_bytes = spare_bytes
        self.num_stored = self.num_evicted = 0
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None
        self._set_cap(index.max_bytes())

    def recover(self) -> None:
        """After opening: removes what no row names (a writer was killed) and what exceeds the cap. O(slabs)."""
        with self._index.transaction(durable=False):
            slabs = self._index.extents.slabs()
            strays = self._slabs.remove_all_but(slabs)
            for slab, num_bytes in slabs.items():
                if self._slabs.size(slab) > num_bytes:  # killed while it shrank
                    self._slabs.truncate(slab, num_bytes)
            too_much = self._total() > self._cap
        if strays:
            _log.warning("%s: removed %d slab files that no index names", self._folder, strays)
        if too_much:
            self.shrink(self._cap)
        self._leave_spare()

    def count_beside(self, num_bytes: int) -> None:
        """Files of others in the folder take so many bytes of the cap from now on; removes what has to go for it."""
        self.beside_bytes = num_bytes
        if self._total() > self._cap:
            self.shrink(self._cap)

    # Storing

    def fits_at_all(self, num_bytes: int) -> bool:
        return pages_of(num_bytes) <= self._max_slab

    def store(self, calls: list[StoreCall], uses: dict[bytes, float], now: float) -> None:
        """Keeps these values, durably on return, or as many as find room. uses: see `touch`."""
        rest = calls
        self._leave_spare()
        self._keep_log_short()
        for _ in range(_TRIES):
            try:
                rest = self._write(rest, uses, now)
            except _LostSlabError as lost:
                self.drop_slab(lost.args[0])
                continue
            while rest and not self._make_room(rest[0]):
                rest = rest[1:]
            if not rest:
                return
        raise TierError(
            f"expected room after {_TRIES} evictions, got none: others took it - in {self._folder}"
        )

    def _write(self, calls: list[StoreCall], uses: dict[bytes, float], now: float) -> list[StoreCall]:
        """One transaction for those that find room; the others."""
        placed: dict[bytes, tuple[StoreCall, int, int]] = {}
        without_room: list[StoreCall] = []
        made: list[int] = []
        with self._index.transaction():
            try:
                self._set_cap(self._index.max_bytes())
                self._slabs.keep_only(self._index.extents.slabs())
                self._touch(uses)
                for call in calls:
                    if call.key in placed:
                        continue
                    if self._index.place_of(call.key) is not None:
                        self._index.touch(call.key, now, call.info.cache_priority)
                    # Once one has found none the later ones wait too: the room made next is the first one's.
                    elif not without_room and (place := self._place(call, made)) is not None:
                        placed[call.key] = (call, *place)
                        self._write_value(place, call.parts)
                    else:
                        without_room.append(call)
                for slab in {slab for _, slab, _ in placed.values()}:
                    self._slabs.sync(slab)  # K1
                for call, slab, offset in placed.values():
                    self._index.insert(call.key, call.info, slab, offset, call.num_bytes, now)
            except BaseException:
                for slab in made:  # now: once the transaction is undone another process may use its number
                    self._slabs.remove(slab)
                raise
        for call in calls:
            call.kept = call not in without_room
        self.num_stored += len(placed)
        return without_room

    def _keep_log_short(self) -> None:
        """Before a store, so that one which fails here has kept nothing."""
        if self._index.log_bytes() > LOG_SHARE // 4:
            self._index.checkpoint()
            if self._index.log_bytes() > LOG_SHARE // 2:  # K4
                raise TierError(
                    f"expected to empty the index's log in {self._folder}, got a process that reads it all the time"
                )

    def _write_value(self, place: tuple[int, int], parts: Sequence[memoryview]) -> None:
        try:
            self._slabs.write(*place, parts)
        except FileNotFoundError:
            raise _LostSlabError(place[0]) from None

    def _place(self, call: StoreCall, made: list[int]) -> tuple[int, int] | None:
        """Free pages, in a new slab if there may be one; None: something has to go first. made: gets the new slab."""
        if not self._index_has_room(call.info):
            return None
        length = pages_of(call.num_bytes)
        place = self._index.extents.take(length)
        if place is not None:
            return place
        most = min(self._cap - self._total() - self._cap // 64, self._spare_bytes())
        num_bytes = min(self._max_slab, int(most // PAGE) * PAGE)
        if num_bytes < length:
            return None
        slab = self._index.next_number()  # L1
        try:
            self._slabs.create(slab, num_bytes)
        except OSError:
            if not self._index.extents.slabs():
                raise
            return None  # the disk is fuller than the cap says: the slabs there are have to do
        made.append(slab)
        self._index.extents.add_slab(slab, num_bytes)
        return self._index.extents.take(length)

    def _make_room(self, call: StoreCall) -> bool:
        """Evicts until this value finds pages, and a few after it; False: all that is left has to stay."""
        length = pages_of(call.num_bytes)
        found = False
        victim: bytes | None = b""
        while victim is not None:
            removed: list[bytes] = []
            with self._index.transaction():  # durable: K2
                while len(removed) < _MAX_REMOVED:
                    found = self._index.extents.fits(length) and self._index_has_room(call.info)
                    free = self._index.extents.total_bytes() - self._index.extents.used()[1]
                    victim = (
                        None
                        if found and free >= self._spare(length)
                        else self._index.victim(call.info.cache_priority)
                    )
                    if victim is None:
                        break
                    self._remove(victim)
                    removed.append(victim)
            self._count_evicted(removed)
        return found

    def _count_evicted(self, keys: list[bytes]) -> None:
        """Of a transaction that has been committed."""
        self.num_evicted += len(keys)
        if keys:
            self.on_removed(keys, "evicted")

    def _spare(self, length: int) -> int:
        """Free bytes to leave behind when something is evicted: one sync then serves several stores."""
        return max(length, min(4 * length, self._cap // 64), self._cap // 256)

    # Removing

    def remove(self, key: bytes, only: SlabRange | None = None) -> bool:
        """Whether it was there. only: not if it lies elsewhere meanwhile."""
        with self._index.transaction():
            if only is not None and self._index.place_of(key) != only:
                return False
            return self._remove(key)

    def drop_slab(self, slab: int) -> int:
        """Forgets a slab whose file is gone, and its values; how many."""
        with self._index.transaction():
            keys = [key for key, _ in self._index.behind(slab, 0)]
            for key in keys:
                self._remove(key)
            self._index.extents.cut_slab(slab, 0)
        self._slabs.forget([slab])
        self.on_removed(keys, "damaged")
        _log.warning("%s: a slab file is gone; its %d values are removed", self._folder, len(keys))
        return len(keys)

    def _remove(self, key: bytes) -> bool:
        place = self._index.remove(key)
        if place is not None:
            self._index.extents.give(place.slab, place.offset, pages_of(place.num_bytes))
        return place is not None

    # Uses

    def touch(self, uses: dict[bytes, float]) -> None:
        """These keys were used then (seconds). Not durable; sqlite3.Error at once where another process writes."""
        with self._index.transaction(durable=False, wait=False):
            self._touch(uses)

    def _touch(self, uses: dict[bytes, float]) -> None:
        for key, used_at in uses.items():
            self._index.touch(key, used_at)

    # Shrinking

    def shrink(self, to_bytes: int) -> int:
        """Removes what goes first until all takes at most `to_bytes`, and gives the rest back; how many values went.

        The slabs' space is cut at its end: values behind the cut move into free pages before it.
        """
        removed = 0
        done = False
        while not done:
            with self._index.transaction():
                for _ in range(_MAX_REMOVED):
                    victim = self._index.victim(2)
                    done = self._index.extents.used()[1] <= self._slab_share(to_bytes) or victim is None
                    if done:
                        break
                    assert victim is not None
                    self._remove(victim)
                    removed += 1
        share = self._slab_share(to_bytes)
        cuts = []
        for slab, num_bytes in self._index.extents.slabs().items():
            kept = min(num_bytes, max(0, share) // PAGE * PAGE)
            share -= kept
            if kept < num_bytes:
                cuts.append((slab, kept))
        for slab, kept in reversed(cuts):
            removed += self._cut(slab, kept, cuts[0])
        self._index.vacuum()
        self.num_evicted += removed
        return removed

    def _cut(self, slab: int, kept: int, boundary: tuple[int, int]) -> int:
        """The slab ends at `kept`; what lies behind moves before `boundary`, for which others may go: how many."""
        removed = 0
        while (length := self._move_out(slab, kept, boundary)) is not None:
            with self._index.transaction():  # durable: K2
                while not self._index.extents.fits(length, before=boundary):
                    victim = self._index.victim(2)
                    if victim is None:
                        break
                    self._remove(victim)
                    removed += 1
        if kept:
            with suppress(FileNotFoundError):
                self._slabs.truncate(slab, kept)
        else:
            self._slabs.remove(slab)
        return removed

    def _read(self, place: SlabRange) -> memoryview | None:
        with suppress(FileNotFoundError):
            return self._slabs.read(place.slab, place.offset, place.num_bytes)
        return None

    def _move_out(self, slab: int, kept: int, boundary: tuple[int, int]) -> int | None:
        """Moves values from behind `kept` until the slab can end there; the length of one that found no place."""
        with self._index.transaction():
            written = set[int]()
            without_place: int | None = None
            for key, place in self._index.behind(slab, kept):
                length = pages_of(place.num_bytes)
                to = self._index.extents.take(length, before=boundary)
                if to is None:
                    without_place = length
                    break
                value = self._read(place)
                if value is None:
                    self._index.extents.give(*to, length)
                    self._remove(key)
                    continue
                self._slabs.write(*to, [value])
                written.add(to[0])
                self._index.move(place, *to)
                self._index.extents.give(slab, place.offset, length)
            for other in written:
                self._slabs.sync(other)  # K1
            if without_place is None:
                self._index.extents.cut_slab(slab, kept)
            return without_place

    def _leave_spare(self) -> None:
        """K6: where others have filled the file system, some of what is here goes, and a little more."""
        lack = -self._spare_bytes()
        if lack > 0 and self._index.extents.slabs():
            self.shrink(max(0, self._total() - int(lack) - self._cap // 64))

    def _slab_share(self, of_bytes: int) -> int:
        """What the index leaves of so many bytes for the slabs."""
        pages, unused = self._index.page_counts()
        return of_bytes - LOG_SHARE - self._set_aside_bytes - (pages - unused) * PAGE_SIZE

    # The cap (K4)

    def _set_cap(self, cap: int) -> None:
        self._cap = cap
        # Some hundred slabs at most, so that what is O(slabs) stays small whatever the cap.
        self._max_slab = min(max(_SLAB, cap // 256), (cap - LOG_SHARE) // 4) // PAGE * PAGE

    def _index_has_room(self, info: SegmentInfo) -> bool:
        """Whether a row more can never bring the folder above the cap."""
        pages, unused = self._index.page_counts()
        wanted = 16 + len(info.tokens) // (PAGE_SIZE // 2)
        most = self._cap - LOG_SHARE - self._set_aside_bytes - self._index.extents.total_bytes()
        return (pages + wanted - unused) * PAGE_SIZE <= most

    def _total(self) -> int:
        """Bytes that count against the cap."""
        index = self._index.page_counts()[0] * PAGE_SIZE
        kept = self._set_aside_bytes + self.beside_bytes
        return self._index.extents.total_bytes() + index + LOG_SHARE + kept
