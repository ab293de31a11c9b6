"""The folder of saved weights: its owner, its size, its order of eviction; and what an engine saves by default."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import quire.saved_folder
from quire import LLM
from quire.atomic_file import FileCalls
from quire.backends import extension
from quire.cli.main import app
from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.memory import device_memory, free_memory
from quire.saved_folder import VARIABLE, SavedFolder, default_folder
from quire.weights.codes import QuantizedWeight

needs_extension = pytest.mark.skipif(extension(None) is None, reason="without the extension nothing is kept")
_KIB = 1024


def _name(number: int, suffix: str = "packed") -> str:
    return f"{number:032x}.{suffix}"


def _write(folder: Path, number: int, num_bytes: int, used_at: float, suffix: str = "packed") -> Path:
    path = folder / _name(number, suffix)
    path.write_bytes(b"x" * num_bytes)
    os.utime(path, (used_at, used_at))
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is in `tmp_path`, and packed weights are kept there; the folder, which is not there yet."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "weights"


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each weight that is made of codes while the test runs."""
    made: list[int] = []
    check = QuantizedWeight.__post_init__

    def count(self: QuantizedWeight) -> None:
        made.extend([1] * (self.num_outputs > 1))
        check(self)

    monkeypatch.setattr(QuantizedWeight, "__post_init__", count)
    return made


# -- what an engine keeps ----------------------------------------------------------------------------


@needs_extension
def test_the_second_start_of_int4_rounds_nothing_though_no_folder_was_named(
    home: Path, rounded: list[int]
) -> None:
    answers = []
    for _ in range(2):
        with LLM(weights="int4", kv_memory="1MiB") as llm:
            answers.append(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids)
        num_rounded = len(rounded)
        rounded.clear()
        assert len(list(home.glob("*.packed"))) == 1
    assert num_rounded == 0
    assert answers[0] == answers[1]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}


@needs_extension
@pytest.mark.parametrize("way", ["option", "variable", "python"])
def test_off_keeps_nothing(
    home: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"option": {"packed_weights": "off"}, "python": {"backend": "python"}}.get(
        way, {}
    )
    if way == "variable":
        monkeypatch.setenv(VARIABLE, "off")
    with caplog.at_level(logging.WARNING, logger="quire"), LLM(kv_memory="1MiB", weights="int4", **options):
        pass
    assert not home.parent.exists()
    assert caplog.records == []


@needs_extension
def test_the_variable_names_a_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "there"))
    with LLM(kv_memory="1MiB"):
        pass
    assert list((tmp_path / "there").glob("*.packed"))
    assert not home.parent.exists()


@needs_extension
@pytest.mark.parametrize("call", ["open", "write", "sync", "rename"])
def test_a_file_system_that_takes_nothing_costs_a_start_one_line(
    home: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(FileCalls, call, refuse)
    formats = {"*.mlp.*": "int4", "*": "bf16"}  # codes, and 16 bits beside them: two files
    caplog.set_level(logging.WARNING, logger="quire")
    with LLM(kv_memory="1MiB", weights=formats, head="bf16") as llm:
        llm.generate([[1, 2, 3]])
    [said] = [record.message for record in caplog.records]
    assert f"not saved in {home} (Read-only file system)" in said
    assert _names(home) == []


@needs_extension
def test_the_folder_of_another_user_is_one_line_by_default_and_refused_by_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home.mkdir(parents=True)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with caplog.at_level(logging.WARNING, logger="quire"), LLM(kv_memory="1MiB"):
        pass
    [said] = [record.message for record in caplog.records]
    assert f"not saved in {home} (it belongs to user {own}, and this is user {own + 1})" in said
    assert _names(home) == []
    with pytest.raises(ArgumentError, match=rf"belongs to user {own}, .* - in `packed_weights`"):
        LLM(packed_weights=tmp_path)


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, 1, 10, 5)
    folder = SavedFolder(tmp_path)
    assert folder.open(path).read() == b"x" * 10
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError):
        SavedFolder(tmp_path).open(path)


