"""The tables of a disk tier's index: creates them, and tells Quire's files from other programs'.

state     one row: the index's identity, the byte cap, a counter that only grows
entry     a value: key, parent, root, position, number of tokens, place, retention (its cache priority), number of
          stored children, time of use
content   its tokens and extra keys, in a table of their own, so that a use rewrites small rows
root      a root's description
slab, extent   see `extents`
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ArgumentError
from quire.tiers.disk import extents

__all__ = ["FILE_NAME", "PAGE_SIZE", "VERSION", "is_foreign", "prepare", "transaction_of"]

FILE_NAME = "quire-cache.sqlite"
PAGE_SIZE = 4096
VERSION = 1
_APPLICATION = 0x51756972  # "Quir"
_FILE_HEADER = b"SQLite format 3\0"  # of SQLite's; the application's id is at byte 68, big endian
_CHECKPOINT_PAGES = 256
_SCHEMA = (
    """
CREATE TABLE state (one INTEGER PRIMARY KEY CHECK (one = 1), identity TEXT NOT NULL, max_bytes INTEGER NOT NULL,
                    counter INTEGER NOT NULL);
CREATE TABLE entry (id INTEGER PRIMARY KEY, key BLOB NOT NULL, parent BLOB NOT NULL, root BLOB NOT NULL,
                    start INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
                    slab INTEGER NOT NULL, offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
                    retention INTEGER NOT NULL, children INTEGER NOT NULL, used INTEGER NOT NULL,
                    made_at REAL NOT NULL, used_at REAL NOT NULL, owner TEXT NOT NULL);
CREATE UNIQUE INDEX entry_by_key ON entry (key);
CREATE INDEX entry_by_parent ON entry (parent);
CREATE INDEX entry_by_place ON entry (slab, offset);
CREATE INDEX leaf_by_use ON entry (retention, used) WHERE children = 0;
CREATE TABLE content (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, extra_keys TEXT NOT NULL);
CREATE TABLE root (root BLOB PRIMARY KEY, description TEXT NOT NULL);
"""
    + extents.SCHEMA
)


def is_foreign(path: Path) -> bool:
    """True for another program's SQLite database. A file that is no database, or empty, may be ours, damaged."""
    with path.open("rb") as file:
        header = file.read(72)
    return header.startswith(_FILE_HEADER) and header[68:] != _APPLICATION.to_bytes(4, "big")


def prepare(connection: sqlite3.Connection, path: Path, max_bytes: int | None) -> None:
    """Opens or creates the index of a connection, in WAL mode; max_bytes and errors: see `DiskIndex`."""
    sql = connection.execute
    application, version = (
        sql("PRAGMA application_id").fetchone()[0],
        sql("PRAGMA user_version").fetchone()[0],
    )
    tables = sql("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables == 0 and application == 0:
        if max_bytes is None:
            raise ArgumentError(f"expected a disk cache, got a folder without an index - in {path.parent}")
        _create(connection, max_bytes)
    elif application != _APPLICATION:
        raise ArgumentError(
            f"expected an index of Quire's, got an SQLite file of another program - in {path}"
        )
    elif version != VERSION:
        raise ArgumentError(
            f"expected a disk cache of version {VERSION}, got version {version} - in {path}; "
            "take another folder, or remove this one with `quire cache rm`"
        )
    mode = sql("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"expected a file system with shared memory for WAL, got mode {mode}")
    sql(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    sql(f"PRAGMA journal_size_limit = {_CHECKPOINT_PAGES * PAGE_SIZE}")
    # Reads both ends of the trees, to find damage there now and not in a request. No scan.
    sql("SELECT * FROM entry ORDER BY id LIMIT 1").fetchone()
    sql("SELECT * FROM entry ORDER BY id DESC LIMIT 1").fetchone()
    sql("SELECT retention FROM entry WHERE children = 0 ORDER BY retention, used LIMIT 1").fetchone()
    if sql("SELECT count(*) FROM state").fetchone()[0] != 1:
        error = sqlite3.DatabaseError("the index has lost its state")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    if max_bytes is not None:
        sql("UPDATE state SET max_bytes = ? WHERE max_bytes <> ?", (max_bytes, max_bytes))


def _create(connection: sqlite3.Connection, max_bytes: int) -> None:
    connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    with transaction_of(connection):
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO state VALUES (1, ?, ?, 0)", (secrets.token_hex(4), max_bytes))
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def transaction_of(connection: sqlite3.Connection) -> Iterator[None]:
    """Commits all changes made within, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
