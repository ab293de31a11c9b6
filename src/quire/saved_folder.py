"""The folder that saves packed weights from one start to the next: its owner, its size limit, the order of deletion.

    packed_weights   "auto": `default_folder`, weights/ in the user's cache; "off": none; or a folder
    a file           written by `quire.weights.saved_weights` or `quire.model.prove.saved_proof`, with a name of
                     <32 hex digits>.packed or .proof; other files in the folder are neither counted nor removed

Not here: the content of a file, and when it may be used.

Invariants
    D1  a file is read only if it is the user's own, and written only into a folder of the user's own.
    D2  before a file is written the least recently used files are removed, until all take at most `max_bytes` and the
        disk has as much free beyond the new file as the new file takes. If that is impossible, no file is removed or
        written. Files that this object has opened stay; a process that maps a removed file keeps its pages.
    D3  the folder of "auto" is created when a file is written into it. If it cannot be used, for whatever reason, that
        is one warning; for a named folder it is an ArgumentError.

Cost: a listing of the folder for each file that is written, and one after it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire.atomic_file import UNFINISHED
from quire.errors import ArgumentError
from quire.sizes import format_size

__all__ = ["DEFAULT_MAX_BYTES", "VARIABLE", "SavedFile", "SavedFolder", "default_folder", "sources_of"]

VARIABLE = "QUIRE_PACKED_WEIGHTS"  # of the environment: the meaning of "auto", "off" or a folder
DEFAULT_MAX_BYTES = 32 << 30
_MIN_BYTES = 1 << 20  # of a file in the folder of "auto": a smaller one saves a start almost no time
_UNLOCKED_S = 60  # after this time a file that is being written is locked
_NAME = re.compile(r"[0-9a-f]{32}\.(packed|proof)")
_WRITTEN = re.compile(rf"\.[0-9a-f]{{32}}\.(packed|proof)\.[0-9a-f]+{re.escape(UNFINISHED)}")

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class SavedFile:
    """used_at: seconds since 1970 of the last write or mapping by a start. is_whole: whether it is finished."""

    path: Path
    num_bytes: int
    used_at: float
    is_whole: bool


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """weights/ in Quire's part of the user's cache. *raises:* RuntimeError: the user has no home."""
    base = environment.get("XDG_CACHE_HOME", "")
    cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return cache / "quire" / "weights"


class SavedFolder:
    """max_bytes: of all files in it. min_bytes: smaller files are not saved. For one start."""

    def __init__(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES, *, min_bytes: int = 0) -> None:
        self.path = path
        self._max_bytes, self._min_bytes = max_bytes, min_bytes
        self._opened: set[str] = set()  # names
        self._failed = False

    @classmethod
    def from_option(cls, option: str | os.PathLike[str], max_bytes: int | None = None) -> SavedFolder | None:
        """The folder of the engine's option `packed_weights`; None for "off".

        *raises:* ArgumentError: a named folder that is another user's, or that neither exists nor can be created.
        """
        where = "`packed_weights`"
        if option == "auto" and os.environ.get(VARIABLE, "auto") not in ("auto", ""):
            option, where = os.environ[VARIABLE], f"${VARIABLE}"
        max_bytes = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        if option == "off":
            return None
        if option == "auto":
            try:
                return cls(default_folder(), max_bytes, min_bytes=_MIN_BYTES)
            except RuntimeError as error:
                _log.warning("packed weights are not saved: %s", error)
                return None
        folder = cls(Path(option).expanduser(), max_bytes)
        try:
            folder._make()
        except OSError as error:
            raise ArgumentError(
                f"expected a folder that exists or can be created, got {str(option)!r} ({error.strerror}) - in {where}"
            ) from error
        return folder

    @classmethod
    def existing(cls, option: str = "auto") -> SavedFolder:
        """The folder that `from_option` would use; creates nothing. *raises:* ArgumentError: a named folder that does
        not exist, or is another user's."""
        if option == "auto":
            option = os.environ.get(VARIABLE) or "auto"
        is_named = option not in ("auto", "off")
        try:
            folder = cls(Path(option).expanduser() if is_named else default_folder())
            if is_named or folder.path.exists():
                _require_own(os.stat(folder.path), folder.path)
                folder.files()
        except (OSError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ArgumentError(
                f"expected a folder of saved weights, got none ({why}) - in {option}"
            ) from error
        return folder

    def is_worth_saving(self, num_bytes: int) -> bool:
        """Whether a file of that size is worth saving: a small one only next to a large one of the same start."""
        return num_bytes >= self._min_bytes or bool(self._opened)

    def open(self, path: Path) -> BinaryIO:
        """Open a file of this folder for reading; it counts as used now. *raises:* OSError: it does not exist, or is
        another user's."""
        file = path.open("rb")
        try:
            _require_own(os.fstat(file.fileno()), path)
        except BaseException:
            file.close()
            raise
        self._opened.add(path.name)
        with suppress(OSError):  # a read-only file system
            os.utime(file.fileno())
        return file

    def make_room(self, num_bytes: int) -> None:
        """Create the folder if needed, and make room for a file of that size.

        *raises:* OSError: it cannot be created, is another user's, or has no room; no file was removed then.
        """
        self._make()
        self._remove_abandoned()
        files = self.files()
        taken, free = sum(file.num_bytes for file in files) + num_bytes, self._free_bytes() - num_bytes
        to_remove: list[SavedFile] = []
        for file in sorted(files, key=lambda file: file.used_at):
            if taken <= self._max_bytes and free >= num_bytes:
                break
            if file.is_whole and file.path.name not in self._opened:
                to_remove.append(file)
                taken, free = taken - file.num_bytes, free + file.num_bytes
        if taken > self._max_bytes:
            others = f" and {format_size(taken - num_bytes)} in use" if taken > num_bytes else ""
            raise OSError(
                errno.ENOSPC,
                f"{format_size(num_bytes)}{others} is more than the {format_size(self._max_bytes)} that it may take",
            )
        if free < num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{format_size(num_bytes)} would leave less than that free of the disk",
            )
        for file in to_remove:
            with suppress(FileNotFoundError):  # another process has removed it
                file.path.unlink()

    def limit_size(self) -> None:
        """Keep to `max_bytes` after several processes have written at once."""
        with suppress(OSError):
            self.make_room(0)

    def add_saved(self, path: Path) -> None:
        """Record that this start has written the file `path`."""
        self._opened.add(path.name)
        self.limit_size()

    def warn_not_saved(self, data: str, error: OSError) -> None:
        """Warn at the first failure that `data` ("packed weights are") is not saved."""
        if not self._failed:
            self._failed = True
            _log.warning(
                "%s not saved in %s (%s); the next start makes them again. Set packed_weights to another folder, or to "
                '"off"',
                data,
                self.path,
                error.strerror or error,
            )

    def files(self) -> list[SavedFile]:
        """This user's files, including unfinished ones. *raises:* OSError: the folder cannot be read."""
        files: list[SavedFile] = []
        if not self.path.exists():
            return files
        with os.scandir(self.path) as entries:
            for entry in entries:
                is_whole = _NAME.fullmatch(entry.name) is not None
                if not is_whole and _WRITTEN.fullmatch(entry.name) is None:
                    continue
                with suppress(OSError):  # it was removed since
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        path = self.path / entry.name
                        files.append(SavedFile(path, status.st_size, status.st_mtime, is_whole))
        return files

    def clear(self) -> list[SavedFile]:
        """Remove all finished files, and return them. *raises:* OSError."""
        whole = [file for file in self.files() if file.is_whole]
        for file in whole:
            file.path.unlink(missing_ok=True)
        return whole

    def _make(self) -> None:
        if os.geteuid() == 0:  # in the home of another user, as under sudo, root creates no file
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
            _require_own(os.stat(existing), existing)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        _require_own(os.stat(self.path), self.path)

    def _remove_abandoned(self) -> None:
        """Removes the unfinished files of processes that have ended, whose locks are free."""
        for file in self.files():
            if not file.is_whole and time.time() - file.used_at > _UNLOCKED_S:
                with suppress(OSError), file.path.open("rb") as opened:
                    fcntl.flock(opened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.path.unlink()

    def _free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def sources_of(path: Path) -> tuple[list[str], list[str]]:
    """(source files, layouts) in the header of packed weights; empty for a file without a header."""
    try:
        with path.open("rb") as file:
            file.readline(64)
            header = json.loads(file.readline())
        return sorted({str(source[0]) for source in header["files"]}), sorted(header["layouts"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return [], []


def _require_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}", str(path)
        )
