"""A disk cache's folder as a whole: check its values one by one, or remove it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ArgumentError
from quire.tiers.disk.disk_index import StoredEntry
from quire.tiers.disk.disk_schema import FILE_NAME, is_foreign
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder_lock import FolderLock
from quire.tiers.segment import SegmentError, read_header
from quire.tiers.tier import TierError

__all__ = ["Damage", "find_damage", "remove_folder"]


@dataclass(frozen=True)
class Damage:
    """A damaged value, and the reason."""

    entry: StoredEntry
    reason: str


def find_damage(tier: DiskTier) -> Iterator[Damage | None]:
    """Yields for each value its damage, or None. Reads every byte and compares every checksum."""
    for entry in tier.entries():
        value = tier.peek(entry.key)
        if value is None:
            if tier.entry(entry.key) is None and tier.stats().failures == 0:
                continue  # evicted by another process meanwhile
            yield Damage(entry, "its slab file is gone or was cut short")
            continue
        try:
            header = read_header(value)
        except SegmentError as error:
            yield Damage(entry, str(error))
            continue
        if (header.get("key"), header.get("num_tokens")) != (entry.key.hex(), entry.num_tokens):
            yield Damage(entry, f"expected the value of key {entry.key.hex()[:12]}, got another one's")
        else:
            yield None


def remove_folder(path: str | Path) -> int:
    """Removes a disk cache, also a damaged one or one of another version, and no other file; returns its bytes.

    *raises:* ArgumentError: there is none, or the index is another program's. TierError: a process has it open, or the
    system refuses.
    """
    folder = Path(path).expanduser()
    try:
        index = folder / FILE_NAME
        if not index.is_file():
            raise ArgumentError(f"expected a folder with a disk cache, got none - in {folder}")
        if is_foreign(index):
            raise ArgumentError(
                f"expected an index of Quire's, got an SQLite file of another program - in {index}; nothing was removed"
            )
        num_bytes = _remove(folder)
        with suppress(OSError):
            folder.rmdir()  # if it is empty
    except OSError as error:
        raise TierError(f"the disk cache in {folder} cannot be removed: {error.strerror or error}") from error
    return num_bytes


def _remove(folder: Path) -> int:
    lock = FolderLock(folder, Files(), timeout_s=10.0)
    try:
        with lock.opening():
            if not lock.is_alone():
                raise TierError(
                    f"expected a disk cache that no process uses, got one that is open - in {folder}"
                )
            num_bytes = 0
            # Slabs first: if that is interrupted, the folder can still be removed.
            for file in sorted(folder.iterdir(), reverse=True):
                if file.is_file() and file.name.startswith(("slab-", "quire-cache.")):
                    num_bytes += file.stat().st_size
                    file.unlink()
    finally:
        lock.close()
    return num_bytes
