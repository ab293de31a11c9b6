"""`DiskWriter`: all changes of a disk tier's folder: storing in batches, evicting, removing, shrinking. One thread at
a time.

OSError and sqlite3.Error pass through: `disk.DiskTier` turns them into one clear line. Invariants K1 to K6: see there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.tiers.disk.disk_index import DiskIndex, SlabRange
from quire.tiers.disk.disk_schema import PAGE_SIZE
from quire.tiers.disk.slabs import PAGE, Slabs, pages_of
from quire.tiers.tier import Reason, SegmentInfo, TierError

__all__ = ["LOG_SHARE", "MIN_CAP", "DiskWriter", "StoreCall"]

MIN_CAP = 16 << 20
# The part of the cap for SQLite's log and its shared memory.
LOG_SHARE = 4 << 20
_SLAB = 64 << 20
_MAX_REMOVED = 256  # in one transaction, which keeps the log short
_TRIES = 8

_log = logging.getLogger("quire")


@dataclass(eq=False)
class StoreCall:
    """A value to store, and the result: stored or not, or an error."""

    key: bytes
    parts: Sequence[memoryview]
    num_bytes: int
    info: SegmentInfo
    is_stored: bool = False
    error: TierError | None = None


class _LostSlabError(Exception):
    """The file of a slab is gone: it was removed from outside."""


class DiskWriter:
    """set_aside_bytes: of a damaged index set aside. other_bytes: see `count_other_files`. Both count against the cap.

    spare_bytes: free bytes of the file system beyond those to leave free; negative: too few are free.
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
        self.other_bytes = 0
        self._spare_bytes = spare_bytes
        self.num_stored = self.num_evicted = 0
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None
        self._set_cap(index.max_bytes())

    def recover(self) -> None:
        """After opening: removes slabs without a row (a writer was killed) and values beyond the cap. O(slabs)."""
        with self._index.transaction(durable=False):
            slabs = self._index.extents.slabs()
            strays = self._slabs.remove_others(slabs)
            for slab, num_bytes in slabs.items():
                if self._slabs.size(slab) > num_bytes:  # killed while it shrank
                    self._slabs.truncate(slab, num_bytes)
            too_much = self._total() > self._cap
        if strays:
            _log.warning("%s: removed %d slab files that no index names", self._folder, strays)
        if too_much:
            self.shrink(self._cap)
        self._free_for_others()

    def count_other_files(self, num_bytes: int) -> None:
        """Counts bytes of other files in the folder against the cap; evicts values if needed."""
        self.other_bytes = num_bytes
        if self._total() > self._cap:
            self.shrink(self._cap)

    # Storing

    def can_fit(self, num_bytes: int) -> bool:
        return pages_of(num_bytes) <= self._max_slab

    def store(self, calls: list[StoreCall], uses: dict[bytes, float], now: float) -> None:
        """Stores these values, durable on return, as far as they find room. uses: see `touch`."""
        rest = calls
        self._free_for_others()
        self._checkpoint_long_log()
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
            f"expected room after {_TRIES} evictions, got none: other processes took it - in {self._folder}"
        )

    def _write(self, calls: list[StoreCall], uses: dict[bytes, float], now: float) -> list[StoreCall]:
        """Stores in one transaction the values that find room; returns the other calls."""
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
                    # After the first call without room the later ones wait too: it gets the next room made.
                    elif not without_room and (place := self._allocate(call, made)) is not None:
                        placed[call.key] = (call, *place)
                        self._write_value(place, call.parts)
                    else:
                        without_room.append(call)
                for slab in {slab for _, slab, _ in placed.values()}:
                    self._slabs.sync(slab)  # K1
                for call, slab, offset in placed.values():
                    self._index.insert(call.key, call.info, slab, offset, call.num_bytes, now)
            except BaseException:
                for slab in made:  # before the rollback, after which another process may use its number
                    self._slabs.remove(slab)
                raise
        for call in calls:
            call.is_stored = call not in without_room
        self.num_stored += len(placed)
        return without_room

    def _checkpoint_long_log(self) -> None:
        """Empties a long log before a store, so that a failure here has stored nothing."""
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

    def _allocate(self, call: StoreCall, made: list[int]) -> tuple[int, int] | None:
        """Allocates pages, in a new slab if the cap allows; None: evict first. made: the new slab is appended."""
        if not self._index_has_room(call.info):
            return None
        length = pages_of(call.num_bytes)
        place = self._index.extents.allocate(length)
        if place is not None:
            return place
        max_bytes = min(self._cap - self._total() - self._cap // 64, self._spare_bytes())
        num_bytes = min(self._max_slab, int(max_bytes // PAGE) * PAGE)
        if num_bytes < length:
            return None
        slab = self._index.next_number()  # L1
        try:
            self._slabs.create(slab, num_bytes)
        except OSError:
            if not self._index.extents.slabs():
                raise
            return None  # the disk has less room than the cap: use the existing slabs
        made.append(slab)
        self._index.extents.add_slab(slab, num_bytes)
        return self._index.extents.allocate(length)

    def _make_room(self, call: StoreCall) -> bool:
        """Evicts until this value and a few more find pages; False: no value may be evicted any more."""
        length = pages_of(call.num_bytes)
        found = False
        victim: bytes | None = b""
        while victim is not None:
            removed: list[bytes] = []
            with self._index.transaction():  # durable: K2
                while len(removed) < _MAX_REMOVED:
                    found = self._index.extents.fits(length) and self._index_has_room(call.info)
                    free = self._index.extents.total_bytes() - self._index.extents.usage()[1]
                    victim = (
                        None
                        if found and free >= self._bytes_to_free(length)
                        else self._index.next_victim(call.info.cache_priority)
                    )
                    if victim is None:
                        break
                    self._remove(victim)
                    removed.append(victim)
            self._count_evicted(removed)
        return found

    def _count_evicted(self, keys: list[bytes]) -> None:
        """Counts the evictions of a committed transaction."""
        self.num_evicted += len(keys)
        if keys:
            self.on_removed(keys, "evicted")

    def _bytes_to_free(self, length: int) -> int:
        """Bytes to free by an eviction, for several stores at the cost of one sync."""
        return max(length, min(4 * length, self._cap // 64), self._cap // 256)

    # Removing

    def remove(self, key: bytes, only: SlabRange | None = None) -> bool:
        """Removes a value; True if it was there. only: do nothing if its place is another one."""
        with self._index.transaction():
            if only is not None and self._index.place_of(key) != only:
                return False
            return self._remove(key)

    def drop_slab(self, slab: int) -> int:
        """Removes a slab whose file is gone, and its values; returns their number."""
        with self._index.transaction():
            keys = [key for key, _ in self._index.values_behind(slab, 0)]
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
            self._index.extents.free(place.slab, place.offset, pages_of(place.num_bytes))
        return place is not None

    # Uses

    def touch(self, uses: dict[bytes, float]) -> None:
        """Writes the times of uses (seconds). Not durable; raises at once if another process writes."""
        with self._index.transaction(durable=False, wait=False):
            self._touch(uses)

    def _touch(self, uses: dict[bytes, float]) -> None:
        for key, used_at in uses.items():
            self._index.touch(key, used_at)

    # Shrinking

    def shrink(self, to_bytes: int) -> int:
        """Evicts values until the folder takes at most `to_bytes`, and frees the space; returns the number evicted.

        The slabs are cut at their end: values behind the cut move into free pages before it.
        """
        removed = 0
        done = False
        while not done:
            with self._index.transaction():
                for _ in range(_MAX_REMOVED):
                    victim = self._index.next_victim(2)
                    done = self._index.extents.usage()[1] <= self._slab_share(to_bytes) or victim is None
                    if done:
                        break
                    assert victim is not None
                    self._remove(victim)
                    removed += 1
        share = self._slab_share(to_bytes)
        cuts = []
        for slab, num_bytes in self._index.extents.slabs().items():
            end = min(num_bytes, max(0, share) // PAGE * PAGE)
            share -= end
            if end < num_bytes:
                cuts.append((slab, end))
        for slab, end in reversed(cuts):
            removed += self._cut(slab, end, cuts[0])
        self._index.vacuum()
        self.num_evicted += removed
        return removed

    def _cut(self, slab: int, end: int, boundary: tuple[int, int]) -> int:
        """Cuts a slab at `end`. Values behind it move before `boundary`; returns the number evicted for that."""
        removed = 0
        while (length := self._move_out(slab, end, boundary)) is not None:
            with self._index.transaction():  # durable: K2
                while not self._index.extents.fits(length, before=boundary):
                    victim = self._index.next_victim(2)
                    if victim is None:
                        break
                    self._remove(victim)
                    removed += 1
        if end:
            with suppress(FileNotFoundError):
                self._slabs.truncate(slab, end)
        else:
            self._slabs.remove(slab)
        return removed

    def _read(self, place: SlabRange) -> memoryview | None:
        with suppress(FileNotFoundError):
            return self._slabs.read(place.slab, place.offset, place.num_bytes)
        return None

    def _move_out(self, slab: int, end: int, boundary: tuple[int, int]) -> int | None:
        """Moves values from behind `end`, and cuts the slab there; or the length of a value that found no place."""
        with self._index.transaction():
            written = set[int]()
            without_place: int | None = None
            for key, place in self._index.values_behind(slab, end):
                length = pages_of(place.num_bytes)
                to = self._index.extents.allocate(length, before=boundary)
                if to is None:
                    without_place = length
                    break
                value = self._read(place)
                if value is None:
                    self._index.extents.free(*to, length)
                    self._remove(key)
                    continue
                self._slabs.write(*to, [value])
                written.add(to[0])
                self._index.move(place, *to)
                self._index.extents.free(slab, place.offset, length)
            for other in written:
                self._slabs.sync(other)  # K1
            if without_place is None:
                self._index.extents.cut_slab(slab, end)
            return without_place

    def _free_for_others(self) -> None:
        """K6: if other programs have filled the file system, evicts as many bytes and a few more."""
        lack = -self._spare_bytes()
        if lack > 0 and self._index.extents.slabs():
            self.shrink(max(0, self._total() - int(lack) - self._cap // 64))

    def _slab_share(self, of_bytes: int) -> int:
        """The part of `of_bytes` that the index leaves for the slabs."""
        pages, unused = self._index.page_counts()
        return of_bytes - LOG_SHARE - self._set_aside_bytes - (pages - unused) * PAGE_SIZE

    # The cap (K4)

    def _set_cap(self, cap: int) -> None:
        self._cap = cap
        # At most some hundred slabs, to keep O(slabs) work small for any cap.
        self._max_slab = min(max(_SLAB, cap // 256), (cap - LOG_SHARE) // 4) // PAGE * PAGE

    def _index_has_room(self, info: SegmentInfo) -> bool:
        """True if one more row cannot bring the folder above the cap."""
        pages, unused = self._index.page_counts()
        wanted = 16 + len(info.tokens) // (PAGE_SIZE // 2)
        max_bytes = self._cap - LOG_SHARE - self._set_aside_bytes - self._index.extents.total_bytes()
        return (pages + wanted - unused) * PAGE_SIZE <= max_bytes

    def _total(self) -> int:
        """Bytes that count against the cap."""
        index = self._index.page_counts()[0] * PAGE_SIZE
        others = self._set_aside_bytes + self.other_bytes
        return self._index.extents.total_bytes() + index + LOG_SHARE + others
