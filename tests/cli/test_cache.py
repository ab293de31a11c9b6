"""`quire cache` over a folder: results on stdout; for every fault one clear line and an exit status."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from support.command_line import Run, runner
from support.tier_values import ROOT, chain, value

from quire.cache.block_hash import root_key
from quire.sessions.snapshot_files import SnapshotFiles, SnapshotRecord
from quire.tiers.disk.disk_tier import DiskTier


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch, "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five segments of Ann's and one of somebody else's."""
    path = tmp_path / "cache"
    tier = DiskTier(path, 16 << 20)
    other = value(9, 40, root=root_key(b"other", b""))
    for one in [*chain(1, 5, 100, owner="ann"), other]:
        tier.store(one.key, one.parts, one.info)
    tier.describe(ROOT, "tiny, float32")
    tier.close()
    return path


def test_ls(run: Run, folder: Path) -> None:
    code, out, _ = run("ls", str(folder), "--json")
    assert code == 0
    listed = json.loads(out)
    roots = {root["root"]: root for root in listed["roots"]}
    mine = roots[ROOT.hex()]
    assert (mine["segments"], mine["tokens"], mine["owners"]) == (5, 500, ["ann"])
    assert mine["bytes"] > 5 * 100 * 1024
    assert mine["description"] == "tiny, float32"
    assert listed["max_bytes"] == 16 << 20
    assert listed["bytes_on_disk"] <= 16 << 20
    code, out, _ = run("ls", str(folder))
    assert code == 0
    assert ROOT.hex()[:12] in out
    assert "ann" in out
    assert "6 segments of 2 models and namespaces, 0 snapshots, " in out


def test_verify_finds_and_repairs(run: Run, folder: Path) -> None:
    assert run("verify", str(folder))[:2] == (0, "6 segments, 0 damaged (0B)\n")
    (slab,) = folder.glob("slab-*")
    content = bytearray(slab.read_bytes())
    content[150_000] ^= 1
    slab.write_bytes(content)
    code, out, _ = run("verify", str(folder), "--json")
    assert code == 1
    report = json.loads(out)
    assert report["segments"] == 6
    assert [damaged["start"] for damaged in report["damaged"]] == [100]
    assert "XXH3" in report["damaged"][0]["reason"]
    code, out, _ = run("verify", str(folder), "--repair")
    assert code == 1
    assert "tokens 100 to 199" in out
    assert "1 removed" in out
    assert run("verify", str(folder))[:2] == (0, "5 segments, 0 damaged (0B)\n")


def test_verify_of_a_slab_that_is_gone(run: Run, folder: Path) -> None:
    for slab in folder.glob("slab-*"):
        slab.unlink()
    code, out, _ = run("verify", str(folder))
    assert code == 1
    assert "gone or was cut short" in out


def test_prune(run: Run, folder: Path) -> None:
    code, out, _ = run("prune", str(folder), "--to", "4.4MiB")
    assert code == 0
    assert "segments removed" in out
    left = json.loads(run("ls", str(folder), "--json")[1])
    assert left["bytes_on_disk"] <= 4.4 * (1 << 20)
    assert 0 < sum(root["segments"] for root in left["roots"]) < 6


def test_rm(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    code, out, err = run("rm", str(folder))
    assert (code, out) == (2, "")
    assert "expected --yes" in err
    tier = DiskTier(folder, None)
    code, _, err = run("rm", str(folder), "--yes")
    assert code == 1
    assert "one that is open" in err
    tier.close()
    (folder / "mine.txt").write_text("not of the cache")
    assert run("rm", str(folder), "--yes")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_snapshots_are_counted_and_asked_for_and_removed_with_the_rest(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        record = SnapshotRecord(name, "tiny", b"f", np.arange(3, dtype=np.int32), {}, 1.0)
        SnapshotFiles(folder).write(record, b"namespace", overwrite=False)
    assert json.loads(run("ls", str(folder), "--json")[1])["snapshots"] == 2
    assert "2 snapshots" in run("ls", str(folder))[1]
    assert run("prune", str(folder), "--to", "1")[0] == 0
    assert SnapshotFiles(folder).names(b"namespace") == ["one", "two"]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr(typer, "confirm", lambda text, **_: asked.append(text))
    assert run("rm", str(folder))[0] == 0
    assert asked == [f"Remove the disk cache in {folder}, with 2 snapshots?"]
    assert not folder.exists()


def test_rm_leaves_what_is_not_ours(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "a file")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", no)
        code, out, err = run("rm", str(folder), "--yes")
    assert (code, out) == (1, "")
    assert err == f"quire: the disk cache in {folder} cannot be removed: Read-only file system\n"
    index = folder / "quire-cache.sqlite"
    index.unlink()
    with sqlite3.connect(index) as foreign:
        foreign.execute("CREATE TABLE mine (x)")
    foreign.close()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = run("rm", str(folder), "--yes")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "an SQLite file of another program" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    index.write_bytes(b"damaged")
    assert run("rm", str(folder), "--yes")[0] == 0
    assert not folder.exists()


@pytest.mark.parametrize("verb", [["ls"], ["verify"], ["prune", "--to", "1GiB"], ["rm", "--yes"]])
def test_a_wrong_folder_is_one_line_and_status_2(run: Run, tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in ("nothing", "file", "."):
        code, out, err = run(*verb, str(tmp_path / path))
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert "expected a folder with a disk cache, got none" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_wrong_size_is_one_line_and_status_2(run: Run, folder: Path) -> None:
    code, _, err = run("prune", str(folder), "--to", "much")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "'much' for --to" in err
