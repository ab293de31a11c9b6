"""Snapshots as files: a conversation's tokens under a name, in the folder of the disk cache with their keys and values.

Each is a file `quire-cache.snapshot-<tag>-<name>`; the tag is a digest of the namespace, which no file contains, so
that a name is of no use to another namespace. A removed snapshot is set aside as
`quire-cache.removed-<tag>-<name>-<number>` until its segments have lost their cache priority.

    8 bytes   "QUIRESNP"
    4 bytes   version, little endian
    4 bytes   length of the header
    16 bytes  XXH3-128 of version, length and all that follows
    header    JSON: name, model's name, fingerprint, number of tokens, extra keys, time, owner
    tokens    int32, little endian

Invariants
    N1  a file under a snapshot's name is whole: it is written under another name, synced, renamed, and the folder
        synced. A process killed meanwhile leaves the file before.
    N2  `remove` frees the name at once; its file is set aside whole, unless the system refuses even a rename.
    N3  `read` returns the record that was written, or raises: LoadError for a damaged file or another version.
    N4  if every `write` for an owner has the same allowance, the owner's snapshots stay within it, across processes.
        Damaged files, and those set aside, have no owner.

Cost: 4 bytes a token and some 300; a write is two syncs, and reads all snapshots if it has an allowance.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from quire.atomic_file import AtomicFile
from quire.errors import ArgumentError, LoadError
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder_lock import FileLock
from quire.tiers.tier import TierError

__all__ = [
    "NoSnapshotError",
    "SnapshotAllowance",
    "SnapshotExistsError",
    "SnapshotFiles",
    "SnapshotRecord",
    "SnapshotsFullError",
    "check_name",
    "count_snapshots",
]

_PREFIX = "quire-cache.snapshot-"
_REMOVED = "quire-cache.removed-"  # tag, name and a random number follow
_LOCK, _WRITING = "quire-cache.snapshots", "quire-cache.snapshots-writing"
_MAGIC = b"QUIRESNP"
_FRONT = len(_MAGIC) + 4 + 4 + 16
VERSION = 1
_LATEST = 1 << 40  # seconds since 1970
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class NoSnapshotError(ArgumentError):
    """No snapshot of this name."""


class SnapshotExistsError(ArgumentError):
    """A snapshot of this name exists."""


class SnapshotsFullError(ArgumentError):
    """The owner's allowance of snapshots, or of their tokens, is used up."""


@dataclass(frozen=True)
class SnapshotAllowance:
    """Limits of one owner's snapshots; None: no limit. max_tokens: of all, shared beginnings counted each time."""

    max_count: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class SnapshotRecord:
    """model: its name, for lists. fingerprint: `quire.model.fingerprint.engine_fingerprint`. token_ids: int32.
    made_at: seconds since 1970. owner: a tag of the owner; b"": none."""

    name: str
    model: str
    fingerprint: bytes
    token_ids: np.ndarray
    extra_keys: Mapping[int, bytes]
    made_at: float
    owner: bytes = b""


