"""The free pages of the slabs: a table of the index, changed in the transaction that changes the values' rows.

    slab    (id, num_bytes, used_bytes, num_values)    used_bytes: pages of values, in bytes
    extent  (slab, start, length)                      free space, in bytes

Invariants
    X1  the free extents of a slab and the values' extents cover it, each byte once.
    X2  no two free extents touch: freeing a range joins it with its free neighbours.

Cost: O(log n) a call, n free extents. Best fit: if all values have one size, that is the first extent that fits.
"""

from __future__ import annotations

import sqlite3

__all__ = ["SCHEMA", "Extents"]

SCHEMA = """
CREATE TABLE slab (id INTEGER PRIMARY KEY, num_bytes INTEGER NOT NULL, used_bytes INTEGER NOT NULL,
                   num_values INTEGER NOT NULL);
CREATE TABLE extent (slab INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
                     PRIMARY KEY (slab, start)) WITHOUT ROWID;
CREATE INDEX extent_by_length ON extent (length, slab, start);
"""

_ANYWHERE = (2**62, 0)


class Extents:
    """The free pages, over a connection that is within its owner's transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection.execute

    def slabs(self) -> dict[int, int]:
        """Bytes of each slab."""
        return dict(self._sql("SELECT id, num_bytes FROM slab ORDER BY id"))

    def total_bytes(self) -> int:
        return self._sql("SELECT coalesce(sum(num_bytes), 0) FROM slab").fetchone()[0]

    def usage(self) -> tuple[int, int]:
        """(number of values, bytes of their pages)."""
        row = self._sql(
            "SELECT coalesce(sum(num_values), 0), coalesce(sum(used_bytes), 0) FROM slab"
        ).fetchone()
        return row[0], row[1]

    def fits(self, length: int, *, before: tuple[int, int] = _ANYWHERE) -> bool:
        return self._find(length, before) is not None

    def allocate(self, length: int, *, before: tuple[int, int] = _ANYWHERE) -> tuple[int, int] | None:
        """Allocates pages before that place; their (slab, offset), or None if no extent is long enough."""
        found = self._find(length, before)
        if found is None:
            return None
        slab, start, whole = found
        self._sql("DELETE FROM extent WHERE slab = ? AND start = ?", (slab, start))
        if whole > length:
            self._sql("INSERT INTO extent VALUES (?, ?, ?)", (slab, start + length, whole - length))
        self._count(slab, length, 1)
        return slab, start

    def free(self, slab: int, start: int, length: int) -> None:
        """Frees the pages of a value."""
        self._add_free(slab, start, length)
        self._count(slab, -length, -1)

    def add_slab(self, slab: int, num_bytes: int) -> None:
        self._sql("INSERT INTO slab VALUES (?, ?, 0, 0)", (slab, num_bytes))
        self._sql("INSERT INTO extent VALUES (?, 0, ?)", (slab, num_bytes))

    def cut_slab(self, slab: int, num_bytes: int) -> None:
        """Cuts the slab at `num_bytes`, behind which no value lies; 0: removes it."""
        for (start,) in self._sql(
            "SELECT start FROM extent WHERE slab = ? AND start + length > ?", (slab, num_bytes)
        ).fetchall():
            self._sql("DELETE FROM extent WHERE slab = ? AND start = ?", (slab, start))
            if start < num_bytes:
                self._sql("INSERT INTO extent VALUES (?, ?, ?)", (slab, start, num_bytes - start))
        if num_bytes:
            self._sql("UPDATE slab SET num_bytes = ? WHERE id = ?", (num_bytes, slab))
        else:
            self._sql("DELETE FROM slab WHERE id = ?", (slab,))

    def _find(self, length: int, before: tuple[int, int]) -> tuple[int, int, int] | None:
        return self._sql(
            "SELECT slab, start, length FROM extent WHERE length >= :length "
            "AND (slab < :slab OR slab = :slab AND start + :length <= :offset) ORDER BY length, slab, start LIMIT 1",
            {"length": length, "slab": before[0], "offset": before[1]},
        ).fetchone()

    def _add_free(self, slab: int, start: int, length: int) -> None:
        before = self._sql(
            "SELECT start, length FROM extent WHERE slab = ? AND start < ? ORDER BY start DESC LIMIT 1",
            (slab, start),
        ).fetchone()
        if before is not None and before[0] + before[1] == start:
            self._sql("DELETE FROM extent WHERE slab = ? AND start = ?", (slab, before[0]))
            start, length = before[0], length + before[1]
        after = self._sql(
            "SELECT length FROM extent WHERE slab = ? AND start = ?", (slab, start + length)
        ).fetchone()
        if after is not None:
            self._sql("DELETE FROM extent WHERE slab = ? AND start = ?", (slab, start + length))
            length += after[0]
        self._sql("INSERT INTO extent VALUES (?, ?, ?)", (slab, start, length))

    def _count(self, slab: int, num_bytes: int, num_values: int) -> None:
        self._sql(
            "UPDATE slab SET used_bytes = used_bytes + ?, num_values = num_values + ? WHERE id = ?",
            (num_bytes, num_values, slab),
        )
