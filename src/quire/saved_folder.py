"""The folder that keeps packed weights from one start to the next: whose it is, how much it takes, what goes first.

    packed_weights   "auto": `default_folder`, weights/ in the user's cache; "off": none; or a folder
    a file           as `quire.model.saved_weights` and `quire.model.saved_proof` write it, of the name
                     <32 hex digits>.packed or .proof; nothing else in the folder is counted or removed

Not here: what a file holds, and when it may be used.

Invariants
    D1  a file is read only if it is the user's own, and written only into a folder that is.
    D2  before a file is written those used longest ago go, until all take at most `max_bytes` and the disk has as much
        free beyond the new file as that takes. Where that cannot be, nothing goes and nothing is written. What this
        object has opened stays; a process that has a removed file mapped keeps its pages.
    D3  the folder of "auto" is made when a file is written into it. One that cannot be used is one warning, whatever
        is wrong with it; of a folder that was named it is an ArgumentError.

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

VARIABLE = "QUIRE_PACKED_WEIGHTS"  # of the environment: what "auto" means, "off" or a folder
DEFAULT_MAX_BYTES = 32 << 30
_LEAST_BYTES = 1 << 20  # of a file in the folder of "auto": a smaller one saves a start next to nothing
_UNLOCKED_S = 60  # a file that is being written is locked by then
_NAME = re.compile(r"[0-9a-f]{32}\.(packed|proof)")
_WRITTEN = re.compile(rf"\.[0-9a-f]{{32}}\.(packed|proof)\.[0-9a-f]+{re.escape(UNFINISHED)}")

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class SavedFile:
    """used_at: seconds since 1970, when a start wrote or mapped it last."""

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
    """max_bytes: of all files in it. least_bytes: smaller files are not kept. For one start."""

    def __init__(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES, *, least_bytes: int = 0) -> None:
        self.path = path
        self._max_bytes, self._least_bytes = max_bytes, least_bytes
        self._opened: set[str] = set()  # names
        self._failed = False

    @classmethod
    def of(cls, option: str | os.PathLike[str], max_bytes: int | None = None) -> SavedFolder | None:
        """What the engine's option `saved_weights` says; None where nothing is kept.

        *raises:* ArgumentError: a named folder that is another user's, or neither is there nor can be made.
        """
        where = "`saved_weights`"
        if option == "auto" and os.environ.get(VARIABLE, "auto") not in ("auto", ""):
            option, where = os.environ[VARIABLE], f"${VARIABLE}"
        most = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        if option == "off":
            return None
        if option == "auto":
            try:
                return cls(default_folder(), most, least_bytes=_LEAST_BYTES)
            except RuntimeError as error:
                _log.warning("packed weights are not kept: %s", error)
                return None
        folder = cls(Path(option).expanduser(), most)
        try:
            folder._make()
        except OSError as error:
            raise ArgumentError(
                f"expected a folder that is there or can be made, got {str(option)!r} ({error.strerror}) - in {where}"
            ) from error
        return folder

    @classmethod
    def there(cls, option: str = "auto") -> SavedFolder:
        """The one that `of` would use, which makes nothing. *raises:* ArgumentError: a named one that is not there, or
        another user's."""
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
                f"expected a folder of kept weights, got none ({why}) - in {option}"
            ) from error
        return folder

    def keeps(self, num_bytes: int) -> bool:
        """Whether a file of that size is worth keeping here: a small one is beside a large one of the same start."""
        return num_bytes >= self._least_bytes or bool(self._opened)

    def open(self, path: Path) -> BinaryIO:
        """A file of this folder, to read; it counts as used now. *raises:* OSError: none, or another user's."""
        file = path.open("rb")
        try:
            _require_own(os.fstat(file.fileno()), path)
        except BaseException:
            file.close()
            raise
        self._opened.add(path.name)
        with suppress(OSError):  # a file system that takes no writes
            os.utime(file.fileno())
        return file

    def make_room(self, num_bytes: int) -> None:
        """Have the folder be there, with room for a file of that size.

        *raises:* OSError: it cannot be made, is another user's, or has no room; nothing was removed then.
        """
        self._make()
        self._remove_abandoned()
        files = self.files()
        taken, free = sum(file.num_bytes for file in files) + num_bytes, self._free_bytes() - num_bytes
        gone: list[SavedFile] = []
        for file in sorted(files, key=lambda file: file.used_at):
            if taken <= self._max_bytes and free >= num_bytes:
                break
            if file.is_whole and file.path.name not in self._opened:
                gone.append(file)
                taken, free = taken - file.num_bytes, free + file.num_bytes
        if taken > self._max_bytes:
            others = f" beside {format_size(taken - num_bytes)} in use" if taken > num_bytes else ""
            raise OSError(
                errno.ENOSPC,
                f"{format_size(num_bytes)}{others} is more than the {format_size(self._max_bytes)} that it may take",
            )
        if free < num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{format_size(num_bytes)} would leave less than that free of the disk",
            )
        for file in gone:
            with suppress(FileNotFoundError):  # another process was quicker
                file.path.unlink()

    def settle(self) -> None:
        """Keep to `max_bytes` where several processes have written at once."""
        with suppress(OSError):
            self.make_room(0)

    def written(self, path: Path) -> None:
        """Have it known that this start has the file `path` there."""
        self._opened.add(path.name)
        self.settle()

    def tell(self, what: str, error: OSError) -> None:
        """One warning of the first failure; `what` is not kept."""
        if not self._failed:
            self._failed = True
            _log.warning(
                "%s not kept in %s (%s); the next start makes them again. packed_weights names another folder, or "
                '"off"',
                what,
                self.path,
                error.strerror or error,
            )

    def files(self) -> list[SavedFile]:
        """Those of this user, with those that are being written. *raises:* OSError: the folder cannot be read."""
        found: list[SavedFile] = []
        if not self.path.exists():
            return found
        with os.scandir(self.path) as entries:
            for entry in entries:
                is_whole = _NAME.fullmatch(entry.name) is not None
                if not is_whole and _WRITTEN.fullmatch(entry.name) is None:
                    continue
                with suppress(OSError):  # gone meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        path = self.path / entry.name
                        found.append(SavedFile(path, status.st_size, status.st_mtime, is_whole))
        return found

    def clear(self) -> list[SavedFile]:
        """Remove all that is whole, which is returned. *raises:* OSError."""
        whole = [file for file in self.files() if file.is_whole]
        for file in whole:
            file.path.unlink(missing_ok=True)
        return whole

    def _make(self) -> None:
        if os.geteuid() == 0:  # in the home of another user, as under sudo, it leaves no file of its own
            there = next(path for path in (self.path, *self.path.parents) if path.exists())
            _require_own(os.stat(there), there)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        _require_own(os.stat(self.path), self.path)

    def _remove_abandoned(self) -> None:
        """Removes the unfinished files of processes that have ended: their locks are free."""
        for file in self.files():
            if not file.is_whole and time.time() - file.used_at > _UNLOCKED_S:
                with suppress(OSError), file.path.open("rb") as opened:
                    fcntl.flock(opened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.path.unlink()

    def _free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def sources_of(path: Path) -> tuple[list[str], list[str]]:
    """(source files, layouts) that the header of packed weights names; of a file without one none."""
    try:
        with path.open("rb") as file:
            file.readline(64)
            said = json.loads(file.readline())
        return sorted({str(source[0]) for source in said["files"]}), sorted(said["layouts"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return [], []


def _require_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}", str(path)
        )
