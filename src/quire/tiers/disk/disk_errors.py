"""Turns errors of the system and of SQLite in a disk cache's folder into one line that names the folder."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.errors import ArgumentError
from quire.tiers.disk.disk_index import is_damage
from quire.tiers.tier import TierError

__all__ = ["errors_in_use", "errors_of_opening"]

_FULL = 1 << 20  # free bytes below which SQLite cannot grow its log by much


@contextmanager
def errors_of_opening(folder: Path) -> Iterator[None]:
    """*raises:* ArgumentError: the folder cannot be written. TierError: any other error."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise ArgumentError(
            f"expected a folder for the disk cache, got {folder}: that, or what it lies in, is a file"
        ) from error
    except PermissionError as error:
        raise ArgumentError(
            f"expected a folder for the disk cache that can be written, got {folder}: {error.strerror}"
        ) from error
    except OSError as error:
        raise TierError(f"the disk cache in {folder} cannot be opened: {error.strerror or error}") from error
    except sqlite3.Error as error:
        raise TierError(
            f"the index of the disk cache in {folder} cannot be opened: {_message(error, folder)}"
        ) from error


@contextmanager
def errors_in_use(folder: Path, doing: str, on_damage: Callable[[sqlite3.Error], None]) -> Iterator[None]:
    """*raises:* TierError. on_damage: called first if the index is damaged."""
    try:
        yield
    except OSError as error:
        raise TierError(f"the disk cache in {folder} could not {doing}: {error.strerror or error}") from error
    except sqlite3.Error as error:
        if is_damage(error):
            on_damage(error)
        raise TierError(
            f"the index of the disk cache in {folder} could not {doing}: {_message(error, folder)}"
        ) from error


def _message(error: sqlite3.Error, folder: Path) -> str:
    """SQLite's message, or "the disk is full": SQLite reports its log on a full disk as an I/O error."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        with suppress(OSError):
            if shutil.disk_usage(folder).free < _FULL:
                return f"the disk is full ({error})"
    return str(error)