def test_a_small_file_is_not_worth_a_place_in_the_users_cache_but_beside_a_large_one(home: Path) -> None:
    by_default, named = SavedFolder.from_option("auto"), SavedFolder.from_option(str(home))
    assert by_default is not None
    assert named is not None
    assert (by_default.path, by_default.is_worth_saving(_KIB), by_default.is_worth_saving(1 << 20)) == (
        home,
        False,
        True,
    )
    assert named.is_worth_saving(1)
    by_default.open(_write(home, 1, 10, 5)).close()
    assert by_default.is_worth_saving(1)


def test_the_users_cache_is_where_the_desktop_says() -> None:
    assert default_folder({"XDG_CACHE_HOME": "/there"}) == Path("/there/quire/weights")
    for relative in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "here"}):  # which is to be ignored
        assert default_folder(relative) == Path.home() / ".cache" / "quire" / "weights"


def test_a_user_without_a_home_keeps_nothing_which_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert SavedFolder.from_option("auto") is None
    assert [record.message for record in caplog.records] == [
        "packed weights are not saved: Could not determine home directory."
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="a file system's owner")
def test_root_leaves_nothing_in_the_cache_of_the_user_whose_home_it_was_given(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.parents[1].mkdir()
    owner = os.stat(home.parents[1])
    other = SimpleNamespace(st_uid=1000, st_mode=owner.st_mode)
    real = os.stat
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(
            quire.saved_folder.os,
            "stat",
            lambda path, **how: other if path == home.parents[1] else real(path, **how),
        )
        folder = SavedFolder.from_option("auto")
        assert folder is not None
        with pytest.raises(PermissionError, match="belongs to user 1000"):
            folder.make_room(10)
    assert not home.parent.exists()


@pytest.mark.parametrize("value", [None, 5, "", " ", True])
def test_what_is_no_folder_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"expected auto, off or a folder, got .* - in `packed_weights`"):
        EngineConfig(packed_weights=value)


def test_a_size_without_a_folder_is_refused() -> None:
    assert EngineConfig(packed_weights_size="1GiB").packed_weights == "auto"
    with pytest.raises(ArgumentError, match="packed_weights_size"):
        EngineConfig(packed_weights_size="1GiB", packed_weights="off")


@needs_extension
def test_an_engine_keeps_to_the_size_that_it_is_given(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(kv_memory="1MiB", packed_weights_size="2MiB"):
        pass
    assert _names(home) == []
    [said] = [record.message for record in caplog.records if "not saved" in record.message]
    assert "is more than the 2MiB that it may take" in said


# -- what goes ---------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first_and_what_this_start_uses_stays(tmp_path: Path) -> None:
    for number in range(4):
        _write(tmp_path, number, 10 * _KIB, 100 + number, "proof" if number == 1 else "packed")
    (tmp_path / "mine.packed").write_bytes(b"x" * 50 * _KIB)  # not ours
    folder = SavedFolder(tmp_path, 40 * _KIB)
    folder.open(tmp_path / _name(0)).close()  # the oldest
    folder.make_room(20 * _KIB)
    assert _names(tmp_path) == [_name(0), _name(3), "mine.packed"]
    os.utime(tmp_path / _name(0), (1, 1))
    folder.make_room(30 * _KIB)
    assert _names(tmp_path) == [_name(0), "mine.packed"]
    with pytest.raises(OSError, match=r"31KiB and 10KiB in use is more than the 40KiB"):
        folder.make_room(31 * _KIB)
    SavedFolder(tmp_path, 40 * _KIB).make_room(31 * _KIB)  # another start
    assert _names(tmp_path) == ["mine.packed"]


def test_what_cannot_fit_removes_nothing(tmp_path: Path) -> None:
    _write(tmp_path, 1, 10 * _KIB, 5)
    with pytest.raises(OSError, match=r"50KiB is more than the 40KiB that it may take"):
        SavedFolder(tmp_path, 40 * _KIB).make_room(50 * _KIB)
    assert _names(tmp_path) == [_name(1)]


@pytest.mark.parametrize(
    ("free", "left"), [(60, [1, 2]), (59, [2]), (50, [2]), (49, []), (40, []), (39, None)]
)  # KiB
def test_as_much_of_the_disk_stays_free_as_a_file_takes(
    tmp_path: Path, free: int, left: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        _write(tmp_path, number, 10 * _KIB, number)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=_KIB))
    if left is None:
        with pytest.raises(OSError, match="30KiB would leave less than that free of the disk"):
            SavedFolder(tmp_path).make_room(30 * _KIB)
        left = [1, 2]
    else:
        SavedFolder(tmp_path).make_room(30 * _KIB)
    assert _names(tmp_path) == [_name(number) for number in left]


