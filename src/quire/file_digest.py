"""SHA-256 of files. The digests of large files are saved next to them, by path, size, times and inode.

Cost: one pass over the file, about 1 to 2 s for each GiB; microseconds if the digest is saved.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.atomic_file import AtomicFile

__all__ = ["file_digest", "sha256_of"]

_DIGESTS = "quire-sha256.json"  # next to the digested files
_MIN_SAVED_BYTES = 64 << 20  # of a file whose digest is saved


def file_digest(path: Path) -> str:
    """SHA-256 in hex; a saved digest is trusted. In a folder that cannot be written nothing is saved."""
    status = path.stat()
    if status.st_size < _MIN_SAVED_BYTES:
        return sha256_of(path)
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    saved: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        read = json.loads((path.parent / _DIGESTS).read_text())
        saved = read if isinstance(read, dict) else {}
    entry = saved.get(path.name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str):
        return entry["sha256"]
    digest = sha256_of(path)
    saved[path.name] = {"stamp": stamp, "sha256": digest}
    with suppress(OSError), AtomicFile(path.parent / _DIGESTS) as file:
        file.write(json.dumps(saved).encode())
    return digest


def sha256_of(path: Path) -> str:
    """SHA-256 in hex, of the bytes read now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
