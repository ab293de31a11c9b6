"""The system calls of a shared folder, in one class, so that tests can make each of them fail or hang."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from quire.atomic_file import FileCalls

__all__ = ["FolderFiles"]


class FolderFiles(FileCalls):
    """The real calls. *raises:* OSError."""

    def make_folder(self, path: Path, mode: int) -> None:
        """Makes the folder, with exactly this mode, if it is not there."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return
        os.chmod(path, mode)

    def make(self, path: Path, mode: int) -> int:
        """A descriptor of a new file with exactly this mode."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        os.fchmod(descriptor, mode)
        return descriptor

    def write_close(self, descriptor: int, parts: Sequence[memoryview]) -> os.stat_result:
        """Writes the parts and closes the file: a file system of another machine may report only then that it is
        full."""
        try:
            self.write_all(descriptor, parts, 0)
            state = os.fstat(descriptor)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        os.close(descriptor)
        return state

    def read(self, path: Path, max_bytes: int) -> tuple[bytearray, os.stat_result]:
        """A file's bytes, and its state. *raises:* FileNotFoundError; OSError, also for more than `max_bytes`."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags | os.O_NOATIME)
        except PermissionError:  # only a file's owner may read without a change of its time
            descriptor = os.open(path, flags)
        try:
            state = os.fstat(descriptor)
            if state.st_size > max_bytes:
                raise OSError(f"a file of {state.st_size} bytes, more than any value has")
            data = bytearray(state.st_size)
            with memoryview(data) as rest:
                done = 0
                while done < len(data) and (count := os.preadv(descriptor, [rest[done:]], done)):
                    done += count
            del data[done:]  # it was cut short meanwhile
            return data, state
        finally:
            os.close(descriptor)

    def state(self, path: Path) -> os.stat_result | None:
        """None: it is not there."""
        try:
            return os.stat(path)
        except FileNotFoundError:
            return None

    def set_times(self, path: Path, used_at: float, stored_at: float) -> None:
        os.utime(path, (used_at, stored_at))

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def entries(self, path: Path) -> Iterator[tuple[str, os.stat_result]]:
        """Name and state of each file in a folder; nothing if it is not there."""
        try:
            listing = os.scandir(path)
        except FileNotFoundError:
            return
        with listing:
            for entry in listing:
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile
                    continue
                yield entry.name, state
