"""An atomic file replaces the old file as a whole or leaves it unchanged, whichever call fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.atomic_file import AtomicFile, FileCalls


class Narrow(FileCalls):
    """Writes three bytes at most at a time, as the system may."""

    def write(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return super().write(descriptor, [parts[0][:3]], offset)


@pytest.mark.parametrize("calls", [FileCalls(), Narrow()])
def test_it_is_there_at_the_end(tmp_path: Path, calls: FileCalls) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a longer file of before")
    with AtomicFile(path, calls=calls) as file:
        file.write(b"")
        file.write(b"head, ")
        file.write(b"tail", 8)
        file.write(b"body", 4)
        file.write(memoryview(b"end."))
        assert path.read_bytes() == b"a longer file of before"
    assert path.read_bytes() == b"headbodyend."
    assert os.listdir(tmp_path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("beside", [None, "beside"])
@pytest.mark.parametrize("name", ["open", "write", "sync", "rename", "sync_folder", "our own"])
def test_what_fails_leaves_the_old_file_or_the_new_one(tmp_path: Path, name: str, beside: str | None) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "made to fail")

    calls = FileCalls()
    setattr(calls, name, fail)
    before = os.listdir("/proc/self/fd")

    def save() -> None:
        with AtomicFile(path, temporary=tmp_path / beside if beside else None, calls=calls) as file:
            file.write(b"new")
            if name == "our own":
                fail()

    with pytest.raises(OSError, match="made to fail"):
        save()
    assert path.read_bytes() == (b"new" if name == "sync_folder" else b"old")
    assert os.listdir(tmp_path) == ["file"]
    assert len(os.listdir("/proc/self/fd")) == len(before)
