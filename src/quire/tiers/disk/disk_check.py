"""Checks the invariants of a disk tier's index row by row, for tests and `quire cache verify`."""

from __future__ import annotations

import sqlite3

from quire.errors import InvariantError
from quire.tiers.disk.extents import Extents
from quire.tiers.disk.slabs import pages_of

__all__ = ["check_index"]


def check_index(connection: sqlite3.Connection) -> None:
    """X1 and X2 of `extents`, D1 of `disk_index`, and the counts of each slab. *raises:* InvariantError."""
    sql = connection.execute
    slabs = Extents(connection).slabs()
    wrong = sql(
        "SELECT count(*) FROM entry e WHERE children <> (SELECT count(*) FROM entry c WHERE c.parent = e.key)"
    ).fetchone()[0]
    if wrong:
        raise InvariantError(f"D1: {wrong} entries with a wrong number of children")
    if sql("SELECT count(*) FROM entry").fetchone() != sql("SELECT count(*) FROM content").fetchone():
        raise InvariantError("entry and content differ in length")
    taken: dict[int, list[tuple[int, int, bool]]] = {slab: [] for slab in slabs}
    for slab, offset, num_bytes in sql("SELECT slab, offset, num_bytes FROM entry"):
        taken[slab].append((offset, pages_of(num_bytes), False))
    values = {slab: (len(rows), sum(row[1] for row in rows)) for slab, rows in taken.items()}
    for slab, num_values, used in sql("SELECT id, num_values, used_bytes FROM slab").fetchall():
        if values[slab] != (num_values, used):
            raise InvariantError(f"slab {slab} counts {(num_values, used)}, its entries {values[slab]}")
    for slab, start, length in sql("SELECT slab, start, length FROM extent"):
        taken[slab].append((start, length, True))
    for slab, num_bytes in slabs.items():
        end, was_free = 0, False
        for start, length, is_free in sorted(taken[slab]):
            if start != end or (is_free and was_free):
                raise InvariantError(f"X1, X2: slab {slab}, a piece at {start} after one that ends at {end}")
            end, was_free = start + length, is_free
        if end != num_bytes:
            raise InvariantError(f"X1: slab {slab} of {num_bytes} bytes is known up to {end}")
