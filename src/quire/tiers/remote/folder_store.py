"""The store in a folder that several machines share, such as one of NFS.

    folder:///PATH?size=64GiB

    PATH/quire-kv-1/<2 digits>/<key, hex>.kv    a record, see `record`

A file appears under its name complete: it is written under another name and renamed. There are no locks, so a machine
that dies leaves none. A half-written file that it leaves is never read, and is removed after an hour. New files have
the access rights of PATH without those to execute; a PATH that is made has rights for its owner only. Files are not
synced: a value that a power failure damages is found by its checksum.

Times are the file system's: a clock's difference from it is measured at each file written. mtime is the time of the
store, for `ttl_s`; atime the time of the last use, put back by 1 ms a token of the position, so that a chain's tail is
evicted before its head. It is renewed after 10 minutes.

`size` caps all files together, by `folder_sweep`. All writers should give the same; the smallest holds.

Cost: `exists` one stat a key, up to 8 at once; `get` one open and read; `put` one write and a rename.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from quire.atomic_file import UNFINISHED
from quire.errors import ArgumentError
from quire.tiers.remote.folder_files import FolderFiles
from quire.tiers.remote.folder_sweep import FolderSweep, key_of, subfolders
from quire.tiers.remote.limited_socket import Allowance
from quire.tiers.remote.record import pack, start_of, unpack
from quire.tiers.remote.store_protocol import Record, StoredItem
from quire.tiers.remote.store_url import parse_option_size, take_options
from quire.tiers.remote.timed_calls import TimedCalls

__all__ = ["FolderStore"]

_NUM_THREADS = 8
_USE_S = 600.0
_LATER_S = 1e-3  # a token of the position
_SIZE_BYTES = 64 << 30
_MIN_SIZE_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class FolderStore:
    """See the module's text, and `store_protocol.Store`. clock: this machine's, seconds since 1970.

    *raises:* ArgumentError: an invalid URL.
    """

    timeout_s = 5.0
    max_value_bytes: int | None = None
    time_outs: tuple[type[Exception], ...] = (TimeoutError,)

    def __init__(
        self,
        url: str,
        allowance: Allowance,
        ttl_s: float | None = None,
        *,
        files: FolderFiles | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        place, options = take_options(url, ("size",))
        path = unquote(place.partition("://")[2])
        if not path.startswith("/") or "\0" in path:
            raise ArgumentError(
                f"expected folder:///PATH with an absolute path, got {place!r} - in `remote_cache`"
            )
        size = parse_option_size(options, "size") or _SIZE_BYTES
        if size < _MIN_SIZE_BYTES:
            raise ArgumentError(
                f"expected a size of at least 16MiB, got {options['size']} - in `remote_cache`"
            )
        self.where = path
        self._root = Path(path)
        self._values = self._root / "quire-kv-1"
        self._allowance = allowance
        self._ttl_s = ttl_s
        self._files = files or FolderFiles()
        self._clock = clock
        self._ahead_s = 0.0  # of the file system's clock, compared with this machine's
        self._calls = TimedCalls("quire-tier-folder", _NUM_THREADS, allowance)
        self._sweep = FolderSweep(self._values, size, ttl_s, self._files, self._now)

    def ping(self) -> None:
        """Measures the file system's clock; a folder that may only be read is read, by this machine's clock."""
        self._calls.run([self._ping])

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        states = self._calls.run([partial(self._state, key) for key in keys])
        return [state is not None for state in states]

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        return self._calls.run([partial(self._get, key) for key in keys])

    def refresh(self, key: bytes) -> bool:
        """A value that has half of its time to live behind it is stored again."""
        [state] = self._calls.run([partial(self._state, key)])
        if state is None:
            return False
        return self._ttl_s is None or 2 * (self._now() - state.st_mtime) < self._ttl_s

    def put(self, key: bytes, record: Record) -> bool:
        parts = pack(record)
        [is_stored] = self._calls.run([partial(self._put, key, parts, start_of(record.info))])
        return is_stored

    def delete(self, key: bytes) -> bool:
        [was_there] = self._calls.run([partial(self._delete, key)])
        return was_there

    def scan(self) -> Iterator[StoredItem]:
        for folder in subfolders(self._values):
            for name, state in self._files.entries(folder):
                key = key_of(name)
                if key is not None:
                    yield StoredItem(key, state.st_size, max(0.0, self._now() - state.st_mtime))

    def is_refusal(self, error: Exception) -> bool:
        return getattr(error, "errno", None) in _FULL

    def explain_error(self, error: Exception) -> str:
        number = getattr(error, "errno", None)
        text = f"[Errno {number}] {os.strerror(number)}" if number else str(error) or type(error).__name__
        if number in (errno.ENOSPC, errno.EDQUOT):
            return f"{text}; give the folder more room, or its URL a smaller size"
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{text}; give this user the right to read and write there"
        if number == errno.ENOENT:
            return f"{text}; make the folder above it, or mount its file system"
        if number == errno.ESTALE:
            return f"{text}; mount the file system again"
        return text

    def reset(self) -> None: ...

    def close(self) -> None:
        self._sweep.close()
        self._calls.close()

    def _now(self) -> float:
        return self._clock() + self._ahead_s

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._values / name[:2] / f"{name}.kv"

    def _ping(self) -> None:
        probe = self._values / f".{os.urandom(8).hex()}{UNFINISHED}"
        try:
            self._write(probe, [memoryview(b"quire")])
            self._files.remove(probe)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self._files.names(self._root)

    def _state(self, key: bytes) -> os.stat_result | None:
        """The state of a value's file; None: it is not there, or has expired."""
        state = self._files.state(self._path(key))
        return None if state is None or self._is_expired(state) else state

    def _is_expired(self, state: os.stat_result) -> bool:
        return self._ttl_s is not None and self._now() - state.st_mtime >= self._ttl_s

    def _get(self, key: bytes) -> Record | None:
        path = self._path(key)
        try:
            data, state = self._files.read(path, self._allowance.bytes_left())
        except FileNotFoundError:
            return None
        if self._is_expired(state):
            with suppress(OSError):
                self._files.remove(path)
            return None
        record = unpack(data)
        used_at = self._now() - _LATER_S * start_of(record.info)
        if used_at > state.st_atime + _USE_S:
            with suppress(OSError):  # not the owner, or read-only
                self._files.set_times(path, used_at, state.st_mtime)
        return record

    def _put(self, key: bytes, parts: Sequence[memoryview], start: int) -> bool:
        num_bytes = sum(part.nbytes for part in parts)
        if not self._sweep.has_room(num_bytes):
            return False
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}{UNFINISHED}")
        try:
            state = self._write(temporary, parts)
            self._files.set_times(temporary, state.st_mtime - _LATER_S * start, state.st_mtime)
            self._files.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._files.remove(temporary)
            raise
        self._sweep.add(num_bytes)
        return True

    def _write(self, path: Path, parts: Sequence[memoryview]) -> os.stat_result:
        """Writes a new file, and measures the clock of the file system."""
        mode = self._mode() & 0o666
        try:
            descriptor = self._files.make(path, mode)
        except FileNotFoundError:
            self._make_folders(path.parent)
            descriptor = self._files.make(path, mode)
        state = self._files.write_close(descriptor, parts)
        self._ahead_s = state.st_mtime - self._clock()
        return state

    def _delete(self, key: bytes) -> bool:
        path = self._path(key)
        was_there = self._files.state(path) is not None
        self._files.remove(path)
        return was_there

    def _make_folders(self, path: Path) -> None:
        """Makes a folder, and those above it up to PATH itself, with PATH's rights."""
        if path == self._root:
            # Not the folders above: without its mount the path would be one of this machine's disk.
            self._files.make_folder(path, 0o700)
        elif self._files.state(path) is None:
            self._make_folders(path.parent)
            self._files.make_folder(path, self._mode())

    def _mode(self) -> int:
        state = self._files.state(self._root)
        return 0o700 if state is None else state.st_mode & 0o2777