def check_name(name: object) -> str:
    """*raises:* ArgumentError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = (
            repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:60]}... ({len(repr(name))} characters)"
        )
        raise ArgumentError(
            "expected a snapshot's name of 1 to 100 letters, digits, '.', '_' and '-', the first a letter or a digit, "
            f"got {shown}"
        )
    return name


def count_snapshots(folder: Path) -> int:
    """Snapshots of all namespaces in a folder, damaged ones too; 0 without a folder. *raises:* OSError."""
    return sum(1 for _ in folder.glob(f"{_PREFIX}*"))


class SnapshotFiles:
    """The snapshots in one folder. Several threads and processes may use it; writers take turns."""

    def __init__(self, folder: Path, files: Files | None = None, *, timeout_s: float = 10.0) -> None:
        self.folder = folder
        self._files = files or Files()
        self._timeout_s = timeout_s

    def write(
        self,
        record: SnapshotRecord,
        namespace: bytes,
        *,
        overwrite: bool,
        allowance: SnapshotAllowance | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Writes a record, durable on return. allowance: of its owner; max_bytes: for all files here (`num_bytes`),
        half of the disk cache. A snapshot that is overwritten counts in neither.

        *raises:* ArgumentError: the name is taken; SnapshotsFullError; TierError: the folder cannot be written, or has
        no more room for snapshots.
        """
        path = self._path(record.name, namespace)
        with self._errors("written", record.name), self._locked():
            if not overwrite and self._files.size(path):
                raise SnapshotExistsError(
                    f"expected a new name for a snapshot, got {record.name!r}, which is taken - in {self.folder}; "
                    "overwrite it, or remove it first"
                )
            if allowance is not None:
                self._check_allowance(record, path, allowance)
            if max_bytes is not None:
                num_bytes = self.num_bytes() - self._files.size(path) + len(_encoded(record))
                if num_bytes > max_bytes:
                    raise TierError(
                        f"expected snapshots of at most {max_bytes} bytes, half of the disk cache, got {num_bytes} "
                        f"with {record.name!r} - in {self.folder}; remove some"
                    )
            self._write_record(record, path)

    def read(self, name: str, namespace: bytes) -> SnapshotRecord:
        """*raises:* ArgumentError: no such snapshot; LoadError: it is damaged, or of another version; TierError."""
        path = self._path(check_name(name), namespace)
        with self._errors("read", name):
            try:
                content = self._content(path)
            except FileNotFoundError:
                raise NoSnapshotError(
                    f"expected the name of a snapshot, got {name!r} - in {self.folder}"
                ) from None
        return _decoded(content, path)

    def names(self, namespace: bytes) -> list[str]:
        """The names of a namespace's snapshots, sorted; damaged ones too."""
        prefix = f"{_PREFIX}{_tag(namespace)}-"
        with self._errors("listed"):
            return sorted(
                name.removeprefix(prefix)
                for name in self._files.names(self.folder)
                if name.startswith(prefix)
            )

    def remove(self, name: str, namespace: bytes) -> bool:
        """Sets a snapshot aside; False: it was deleted. *raises:* ArgumentError: no such snapshot; TierError."""
        path = self._path(check_name(name), namespace)
        with self._errors("removed", name), self._locked():
            if not self._files.size(path):
                raise NoSnapshotError(f"expected the name of a snapshot, got {name!r} - in {self.folder}")
            is_aside = True
            try:
                self._files.rename(path, self._aside_path(name, namespace))
            except OSError:  # no room for a longer name in the folder
                self._files.remove(path)
                is_aside = False
            self._files.sync_folder(self.folder)
        return is_aside

    def set_aside(self, record: SnapshotRecord, namespace: bytes) -> None:
        """Writes a record as one set aside. *raises:* TierError."""
        with self._errors("set aside", record.name), self._locked():
            self._write_record(record, self._aside_path(record.name, namespace))

    def removed_snapshots(self, namespace: bytes) -> Iterator[tuple[Path, SnapshotRecord | None]]:
        """The snapshots of a namespace set aside: (path, record or None if damaged). *raises:* TierError."""
        prefix = f"{_REMOVED}{_tag(namespace)}-"
        with self._errors("listed"):
            names = [name for name in self._files.names(self.folder) if name.startswith(prefix)]
        for name in sorted(names):
            path = self.folder / name
            with self._errors("read", name):
                try:
                    found = _decoded(self._content(path), path)
                except FileNotFoundError:
                    continue  # another process has deleted it
                except LoadError:
                    found = None
            yield path, found

    def forget(self, path: Path) -> None:
        """Deletes a snapshot that was set aside. *raises:* TierError."""
        with self._errors("forgotten", path.name):
            self._files.remove(path)

    def num_bytes(self) -> int:
        """Bytes of all files here, those set aside too. *raises:* TierError."""
        with self._errors("measured"):
            return sum(
                self._files.size(self.folder / name)
                for name in self._files.names(self.folder)
                if name.startswith((_PREFIX, _REMOVED))
            )

    def _check_allowance(self, record: SnapshotRecord, path: Path, allowance: SnapshotAllowance) -> None:
        """Under the lock. *raises:* SnapshotsFullError."""
        count, num_tokens = 1, len(record.token_ids)
        for name in self._files.names(self.folder):
            if name.startswith(_PREFIX) and name != path.name:
                try:
                    other = _decoded(self._content(self.folder / name), self.folder / name)
                except LoadError:
                    continue
                if other.owner == record.owner:
                    count, num_tokens = count + 1, num_tokens + len(other.token_ids)
        for got, limit, unit in (
            (count, allowance.max_count, "snapshots"),
            (num_tokens, allowance.max_tokens, "tokens in snapshots"),
        ):
            if limit is not None and got > limit:
                raise SnapshotsFullError(
                    f"expected at most {limit} {unit} of one owner, got {got} with {record.name!r}; remove some"
                )

    def _path(self, name: str, namespace: bytes) -> Path:
        return self.folder / f"{_PREFIX}{_tag(namespace)}-{name}"

    def _write_record(self, record: SnapshotRecord, path: Path) -> None:
        """Under the lock."""
        # One temporary name: only the lock's holder writes, and overwrites the rest of a killed process.
        with AtomicFile(path, temporary=self.folder / _WRITING, calls=self._files) as file:
            file.write(_encoded(record))

    def _aside_path(self, name: str, namespace: bytes) -> Path:
        return self.folder / f"{_REMOVED}{_tag(namespace)}-{name}-{os.urandom(4).hex()}"

    def _content(self, path: Path) -> bytes:
        descriptor = self._files.open(path)
        try:
            buffer = memoryview(bytearray(self._files.size(path)))
            return bytes(buffer[: self._files.read_all(descriptor, buffer, 0)])
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other threads and processes from writing and removing snapshots here."""
        with closing(FileLock(self.folder / _LOCK, self._files, self._timeout_s)) as lock:
            lock.acquire(exclusive=True)
            yield

    @contextmanager
    def _errors(self, done: str, name: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            subject = "the snapshots" if name is None else f"the snapshot {name!r}"
            raise TierError(
                f"{subject} could not be {done} in {self.folder}: {error.strerror or error}"
            ) from error


def _tag(namespace: bytes) -> str:
    return hashlib.sha256(b"quire snapshot\0" + hashlib.sha256(namespace).digest()).hexdigest()[:16]


def _encoded(record: SnapshotRecord) -> bytes:
    fields: dict[str, Any] = {
        "name": record.name,
        "model": record.model,
        "fingerprint": record.fingerprint.hex(),
        "num_tokens": len(record.token_ids),
        "extra_keys": [[position, key.hex()] for position, key in sorted(record.extra_keys.items())],
        "made_at": record.made_at,
    }
    if record.owner:
        fields["owner"] = record.owner.hex()
    header = json.dumps(fields, sort_keys=True).encode()
    body = header + np.ascontiguousarray(record.token_ids, "<i4").tobytes()
    numbers = VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little")
    return _MAGIC + numbers + xxhash.xxh3_128_digest(numbers + body) + body


def _decoded(content: bytes, path: Path) -> SnapshotRecord:
    if len(content) < _FRONT or not content.startswith(_MAGIC):
        raise _refused(path, f"{len(content)} bytes that do not begin as one")
    version, length = (int.from_bytes(content[at : at + 4], "little") for at in (8, 12))
    if version != VERSION:
        raise _refused(path, f"one of version {version}, this is version {VERSION}")
    body = content[_FRONT:]
    if xxhash.xxh3_128_digest(content[8:16] + body) != content[16:_FRONT]:
        raise _refused(path, f"{len(content)} bytes whose checksum differs: damaged or cut short")
    if length > len(body):
        raise _refused(path, f"{len(body)} bytes with a header of {length}")
    try:
        header = json.loads(body[:length])
    except (ValueError, RecursionError):
        raise _refused(path, f"one with a header of {length} bytes that are no JSON") from None
    tokens = body[length:]
    num_tokens = _field(header, "num_tokens", int, path)
    if len(tokens) != 4 * num_tokens:
        raise _refused(path, f"one of {num_tokens} tokens with {len(tokens)} bytes of them")
    token_ids = np.frombuffer(tokens, "<i4").astype(np.int32)
    if num_tokens and int(token_ids.min()) < 0:
        raise _refused(path, f"one with the token {int(token_ids.min())}")
    name = _field(header, "name", str, path)
    if not _NAME.fullmatch(name):
        raise _refused(path, "one whose name cannot be a snapshot's")
    made_at = _field(header, "made_at", (int, float), path)
    if not 0 <= made_at < _LATEST:  # nor NaN
        raise _refused(path, "one with an invalid time")
    return SnapshotRecord(
        name=name,
        model=_field(header, "model", str, path),
        fingerprint=_from_hex(_field(header, "fingerprint", str, path), path),
        token_ids=token_ids,
        extra_keys=dict(
            _extra_key(entry, num_tokens, path) for entry in _field(header, "extra_keys", list, path)
        ),
        made_at=float(made_at),
        owner=_from_hex(_field(header, "owner", str, path), path) if "owner" in header else b"",
    )


def _field(header: Any, name: str, kind: type | tuple[type, ...], path: Path) -> Any:
    """A field of a header, whose type is checked."""
    value = header.get(name) if isinstance(header, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _refused(path, f"one whose header has no {name}, or none of its type")
    return value


def _extra_key(entry: Any, num_tokens: int, path: Path) -> tuple[int, bytes]:
    if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) is not int:
        raise _refused(path, "one with an extra key that is no position and text")
    position, key = entry
    if not 0 <= position < num_tokens or not isinstance(key, str):
        raise _refused(path, f"one with an extra key that is at none of its {num_tokens} tokens")
    return position, _from_hex(key, path)


def _from_hex(text: str, path: Path) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise _refused(path, "one whose header has other text where hex is expected") from None


def _refused(path: Path, reason: str) -> LoadError:
    return LoadError(f"expected a snapshot, got {reason} - in {path}; remove it")