def test_what_others_are_writing_counts_and_stays(tmp_path: Path) -> None:
    partial = tmp_path / f".{_name(7)}.0123456789abcdef.partial"
    partial.write_bytes(b"x" * 25 * _KIB)
    os.utime(partial, (1, 1))
    writer = partial.open("rb")
    fcntl.flock(writer, fcntl.LOCK_EX)
    _write(tmp_path, 1, 10 * _KIB, 5)
    folder = SavedFolder(tmp_path, 40 * _KIB)
    folder.make_room(10 * _KIB)
    assert _names(tmp_path) == [partial.name]
    _write(tmp_path, 2, 20 * _KIB, 6)  # another process has been as quick
    folder.add_saved(_write(tmp_path, 3, 10 * _KIB, 4))
    assert _names(tmp_path) == [partial.name, _name(3)]
    writer.close()  # its process ended before it was whole
    folder.make_room(10 * _KIB)
    assert _names(tmp_path) == [_name(3)]


def test_a_file_that_is_read_counts_as_used(tmp_path: Path) -> None:
    path = _write(tmp_path, 1, 10, 5)
    SavedFolder(tmp_path).open(path).close()
    assert path.stat().st_mtime > 1e9


# -- what is seen of it --------------------------------------------------------------------------------


@needs_extension
def test_the_command_lists_and_clears(home: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["cache", "weights", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert run() == f"0 files, 0B in {home}\n"
    with LLM(weights="int4", kv_memory="1MiB"):
        pass
    listed = json.loads(run("--json"))
    [packed] = [file for file in listed["files"] if file["name"].endswith(".packed")]
    assert packed["layouts"] == ["codes"]
    assert [Path(source).name for source in packed["sources"]] == ["model.safetensors"]
    assert packed["bytes"] == (home / packed["name"]).stat().st_size
    assert "codes of " in run(str(home))
    (home / "mine").write_text("")
    assert run("--clear").endswith(f"in {home}, removed\n")
    assert _names(home) == ["mine"]


def test_the_command_refuses_a_named_folder_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["cache", "weights", str(tmp_path / "nothing")])
    assert isinstance(done.exception, ArgumentError)
    assert "No such file" in str(done.exception)


def test_mapped_weights_are_not_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says that they are available, and the cache would be given what they need."""
    monkeypatch.setattr(free_memory, "_taken", {})
    monkeypatch.setattr(device_memory, "free_memory_bytes", lambda: 1000 * _KIB)
    pages = np.zeros(300 * _KIB, dtype=np.uint8)
    free_memory.count_as_taken(pages)
    assert device_memory.HOST.free_bytes() == 700 * _KIB
    free_memory.count_moved(pages, 100 * _KIB)
    assert device_memory.HOST.free_bytes() == 800 * _KIB
    del pages
    assert device_memory.HOST.free_bytes() == 1000 * _KIB


@needs_extension
def test_the_budget_of_a_second_start_leaves_room_for_its_weights(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "_taken", {})
    with LLM(kv_memory="1MiB"):
        assert free_memory.taken_bytes() > 1 << 20  # mapped in the first start too
    free_memory._taken.clear()
    monkeypatch.setattr(device_memory, "free_memory_bytes", lambda: 64 << 20)
    with LLM(kv_memory="100%") as llm:
        [packed] = home.glob("*.packed")
        assert free_memory.taken_bytes() == packed.stat().st_size
        assert llm.kv_memory_bytes <= (64 << 20) - packed.stat().st_size
