"""The shared folder with several writers: its cap, files that a dead writer left, access rights, order of eviction."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support.store_cases import FolderCase
from support.tiers_case import ROOT, chain

from quire.tiers.remote.folder_store import FolderStore
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.tier import SegmentInfo, TierError

MIB = 1 << 20
VALUE = memoryview(bytes(MIB))


def key(number: int) -> bytes:
    return number.to_bytes(4, "big").rjust(32, b"k")


def info(start: int = 0) -> SegmentInfo:
    return SegmentInfo(ROOT, ROOT, start, b"")


def store_of(tier: RemoteTier) -> FolderStore:
    assert isinstance(tier._store, FolderStore)
    return tier._store


def swept(tier: RemoteTier) -> None:
    """Sweeps once more, now."""
    sweep = store_of(tier)._sweep
    sweep.wait()
    with sweep._lock:
        sweep._begin()
    sweep.wait()


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_four_writers_keep_to_the_cap_and_agree_on_the_victims(tmp_path: Path) -> None:
    case = FolderCase(tmp_path)
    tiers = [case.tier("size=64MiB") for _ in range(4)]
    most = 0
    for number in range(160):
        tier = tiers[number % 4]
        if not tier.store(key(number), [VALUE], info()):
            store_of(tier)._sweep.wait()
            assert tier.store(key(number), [VALUE], info())
        store_of(tier)._sweep.wait()
        most = max(most, bytes_in(case.folder))
    assert most <= 64 * MIB
    for tier in tiers:
        swept(tier)
    assert 56 * MIB < bytes_in(case.folder) <= 60 * MIB
    there = [number for number in range(160) if tiers[0].contains([key(number)]) == [True]]
    assert there[-1] == 159
    assert there == list(range(there[0], 160))  # the least recently stored went, and no other
    for tier in tiers:
        tier.close()


def test_a_tail_is_evicted_before_its_head_and_a_used_value_stays(tmp_path: Path) -> None:
    case = FolderCase(tmp_path)
    tier = case.tier("size=16MiB")
    for number in range(13):
        assert tier.store(key(number), [VALUE], info(start=1000 * number))
    swept(tier)
    for number in range(13):
        case.age(key(number), 4000)
    assert tier.load(key(12)) is not None  # notes the use
    for number in range(20, 22):
        assert tier.store(key(number), [VALUE], info())
    swept(tier)
    found = tier.contains([key(number) for number in range(13)])
    assert found == [True] * 11 + [False, True]
    tier.close()


def test_files_of_a_dead_writer_are_ignored_and_removed_by_age(tmp_path: Path) -> None:
    case = FolderCase(tmp_path)
    tier = case.tier()
    assert tier.store(key(1), [VALUE], info())
    folder = case.path(key(1)).parent
    old, new = folder / ".old.partial", folder / ".new.partial"
    for path, age_s in ((old, 4000), (new, 3000)):
        path.write_bytes(b"half of a val")
        os.utime(path, (time.time() - age_s,) * 2)
    (folder / "README").write_text("somebody's own")
    (case.folder / "notes.kv").write_text("somebody's own")
    swept(tier)
    assert {path.name for path in folder.iterdir()} == {".new.partial", "README", case.path(key(1)).name}
    assert (case.folder / "notes.kv").exists()
    assert [item.key for item in store_of(tier).scan()] == [key(1)]
    tier.close()


def test_expired_values_are_swept(tmp_path: Path) -> None:
    case = FolderCase(tmp_path)
    tier = case.tier("ttl_s=3600")
    for number in range(2):
        assert tier.store(key(number), [VALUE], info())
    case.age(key(0), 4000)
    swept(tier)
    assert [case.path(key(number)).exists() for number in range(2)] == [False, True]
    tier.close()


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o2775])
def test_files_have_the_rights_of_the_folder(tmp_path: Path, mode: int) -> None:
    case = FolderCase(tmp_path)
    case.folder.mkdir()
    case.folder.chmod(mode)
    tier = case.tier()
    assert tier.store(key(1), [VALUE], info())
    path = case.path(key(1))
    assert stat.S_IMODE(path.stat().st_mode) == mode & 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == mode
    tier.close()


def test_a_folder_that_is_made_is_its_owners_and_a_mount_that_is_missing_is_said(tmp_path: Path) -> None:
    case = FolderCase(tmp_path)
    tier = case.tier()
    tier.ping()
    assert stat.S_IMODE(case.folder.stat().st_mode) == 0o700
    tier.close()
    unmounted = RemoteTier(f"folder://{tmp_path}/mnt/kv")
    with pytest.raises(TierError, match=r"a greeting at .*mount its file system"):
        unmounted.ping()
    assert not (tmp_path / "mnt").exists()
    unmounted.close()


def test_writers_of_several_processes_share_bit_for_bit(tmp_path: Path) -> None:
    script = """
        import sys
        from support.tiers_case import SHAPE, chain, with_payloads
        from quire.tiers.remote.remote_tier import RemoteTier
        from quire.tiers.stack import TierStack
        stack = TierStack([RemoteTier(sys.argv[1], timeout=60)], SHAPE)
        assert stack.store(with_payloads(chain(6))) == 6
        assert stack.flush(60) and stack.close()
    """
    url = f"folder://{tmp_path}/shared"
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(script), url]
    writers: list[subprocess.Popen[Any]] = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    tier = RemoteTier(url)
    assert tier.contains([name.hash for name in chain(6)]) == [True] * 6
    assert not list(tmp_path.rglob("*.partial"))
    tier.close()
