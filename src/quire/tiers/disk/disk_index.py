"""The index of a disk tier: an SQLite file in WAL mode with each value's place, cache priority and last use. Its tables
are in `disk_schema`.

It has no bytes of values. Every change is one transaction; `durable` ones are on the medium when they have ended.

Invariants
    D1  `entry.children` is the number of entries that name it as parent.
    D2  an id is never used twice, so that a reader can tell a value from its successor in the same place.
    D3  order of use is the order of the counter, never of a clock: a clock may go back.
    D4  one connection at a time, among all processes, writes or moves the log, under a lock of Quire's: SQLite before
        3.51.3 may lose transactions if two do (its "WAL-reset bug", sqlite.org/wal.html#walresetbug).
    D5  a transaction that this process does not see never reappears once another one has begun. If a writer was killed
        within a commit, or its commit failed, the log may have all of it though no other process sees it. The next
        writer's first commit overwrites it there, before any page of a value is written.

Cost: opening and every call on one key O(log n); `contains` one query; `roots` and `entries` read every row.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.tiers.disk.disk_check import check_index
from quire.tiers.disk.disk_schema import FILE_NAME, prepare, transaction_of
from quire.tiers.disk.extents import Extents
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder_lock import WriteLock
from quire.tiers.tier import SegmentInfo

__all__ = ["DiskIndex", "SlabRange", "StoredEntry", "StoredRoot", "is_damage"]

_MAX_VARIABLES = 30_000


@dataclass(frozen=True)
class SlabRange:
    """The place of a value: its bytes within a slab. id: see D2."""

    id: int
    slab: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class StoredEntry:
    """A value in the index. made_at, used_at: seconds since 1970."""

    key: bytes
    info: SegmentInfo
    num_bytes: int
    made_at: float
    used_at: float

    @property
    def num_tokens(self) -> int:
        return len(self.info.tokens) // 4


@dataclass(frozen=True)
class StoredRoot:
    """Totals of one model and namespace. num_bytes: of values; owners: sorted."""

    root: bytes
    description: str
    num_values: int
    num_tokens: int
    num_bytes: int
    made_at: float
    used_at: float
    owners: tuple[str, ...]


def is_damage(error: BaseException) -> bool:
    """True if SQLite reports a damaged file, or one that is no database."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DiskIndex:
    """See the module's text. One connection writes and one reads, each used by one thread at a time.

    max_bytes: the folder's new cap; None: the cap stays, and the index must exist.
    *raises:* ArgumentError: no index, or another program's; sqlite3.Error.
    """

    def __init__(self, folder: Path, files: Files, *, max_bytes: int | None, timeout_s: float) -> None:
        self.path = folder / FILE_NAME
        self._files = files
        self._reading = threading.Lock()
        self._writing = threading.RLock()
        self._timeout_ms = int(timeout_s * 1e3)
        if not self.path.exists():  # SQLite would make it readable for other users
            os.close(files.open_lock(self.path))
        self._write_lock = WriteLock(folder / "quire-cache.writing", files, timeout_s)
        connections: list[sqlite3.Connection] = []
        try:
            connections.append(files.connect(self.path, timeout_s=timeout_s))
            with self._write_locked():
                prepare(connections[0], self.path, max_bytes)
            connections.append(files.connect(self.path, timeout_s=timeout_s))
            connections[1].execute("PRAGMA query_only = 1")
            self.identity: str = connections[1].execute("SELECT identity FROM state").fetchone()[0]
        except BaseException:
            for connection in connections:
                connection.close()
            self._write_lock.close()
            raise
        self._writer, self._reader = connections
        self.extents = Extents(self._writer)

    def close(self) -> None:
        with self._reading, self._writing:
            self._reader.close()
            self._writer.close()
            self._write_lock.close()

    # Transactions

    @contextmanager
    def _write_locked(self, *, wait: bool = True) -> Iterator[None]:
        """Holds the write lock (D4). *raises:* TierError."""
        self._write_lock.acquire(wait=wait)
        try:
            yield
        except BaseException:
            self._write_lock.unsettled = True
            raise
        finally:
            self._write_lock.release()

    @contextmanager
    def transaction(self, *, durable: bool = True, wait: bool = True) -> Iterator[None]:
        """Commits all changes made within, or none. wait: for another process that writes; else TierError."""
        with self._writing, self._write_locked(wait=wait):
            self._writer.execute(f"PRAGMA busy_timeout = {self._timeout_ms}")
            if self._write_lock.unsettled:  # D5
                self._set_durable(True)
                with transaction_of(self._writer):
                    self.next_number()
                self._write_lock.unsettled = False
            self._set_durable(durable)
            with transaction_of(self._writer):
                yield

    def _set_durable(self, durable: bool) -> None:
        self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")

    def checkpoint(self) -> None:
        """Moves the log into the index and frees its space, unless a reader needs it."""
        with self._writing, self._write_locked():
            self._writer.execute("PRAGMA busy_timeout = 50")
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def vacuum(self) -> None:
        """Returns the index's unused pages to the file system."""
        with self._writing, self._write_locked():
            self._writer.execute("PRAGMA incremental_vacuum").fetchall()
        self.checkpoint()

    # Reading: from any thread, the last committed state

    def find(self, key: bytes) -> SlabRange | None:
        row = self._row("SELECT id, slab, offset, num_bytes FROM entry WHERE key = ?", key)
        return None if row is None else SlabRange(*row)

    def find_all(self, keys: Sequence[bytes]) -> dict[bytes, SlabRange]:
        """`find` for many keys; missing ones are left out."""
        found: dict[bytes, SlabRange] = {}
        for first in range(0, len(keys), _MAX_VARIABLES):
            some = keys[first : first + _MAX_VARIABLES]
            marks = ",".join("?" * len(some))
            query = f"SELECT key, id, slab, offset, num_bytes FROM entry WHERE key IN ({marks})"
            found.update((row[0], SlabRange(*row[1:])) for row in self._rows(query, *some))
        return found

    def are_there(self, places: Sequence[SlabRange]) -> bool:
        """True if each of these is still a value's place (D2), by one query; False also if one cannot take them all."""
        ids = {place.id for place in places}
        if len(ids) > _MAX_VARIABLES:
            return False
        marks = ",".join("?" * len(ids))
        return self._row(f"SELECT count(*) FROM entry WHERE id IN ({marks})", *ids)[0] == len(ids)

    def entry(self, key: bytes) -> StoredEntry | None:
        return next(self._entries("WHERE e.key = ?", key), None)

    def entries(self, root: bytes | None) -> Iterator[StoredEntry]:
        """All entries, a parent before its children; entries removed meanwhile are left out."""
        where, given = ("", ()) if root is None else ("WHERE root = ?", (root,))
        ids = [row[0] for row in self._rows(f"SELECT id FROM entry {where} ORDER BY root, start, id", *given)]
        for first in range(0, len(ids), 500):
            some = ids[first : first + 500]
            marks = ",".join("?" * len(some))
            # Several short queries: a long one would keep the log from being checkpointed.
            yield from self._entries(f"WHERE e.id IN ({marks}) ORDER BY root, start, e.id", *some)

    def roots(self) -> list[StoredRoot]:
        owners: dict[bytes, list[str]] = {}
        for root, owner in self._rows("SELECT DISTINCT root, owner FROM entry ORDER BY owner"):
            owners.setdefault(root, []).append(owner)
        rows = self._rows(
            "SELECT e.root, coalesce(max(description), ''), count(*), sum(num_tokens), sum(num_bytes), min(made_at), "
            "max(used_at) FROM entry e LEFT JOIN root r ON r.root = e.root GROUP BY e.root ORDER BY e.root"
        )
        found = []
        for root, description, num_values, num_tokens, num_bytes, made_at, used_at in rows:
            sums = (num_values, num_tokens, num_bytes, made_at, used_at)
            found.append(StoredRoot(root, description, *sums, tuple(owners.get(root, ()))))
        return found

    def max_bytes(self) -> int:
        return self._row("SELECT max_bytes FROM state")[0]

    def sizes(self) -> tuple[int, int, int]:
        """(number of values, bytes of their pages, bytes of all slabs)."""
        with self._reading:
            extents = Extents(self._reader)
            num_values, used_bytes = extents.usage()
            return num_values, used_bytes, extents.total_bytes()

    def log_bytes(self) -> int:
        return self._files.size(self.path.with_name(FILE_NAME + "-wal"))

    def file_bytes(self) -> int:
        """Bytes on disk of the index, its log and its shared memory."""
        return sum(
            self._files.size(self.path.with_name(FILE_NAME + suffix)) for suffix in ("", "-wal", "-shm")
        )

    def _entries(self, where: str, *given: object) -> Iterator[StoredEntry]:
        for row in self._rows(
            "SELECT key, root, parent, start, tokens, extra_keys, retention, owner, num_bytes, made_at, used_at "
            f"FROM entry e JOIN content c ON c.id = e.id {where}",
            *given,
        ):
            key, root, parent, start, tokens, extra, cache_priority, owner, num_bytes, made_at, used_at = row
            extra_keys = tuple((position, bytes.fromhex(value)) for position, value in json.loads(extra))
            info = SegmentInfo(root, parent, start, tokens, extra_keys, cache_priority, owner)
            yield StoredEntry(key, info, num_bytes, made_at, used_at)

    def _rows(self, query: str, *given: object) -> list[tuple]:
        with self._reading:
            return self._reader.execute(query, given).fetchall()

    def _row(self, query: str, *given: object) -> tuple:
        with self._reading:
            return self._reader.execute(query, given).fetchone()

    # Changing: within a transaction

    def place_of(self, key: bytes) -> SlabRange | None:
        """`find` as this transaction sees it."""
        row = self._writer.execute(
            "SELECT id, slab, offset, num_bytes FROM entry WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else SlabRange(*row)

    def next_number(self) -> int:
        """A number greater than all before (D2, D3)."""
        sql = "UPDATE state SET counter = counter + 1 RETURNING counter"
        return self._writer.execute(sql).fetchone()[0]

    def insert(
        self, key: bytes, info: SegmentInfo, slab: int, offset: int, num_bytes: int, now: float
    ) -> None:
        number = self.next_number()
        sql = self._writer.execute
        children = sql("SELECT count(*) FROM entry WHERE parent = ?", (key,)).fetchone()[0]
        sql(
            "INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                key,
                info.parent,
                info.root,
                info.start,
                len(info.tokens) // 4,
                slab,
                offset,
                num_bytes,
                info.cache_priority,
                children,
                number,
                now,
                now,
                info.owner,
            ),
        )
        extra = json.dumps([[position, value.hex()] for position, value in info.extra_keys])
        sql("INSERT INTO content VALUES (?, ?, ?)", (number, info.tokens, extra))
        sql("UPDATE entry SET children = children + 1 WHERE key = ?", (info.parent,))

    def touch(self, key: bytes, now: float, cache_priority: int = 0) -> None:
        """Notes a use, and raises the cache priority to that of the user. Does nothing if the key is missing."""
        self._writer.execute(
            "UPDATE entry SET used = ?, used_at = ?, retention = max(retention, ?) WHERE key = ?",
            (self.next_number(), now, cache_priority, key),
        )

    def remove(self, key: bytes) -> SlabRange | None:
        """Removes the value's row; its place, whose pages the caller frees."""
        row = self._writer.execute(
            "DELETE FROM entry WHERE key = ? RETURNING id, slab, offset, num_bytes, parent", (key,)
        ).fetchone()
        if row is None:
            return None
        self._writer.execute("DELETE FROM content WHERE id = ?", (row[0],))
        self._writer.execute("UPDATE entry SET children = children - 1 WHERE key = ?", (row[4],))
        return SlabRange(*row[:4])

    def set_cache_priority(self, keys: Sequence[bytes], cache_priority: int) -> None:
        self._writer.executemany(
            "UPDATE entry SET retention = ? WHERE key = ? AND retention <> ?",
            [(cache_priority, key, cache_priority) for key in keys],
        )

    def next_victim(self, cache_priority: int) -> bytes | None:
        """The key to evict next: of the leaves up to `cache_priority`, the lowest, unused for longest. In the tables
        the column is `retention`."""
        row = self._writer.execute(
            "SELECT key FROM entry WHERE children = 0 AND retention <= ? ORDER BY retention, used LIMIT 1",
            (cache_priority,),
        ).fetchone()
        return None if row is None else row[0]

    def values_behind(self, slab: int, offset: int) -> list[tuple[bytes, SlabRange]]:
        """The values of a slab that end behind `offset`, in order of place."""
        rows = self._writer.execute(
            "SELECT key, id, slab, offset, num_bytes FROM entry WHERE slab = ? AND offset + num_bytes > ? "
            "ORDER BY offset",
            (slab, offset),
        )
        return [(row[0], SlabRange(*row[1:])) for row in rows]

    def move(self, place: SlabRange, slab: int, offset: int) -> None:
        """Notes a value's new place. It gets a new id (D2), so that a reader that has begun reads again."""
        number, sql = self.next_number(), self._writer.execute
        sql("UPDATE entry SET id = ?, slab = ?, offset = ? WHERE id = ?", (number, slab, offset, place.id))
        sql("UPDATE content SET id = ? WHERE id = ?", (number, place.id))

    def describe(self, root: bytes, description: str) -> None:
        self._writer.execute("INSERT OR REPLACE INTO root VALUES (?, ?)", (root, description))

    def page_counts(self) -> tuple[int, int]:
        """(pages of the index, unused ones among them) as this transaction sees them."""
        sql = self._writer.execute
        return sql("PRAGMA page_count").fetchone()[0], sql("PRAGMA freelist_count").fetchone()[0]

    def check(self) -> None:
        """Checks X1, X2 and D1 over every row. *raises:* InvariantError."""
        check_index(self._writer)
