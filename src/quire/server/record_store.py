"""Records that the server keeps for its clients by id: responses and OpenAI's conversations, each one JSON object.

With a disk cache, a record is a file in its folder, `quire-cache.record-<tag>-<id>`: a line with a checksum, then the
JSON. The tag is a digest of the tenant's name. Without one, records are in memory, and end with the server. A record
whose file cannot be written stays in memory, with a warning. `quire cache remove` removes the files too.

Invariants
    R1  a record is found by its tenant alone.
    R2  a tenant has at most `max_count` records of at most `max_bytes` together, except that the record written last
        always stays. Those that were read and written least recently go first, also after a restart.
    R3  `get` returns a record as one `put` or `update` wrote it, or None: a damaged file is removed, with a warning.
    R4  with a folder, a record is durable when `put` or `update` returns; a process killed meanwhile leaves the
        record before.

Cost: `get` reads the file; `put` and `update` take two syncs. A tenant's first call lists the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from quire.atomic_file import UNFINISHED, AtomicFile, FileCalls

__all__ = ["RecordStore", "record_bytes"]

_log = logging.getLogger("quire.server")

_PREFIX = "quire-cache.record-"
_FRONT = b"quire-record 1 "
_ID = re.compile(r"[a-z]{1,8}_[0-9a-f]{32}")

Record = dict[str, Any]


def record_bytes(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass
class _Place:
    """content: of a record in memory; None: it is in its file."""

    num_bytes: int
    content: bytes | None = None


class _TenantRecords:
    """lock: of the fields and of the files. places: by id, the least recently used first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.places: OrderedDict[str, _Place] = OrderedDict()
        self.num_bytes = 0
        self.is_listed = False


