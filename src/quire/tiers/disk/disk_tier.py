"""The durable tier: values in slab files of one folder, an SQLite index, one cap on all of it.

A store writes the bytes into free pages, syncs them, and only then commits the row that names them, in one
transaction: a process killed at any moment leaves the pages free or the value whole. Threads that store at the same
time share a transaction and its two syncs. Several processes may use a folder: a lock serialises writers (D4 of
`disk_index`), readers never wait. A folder has one cap, set by the process that opened it last. Local file systems
only.

Invariants, in addition to those of `tier`
    K1  a committed row names bytes that were wholly written and synced before it.
    K2  pages are written again only when the removal of the row that named them is on the medium.
    K3  a load that finds the same row before and after has read that row's bytes: K2, and ids are never reused (D2).
        That holds for any time between, also from an earlier lookup.
    K4  slabs, index, log and a damaged index set aside together never exceed the cap.
    K5  evicted first: leaves of the lowest cache priority, of those the one unused for longest. A value never displaces
        one of a higher cache priority; a value with stored children stays until they are gone.
    K6  a new slab leaves `min_free_bytes` of the file system free; if other programs use these, the next store frees
        as many bytes.

Cost: opening O(slabs), without a scan of values or tables. `contains` one query; `load` a pread and two lookups, one if
`contains` has found the value before; `store` one write, two syncs and O(log n), shared by concurrent stores; making
room one sync more.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from quire.errors import ArgumentError
from quire.sizes import format_size
from quire.tiers.disk.disk_errors import errors_in_use, errors_of_opening
from quire.tiers.disk.disk_index import DiskIndex, SlabRange, StoredEntry, StoredRoot, is_damage
from quire.tiers.disk.disk_schema import FILE_NAME
from quire.tiers.disk.disk_writer import LOG_SHARE, MIN_CAP, DiskWriter, StoreCall
from quire.tiers.disk.files import Buffer, Files
from quire.tiers.disk.folder_lock import FolderLock
from quire.tiers.disk.recent_uses import RecentUses
from quire.tiers.disk.shared_stores import SharedStores
from quire.tiers.disk.slabs import Slabs
from quire.tiers.tier import Reason, SegmentInfo, TierError, TierStats

__all__ = ["DiskTier", "DiskUsage"]

_DAMAGED, _SET_ASIDE = "quire-cache.damaged", "quire-cache.set-aside"
_MAX_PLACES = 4096  # remembered places; a longer lookup's are all kept until the next
_TRIES = 8

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class DiskUsage:
    """Bytes on disk. values: pages of values, within slabs; index: with its log; other: see `count_other_files`."""

    values: int
    slabs: int
    index: int
    set_aside: int
    other: int

    @property
    def total(self) -> int:
        return self.slabs + self.index + self.set_aside + self.other


class DiskTier:
    """Values by key in a folder, `max_bytes` of disk at most. Several threads may use it; see the module's text.

    max_bytes: at least 16 MiB; None opens an existing folder with its own cap. min_free_bytes: see K6. clock: seconds
    since 1970, for lists only.

    *raises:* ArgumentError: no folder, no permission, a cap too small, an index of another program or version.
    TierError: the disk is full, or fails. A damaged index is set aside and replaced by a new one.
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int | None,
        *,
        min_free_bytes: int = 0,
        clock: Callable[[], float] = time.time,
        files: Files | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        name = os.fspath(path)
        if not name or "\0" in name:
            raise ArgumentError(f"expected a folder for the disk cache, got {name!r}")
        self.path = Path(name).expanduser()
        if max_bytes is not None and max_bytes < MIN_CAP:
            raise ArgumentError(
                f"expected a disk cache of at least {format_size(MIN_CAP)}, got {format_size(max_bytes)}"
            )
        self._files = files or Files()
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._uses = RecentUses()
        # Places that `contains` found, for the load that follows; may be out of date (K3).
        self._places: dict[bytes, SlabRange] = {}
        self._stats = TierStats(0, 0)
        self._counting = threading.Lock()  # guards the two above
        self._stores = SharedStores(self._store_alone)
        self._turn = threading.Lock()  # guards the writer
        self._closed = False
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None
        with errors_of_opening(self.path):
            if max_bytes is not None:
                if not self.path.is_dir():
                    self._files.make_folder(self.path)
                    self._files.sync_folder(self.path.parent)
            elif not (self.path / FILE_NAME).is_file():
                raise ArgumentError(f"expected a folder with a disk cache, got none - in {self.path}")
            self._lock = FolderLock(self.path, self._files, timeout_s)
            try:
                with self._lock.opening():
                    self._open(max_bytes, timeout_s)
            except BaseException:
                self._lock.close()
                raise

    # The contract of a tier

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._errors_named("look up values"):
            found = self._index.find_all(keys)
        with self._counting:
            if len(self._places) + len(found) > _MAX_PLACES:
                self._places.clear()
            self._places.update(found)
        return [bytes(key) in found for key in keys]

    def load(self, key: bytes) -> memoryview | None:
        value = self.peek(key)
        self._count(hits=value is not None, misses=value is None)
        if value is not None:
            self._note_uses([key])
        return value

    def load_many(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The values of the leading keys that are there, each tried once; `load` gives the reason for the next.

        Two lookups for all of them, and the effect of a lookup on a core's caches only once.
        """
        places = self.locate(keys)
        values: list[memoryview] = []
        with self._errors_named("load values"):
            for place in places:
                value, _ = self._read(place)
                if value is None:
                    break
                values.append(value)
        return values[: self.confirm(keys, places[: len(values)])]

    def locate(self, keys: Sequence[bytes]) -> list[SlabRange]:
        with self._errors_named("look up values"):
            seen = {key: place for key in keys if (place := self._places.pop(key, None)) is not None}
            if unseen := [key for key in keys if key not in seen]:
                seen |= self._index.find_all(unseen)
            found = takewhile(lambda place: place is not None, map(seen.get, keys))
            return [place for place in found if place is not None]

    def read_now(
        self, places: Sequence[SlabRange], parts: Sequence[Sequence[Buffer]]
    ) -> list[tuple[memoryview, int]]:
        wanted: list[tuple[int, int, memoryview, Sequence[Buffer]]] = []
        for place, some in zip(places, parts, strict=True):
            front = place.num_bytes - sum(map(len, some))
            if front <= 0:
                break
            wanted.append((place.slab, place.offset, memoryview(bytearray(front)), some))
        with self._errors_named("load values"):
            digests = self._slabs.read_now(wanted)
        return [(front, digest) for (_, _, front, _), digest in zip(wanted, digests, strict=False)]

    def confirm(self, keys: Sequence[bytes], places: Sequence[SlabRange]) -> int:
        keys = keys[: len(places)]
        with self._errors_named("look up values"):
            same = len(keys)
            if not self._index.are_there(places):
                after = self._index.find_all(keys)
                pairs = zip(keys, places, strict=True)
                same = sum(1 for _ in takewhile(lambda pair: after.get(pair[0]) == pair[1], pairs))
        self._count(hits=same)
        self._note_uses(keys[:same])
        return same

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        parts = [memoryview(part).cast("B") for part in value]
        call = StoreCall(key, parts, sum(map(len, parts)), info)
        with self._errors_named("store a value"):
            if not self._writer.can_fit(call.num_bytes):
                return False
        self._stores.store(call)
        return call.is_stored

    def evict(self, key: bytes) -> bool:
        with self._turn, self._errors_named("remove a value"):
            removed = self._writer.remove(key)
        self._count(evicted=removed)
        return removed

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        return [(entry.key, entry.info) for root in roots for entry in self.entries(root)]

    def stats(self) -> TierStats:
        with self._errors_named("count values"):
            num_values, num_bytes, _ = self._index.sizes()
        with self._counting:
            evicted = self._stats.evicted + self._writer.num_evicted
            return replace(
                self._stats,
                num_values=num_values,
                num_bytes=num_bytes,
                stored=self._writer.num_stored,
                evicted=evicted,
            )

    def close(self) -> None:
        with self._turn:
            if self._closed:
                return
            with suppress(TierError):  # only the order of use is lost
                self._write_uses()
            self._closed = True
            self._index.close()
            self._slabs.close()
            self._lock.close()

    # Beyond the contract: the folder's contents

    def peek(self, key: bytes) -> memoryview | None:
        """`load` without counting a use or a hit."""
        with self._errors_named("load a value"):
            seen = self._places.pop(key, None)
            for _ in range(_TRIES):
                place, seen = seen or self._index.find(key), None
                if place is None:
                    return None
                value, lost = self._read(place)
                if self._index.find(key) == place:  # K3
                    if value is None:
                        self._drop_damaged(key, place, lost=lost)
                    return value
        return None  # it was replaced during each try: as if evicted

    def entries(self, root: bytes | None = None) -> Iterator[StoredEntry]:
        """Entries of one root or of all, from the index alone; a parent before its children."""
        with self._errors_named("list values"):
            yield from self._index.entries(root)

    def entry(self, key: bytes) -> StoredEntry | None:
        with self._errors_named("look up a value"):
            return self._index.entry(key)

    def chain(self, key: bytes) -> list[StoredEntry] | None:
        """The entries from the first of its root to this one; None if one of them is missing."""
        found: list[StoredEntry] = []
        while not found or key != found[-1].info.root:
            entry = self.entry(key)
            if entry is None:
                return None
            found.append(entry)
            key = entry.info.parent
        return found[::-1]

    def roots(self) -> list[StoredRoot]:
        """Totals by model and namespace. Reads every row of the index."""
        with self._errors_named("list roots"):
            return self._index.roots()

    def describe(self, root: bytes, description: str) -> None:
        """Sets a root's description in lists, such as the model's name."""
        with self._turn, self._errors_named("name a root"), self._index.transaction():
            self._index.describe(root, description)

    def set_cache_priority(self, keys: Sequence[bytes], cache_priority: int) -> None:
        """Sets the cache priority of those of these values that are here; durable on return."""
        with self._turn, self._errors_named("set how values are kept"), self._index.transaction():
            self._index.set_cache_priority(keys, cache_priority)

    def usage(self) -> DiskUsage:
        with self._errors_named("measure the folder"):
            _, values, slabs = self._index.sizes()
            index_bytes = self._index.file_bytes()
            return DiskUsage(values, slabs, index_bytes, self._set_aside_bytes, self._writer.other_bytes)

    def count_other_files(self, num_bytes: int) -> None:
        """Counts bytes of other files in the folder against the cap, in this process; evicts values if needed."""
        with self._turn, self._errors_named("make room for other files"):
            self._writer.count_other_files(num_bytes)

    def max_bytes(self) -> int:
        """The folder's cap."""
        with self._errors_named("read the cap"):
            return self._index.max_bytes()

    def prune(self, to_bytes: int) -> int:
        """Evicts values until the folder takes at most `to_bytes`, 4 MiB of them for the log as in the cap.

        Returns the number of values evicted. The cap stays.
        """
        with self._turn, self._errors_named("prune the folder"):
            with suppress(TierError):
                self._write_uses()
            return self._writer.shrink(to_bytes)

    def check(self) -> None:
        """Checks the index's invariants by reading all of it. *raises:* InvariantError."""
        with self._turn, self._errors_named("check the index"), self._index.transaction(durable=False):
            self._index.check()

    # Opening

    def _open(self, max_bytes: int | None, timeout_s: float) -> None:
        def open_index() -> DiskIndex:
            return DiskIndex(self.path, self._files, max_bytes=max_bytes, timeout_s=timeout_s)

        if (self.path / _DAMAGED).exists():
            self._replace_index("it was found damaged when it was last used", max_bytes)
        try:
            self._index = open_index()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self._replace_index(str(error), max_bytes)
            self._index = open_index()
        try:
            self._slabs = Slabs(self.path, self._index.identity, self._files)
            self._set_aside_bytes = self._files.size(self.path / _SET_ASIDE)
            self._writer = DiskWriter(
                self.path, self._index, self._slabs, self._set_aside_bytes, self._spare_bytes
            )
            self._writer.on_removed = lambda keys, reason: self.on_removed(keys, reason)
            self._writer.recover()
        except BaseException:
            self._index.close()
            raise

    def _spare_bytes(self) -> float:
        if not self._min_free_bytes:
            return math.inf
        return self._files.free_bytes(self.path) - self._min_free_bytes

    def _replace_index(self, reason: str, max_bytes: int | None) -> None:
        """Sets the damaged index aside, so that a new one is made; its values are lost."""
        if max_bytes is None:
            raise TierError(
                f"expected an index that can be read, got a damaged one ({reason}) - in {self.path}"
            )
        if not self._lock.is_alone():
            raise TierError(
                f"expected an index that can be read, got a damaged one ({reason}) that another process uses - "
                f"in {self.path}; end that process first"
            )
        if self._files.size(self.path / FILE_NAME) <= (max_bytes - LOG_SHARE) // 8:
            self._files.rename(self.path / FILE_NAME, self.path / _SET_ASIDE)
        for name in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", _DAMAGED):
            self._files.remove(self.path / name)
        _log.warning(
            "%s: the index is damaged (%s); set aside as %s, the cache begins anew",
            self.path,
            reason,
            _SET_ASIDE,
        )

    # Storing

    def _store_alone(self, batch: list[StoreCall]) -> None:
        with self._turn:
            self._store(batch)

    def _store(self, batch: list[StoreCall]) -> None:
        """Stores a batch. After an error each call is stored alone, so that the error goes to its own call."""
        try:
            with self._errors_named("store a value"):
                uses = self._uses.pop_all()
                try:
                    self._writer.store(batch, uses, self._clock())
                except BaseException:
                    self._uses.restore(uses)
                    raise
        except TierError as error:
            if len(batch) > 1:
                for call in batch:
                    self._store([call])
                return
            self._count(failures=1)
            batch[0].error = error

    # Loading

    def _read(self, place: SlabRange) -> tuple[memoryview | None, bool]:
        """(the bytes or None, whether the whole file is gone)."""
        try:
            return self._slabs.read(place.slab, place.offset, place.num_bytes), False
        except FileNotFoundError:
            return None, True

    def _drop_damaged(self, key: bytes, place: SlabRange, *, lost: bool) -> None:
        """Counts and removes a value whose slab file is gone or ends before it."""
        self._count(failures=1)
        with self._turn:
            if lost:
                self._writer.drop_slab(place.slab)
            elif self._writer.remove(key, only=place):
                _log.warning("%s: a slab file was cut short; a value in it is removed", self.path)

    def _note_uses(self, keys: Sequence[bytes]) -> None:
        if self._uses.add(keys, self._clock()) and self._turn.acquire(blocking=False):
            try:
                with suppress(TierError):  # the next store writes them
                    self._write_uses()
            finally:
                self._turn.release()

    def _write_uses(self) -> None:
        uses = self._uses.pop_all()
        try:
            with self._errors_named("note uses"):
                self._writer.touch(uses)
        except BaseException:
            self._uses.restore(uses)
            raise

    # Errors

    @contextmanager
    def _errors_named(self, doing: str) -> Iterator[None]:
        if self._closed:
            raise TierError(f"the disk cache in {self.path} is closed")
        with errors_in_use(self.path, doing, self._mark_damaged):
            yield

    def _mark_damaged(self, error: sqlite3.Error) -> None:
        """Has the next opening set the index aside. This tier keeps failing, and its owner counts that."""
        _log.warning("%s: the index is damaged (%s); it is set aside when next opened", self.path, error)
        with suppress(OSError):
            (self.path / _DAMAGED).touch()

    def _count(self, **more: int) -> None:
        with self._counting:
            counts = {name: getattr(self._stats, name) + count for name, count in more.items()}
            self._stats = replace(self._stats, **counts)
