"""`quire cache` on a shared store: lists, verifies and clears it, and refuses to shrink it by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import Run, runner
from support.tiers_case import chain

from quire.tiers.remote.remote_tier import RemoteTier


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch, "cache")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder with three values, one of them damaged."""
    url = f"folder://{tmp_path}/shared"
    tier = RemoteTier(url)
    for name in chain(3):
        assert tier.store(name.hash, [memoryview(bytes(1000))], name.info())
    tier.close()
    damaged = next((tmp_path / "shared").rglob(f"{chain(3)[1].hash.hex()}.kv"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    return url


def test_ls(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("ls", url, "--json")
    assert code == 0
    listed = json.loads(out)
    assert (listed["segments"], listed["store"]) == (3, url.removeprefix("folder://"))
    assert listed["bytes"] > 3000
    assert 0 <= listed["newest_s"] <= listed["oldest_s"]
    monkeypatch.setenv("QUIRE_TEST_STORE", url)
    code, out, _ = run("ls", "env:QUIRE_TEST_STORE")
    assert (code, out.startswith("3 segments, ")) == (0, True)


def test_verify_and_repair(run: Run, url: str) -> None:
    key = chain(3)[1].hash.hex()
    code, out, _ = run("verify", url)
    assert (code, out) == (1, f"{key[:12]}: other bytes than were stored\n3 segments, 1 damaged\n")
    code, out, _ = run("verify", url, "--repair", "--json")
    assert (code, json.loads(out)) == (1, {"segments": 3, "damaged": [{"key": key}], "removed": 1})
    assert run("verify", url)[:2] == (0, "2 segments, 0 damaged\n")


def test_rm_and_prune(run: Run, url: str) -> None:
    code, _, err = run("prune", url, "--to", "16MiB")
    assert code == 2
    assert "a shared store, which evicts by itself" in err
    code, _, err = run("rm", url)
    assert code == 2
    assert "nothing was removed" in err
    assert run("rm", url, "--yes")[:2] == (0, "3 segments removed\n")
    assert run("ls", url)[1].startswith("0 segments")


def test_a_store_that_does_not_answer_is_one_line(run: Run, tmp_path: Path) -> None:
    code, _, err = run("ls", f"folder://{tmp_path}/no/such")
    assert code == 2
    assert "expected a store that answers, got: a greeting at" in err
    assert len(err.strip().splitlines()) == 1
