"""A snapshot's file when every n-th system call fails or the process dies there: old or new, never torn."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.faulty_files import FaultyFiles

from quire.errors import ArgumentError
from quire.sessions.snapshot_files import SnapshotFiles, SnapshotRecord
from quire.tiers.tier import TierError


def record(num_tokens: int) -> SnapshotRecord:
    keys = {3: b"image"}
    return SnapshotRecord("talk", "tiny", b"f" * 32, np.arange(num_tokens, dtype=np.int32), keys, 1.0)


def num_tokens(snapshots: SnapshotFiles) -> int | None:
    """Of what is under the name, every byte of it checked; None where nothing is."""
    try:
        found = snapshots.read("talk", b"")
    except ArgumentError:
        return None
    want = record(len(found.token_ids))
    assert (found.token_ids == want.token_ids).all()
    assert (found.extra_keys, found.fingerprint) == (want.extra_keys, want.fingerprint)
    return len(found.token_ids)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("every", range(1, 9))
def test_every_nth_call_fails(tmp_path: Path, every: int, error: int) -> None:
    plain, files = SnapshotFiles(tmp_path), FaultyFiles()
    faulty = SnapshotFiles(tmp_path, files)
    held = None
    for count in range(1, 12):
        files.arm(every, error)
        failure = ""
        try:
            faulty.write(record(100 * count), b"", overwrite=True)
        except TierError as raised:
            failure = str(raised)
        if failure:
            assert "\n" not in failure
            assert str(tmp_path) in failure
            assert num_tokens(plain) in (held, 100 * count)  # the last sync may be what failed
        else:
            assert num_tokens(plain) == 100 * count
        held = num_tokens(plain)
    assert files.num_failed > 0
    assert plain.names(b"") in ([], ["talk"])
    assert every < 7 or held is not None  # eight calls a write
    plain.write(record(7), b"", overwrite=True)
    assert num_tokens(plain) == 7
    assert len([path for path in tmp_path.iterdir() if "writing" in path.name]) == 0


def test_the_bytes_are_those_of_earlier_versions(tmp_path: Path) -> None:
    stored = (
        b"QUIRESNP\x01\x00\x00\x00\xb8\x00\x00\x00\xfd\x93\xda=\x08\xeeo7\x024i\xdf\x160\xa7\xd4"
        b'{"extra_keys": [[3, "696d616765"]], "fingerprint": "' + b"66" * 32 + b'", '
        b'"made_at": 1.0, "model": "tiny", "name": "talk", "num_tokens": 4}'
        b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00"
    )
    path = tmp_path / "quire-cache.snapshot-1828d89b4bfa7a47-talk"
    path.write_bytes(stored)
    snapshots = SnapshotFiles(tmp_path)
    assert num_tokens(snapshots) == 4
    snapshots.write(snapshots.read("talk", b""), b"", overwrite=True)
    assert path.read_bytes() == stored


def test_parts_are_written_and_read_on(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.arm(0, part=11)
    snapshots = SnapshotFiles(tmp_path, files)
    snapshots.write(record(50), b"", overwrite=False)
    assert num_tokens(snapshots) == 50


_KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from quire.tiers.disk.files import Files
from quire.sessions.snapshot_files import SnapshotFiles
from test_snapshot_files import record

class Ends(Files):
    left = int(sys.argv[3])

def ending(name):
    def call(self, *args, **kwargs):
        if Ends.left == 0:
            if name == "write":
                getattr(Files, name)(self, args[0], [args[1][0][:20]], args[2])
            os._exit(9)
        Ends.left -= 1
        return getattr(Files, name)(self, *args, **kwargs)
    return call

for name in ("open_lock", "try_lock", "open", "write", "sync", "rename", "sync_folder"):
    setattr(Ends, name, ending(name))
SnapshotFiles(Path(sys.argv[2]), Ends()).write(record(200), b"", overwrite=True)
"""


@pytest.mark.ci
def test_the_process_ends_at_any_call(tmp_path: Path) -> None:
    snapshots = SnapshotFiles(tmp_path)
    found = []
    for step in range(8):
        snapshots.write(record(100), b"", overwrite=True)
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        command = [sys.executable, "-c", _KILLED, str(Path(__file__).parent), str(tmp_path), str(step)]
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        assert ended.returncode in (0, 9), ended.stderr
        found.append(num_tokens(snapshots))
        assert snapshots.names(b"") == ["talk"]
    assert found == [100] * 6 + [200] * 2
    assert ended.returncode == 0


def test_who_writes_takes_turns(tmp_path: Path) -> None:
    files = FaultyFiles()
    first, second = SnapshotFiles(tmp_path, files), SnapshotFiles(tmp_path, timeout_s=0.05)
    with first._locked(), pytest.raises(TierError, match=r"within 0\.05 s, got no lock: others hold it"):
        second.write(record(1), b"", overwrite=True)
    second.write(record(1), b"", overwrite=True)