class RecordStore:
    """folder: of the disk cache, None without one. max_count, max_bytes: of one tenant. Any thread may call it."""

    def __init__(
        self, folder: Path | None, max_count: int, max_bytes: int, calls: FileCalls | None = None
    ) -> None:
        self.folder = folder
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._calls = calls or FileCalls()
        self._lock = threading.Lock()
        self._by_tenant: dict[str, _TenantRecords] = {}

    def put(self, tenant: str, name: str, record: Record) -> None:
        """Writes a record, and drops others beyond the limits."""
        records = self._records_of(tenant)
        with records.lock:
            self._write(records, tenant, name, record)

    def get(self, tenant: str, name: str) -> Record | None:
        """The record; None: there is none of this id for this tenant."""
        if not _ID.fullmatch(name):
            return None
        records = self._records_of(tenant)
        with records.lock:
            return self._read(records, tenant, name)

    def update(self, tenant: str, name: str, change: Callable[[Record], None]) -> Record | None:
        """Changes a record by `change`, one caller at a time; None: there is none. An error of `change` changes
        nothing."""
        if not _ID.fullmatch(name):
            return None
        records = self._records_of(tenant)
        with records.lock:
            record = self._read(records, tenant, name)
            if record is not None:
                change(record)
                self._write(records, tenant, name, record)
            return record

    def remove(self, tenant: str, name: str) -> bool:
        """Removes a record; False: there is none."""
        if not _ID.fullmatch(name):
            return False
        records = self._records_of(tenant)
        with records.lock:
            is_there = self._read(records, tenant, name) is not None
            self._drop(records, tenant, name)
            return is_there

    def num_records(self, tenant: str) -> int:
        records = self._records_of(tenant)
        with records.lock:
            return len(records.places)

    def check(self) -> None:
        """*raises:* AssertionError: an invariant is broken."""
        for records in self._by_tenant.values():
            assert records.num_bytes == sum(place.num_bytes for place in records.places.values())
            assert len(records.places) <= self.max_count
            assert records.num_bytes <= self.max_bytes or len(records.places) == 1

    # -- under a tenant's lock -------------------------------------------------------------------------

    def _records_of(self, tenant: str) -> _TenantRecords:
        with self._lock:
            records = self._by_tenant.setdefault(tenant, _TenantRecords())
        with records.lock:
            if not records.is_listed:
                self._list(records, tenant)
                records.is_listed = True
        return records

    def _list(self, records: _TenantRecords, tenant: str) -> None:
        """Finds the files of earlier processes, and removes unfinished ones of a process that was killed."""
        if self.folder is None:
            return
        prefix, found = f"{_PREFIX}{_tag(tenant)}-", []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.startswith(prefix):
                    with suppress(OSError):
                        status = entry.stat()
                        found.append((status.st_mtime_ns, entry.name.removeprefix(prefix), status.st_size))
                elif entry.name.startswith(f".{prefix}") and entry.name.endswith(UNFINISHED):
                    with suppress(OSError):
                        self._calls.remove(Path(entry.path))
        for _, name, num_bytes in sorted(found):
            if _ID.fullmatch(name):
                records.places[name] = _Place(num_bytes)
                records.num_bytes += num_bytes
        self._make_room(records, tenant)

    def _read(self, records: _TenantRecords, tenant: str, name: str) -> Record | None:
        place = records.places.get(name)
        if place is not None and place.content is not None:
            records.places.move_to_end(name)
            return json.loads(place.content)
        if self.folder is None:
            return None
        path = self._path(tenant, name)
        try:
            content = path.read_bytes()
            record = _decoded(content)
        except FileNotFoundError:  # another process may have removed it
            self._forget(records, name)
            return None
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("a stored record is lost: %s - in %s", error, path)
            self._drop(records, tenant, name)
            return None
        if place is None:  # another process has written it
            place = records.places[name] = _Place(0)
        records.num_bytes += len(content) - place.num_bytes
        place.num_bytes = len(content)
        records.places.move_to_end(name)
        with suppress(OSError):
            os.utime(path)
        self._make_room(records, tenant)
        return record

    def _write(self, records: _TenantRecords, tenant: str, name: str, record: Record) -> None:
        body = record_bytes(record)
        place = _Place(len(body), body)
        if self.folder is not None:
            path, content = self._path(tenant, name), _encoded(body)
            try:
                with AtomicFile(path, calls=self._calls) as file:
                    file.write(content)
                place = _Place(len(content))
            except OSError as error:
                _log.warning(
                    "a record could not be written and ends with this server: %s - in %s", error, path
                )
        self._forget(records, name)
        records.places[name] = place
        records.num_bytes += place.num_bytes
        self._make_room(records, tenant)

    def _make_room(self, records: _TenantRecords, tenant: str) -> None:
        while len(records.places) > 1 and (
            len(records.places) > self.max_count or records.num_bytes > self.max_bytes
        ):
            self._drop(records, tenant, next(iter(records.places)))

    def _drop(self, records: _TenantRecords, tenant: str, name: str) -> None:
        self._forget(records, name)
        if self.folder is not None:
            try:
                self._calls.remove(self._path(tenant, name))
            except OSError as error:
                _log.warning("a record could not be removed: %s - in %s", error, self._path(tenant, name))

    def _forget(self, records: _TenantRecords, name: str) -> None:
        place = records.places.pop(name, None)
        if place is not None:
            records.num_bytes -= place.num_bytes

    def _path(self, tenant: str, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_PREFIX}{_tag(tenant)}-{name}"


def _tag(tenant: str) -> str:
    return hashlib.sha256(b"quire record\0" + tenant.encode()).hexdigest()[:16]


def _encoded(body: bytes) -> bytes:
    return _FRONT + xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body


def _decoded(content: bytes) -> Record:
    """*raises:* ValueError, RecursionError."""
    front, _, body = content.partition(b"\n")
    if front != _FRONT + xxhash.xxh3_128_hexdigest(body).encode():
        raise ValueError(f"expected a record, got {len(content)} bytes that are none, or are damaged")
    record = json.loads(body)
    if not isinstance(record, dict):
        raise ValueError("expected a JSON object in a record, got another value")
    return record
