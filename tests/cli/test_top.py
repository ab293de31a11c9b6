"""`quire top`: a frame of a real server, and one line without a server, for another server or with a wrong key."""

from __future__ import annotations

import http.server
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from support.running_server import running

from quire import LLM
from quire.cli.top import frame
from quire.server.api_keys import ADMIN, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

KEYS = KeyRing([(digest_of_key("alice-key"), ApiTenant("alice")), (digest_of_key("boss-key"), ADMIN)])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with LLM(kv_memory="16MiB") as llm, running(llm, ServerSettings(keys=KEYS)) as (one, _):
        yield one


def top(*arguments: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1"}
    environment.pop("QUIRE_API_KEY", None)
    if key is not None:
        environment["QUIRE_API_KEY"] = key
    command = [sys.executable, "-m", "quire", "top", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_one_frame(url: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes("# mine\r\n\u00a0boss-key \r\n".encode("utf-16"))  # as an editor elsewhere writes it
    file.chmod(0o600)
    done = top(url, "--once", "--api-key", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "341 blocks" in done.stdout
    assert "H held 0" in done.stdout
    assert "\x1b" not in done.stdout
    assert "block table" in done.stdout
    assert "boss-key" not in done.stdout


def test_a_tenants_frame_has_no_sequences(url: str) -> None:
    done = top(url, "--once", key="alice-key")
    assert done.returncode == 0
    assert "shown to the administrator" in done.stdout
    assert "block table" not in done.stdout


@pytest.mark.parametrize("key", [None, "wrong-key"])
def test_a_wrong_key_is_one_line(url: str, key: str | None) -> None:
    done = top(url, "--once", key=key)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--api-key" in done.stderr
    assert "wrong-key" not in done.stderr


def test_no_server() -> None:
    done = top("127.0.0.1:9", "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("quire: no server answers at http://127.0.0.1:9:")
    assert done.stderr.count("\n") == 1


def test_another_server() -> None:
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        done = top(f"http://127.0.0.1:{other.server_port}", "--once")
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
    finally:
        other.shutdown()
        other.server_close()


@pytest.mark.parametrize("arguments", [("ftp://x", "--once"), ("--once", "--api-key", "/nonexistent")])
def test_wrong_arguments(arguments: tuple[str, ...]) -> None:
    done = top(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_not_a_terminal(url: str) -> None:
    done = top(url, key="boss-key")
    assert done.returncode == 2
    assert "--once" in done.stderr


def test_a_requests_id_is_shown_whole() -> None:
    import uuid

    from quire.cli.top import _clipped

    name = str(uuid.UUID(int=7))
    assert _clipped(name) == name
    assert _clipped("x" * 128) == "x" * 35 + "\u2026"


def test_names_from_clients_move_no_cursor_and_are_no_markup() -> None:
    import base64

    state: dict[str, Any] = {
        "model": "m",
        "block": "block",
        "counts": dict.fromkeys(
            ("free", "cached", "held", "in_flight", "pinned", "num_running", "num_waiting", "num_preemptions",
             "evicted_blocks"), 1
        )
        | {"num_blocks": 4},
        "rates": {"generated_per_s": 1.0, "first_token_s": None, "hit_rate": 0.5},
        "memory": {"used": 1, "cached": 1, "total": 4, "tiers": []},
        "map": {"cells": base64.b64encode(bytes(16)).decode()},
        "sequences": [
            {"id": "\x1b[2J[red]x", "tenant": "t", "computed": 1, "tokens": 2, "cached": 0, "blocks": 1,
             "age": 1.0, "runs": [[0, 1]]}
        ],
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(frame(state, 100, 10))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert "[red]x" in text


def test_a_sessions_newest_turn_is_a_line(url: str) -> None:
    body = {"prompt": "def parse_args(argv):\n    one, two", "max_tokens": 1, "session_id": "task-17"}
    for _ in range(2):
        httpx.post(f"{url}/v1/completions", json=body, headers={"X-Api-Key": "alice-key"}, timeout=60)
    lines = top(url, "--once", key="boss-key").stdout.splitlines()
    assert any(line.startswith("session task-17, turn 2: ") and line.endswith("1 computed") for line in lines)
    assert "task-17" not in top(url, "--once", key="alice-key").stdout


def test_states_are_told_without_colours() -> None:
    import base64

    cells = [(0, 255, 0, 0), (100, 0, 0, 0), (0, 0, 255, 0), (0, 0, 0, 255), (0, 0, 0, 0)]
    counts = {"num_blocks": 5, "held": 1, "in_flight": 1, "pinned": 1, "cached": 1, "free": 1}
    state: dict[str, Any] = {
        "model": "m",
        "block": "block",
        "counts": counts
        | dict.fromkeys(("num_running", "num_waiting", "num_preemptions", "evicted_blocks"), 0),
        "rates": {"generated_per_s": 1.0, "first_token_s": None, "hit_rate": 0.5},
        "memory": {"used": 1, "cached": 1, "total": 4, "tiers": []},
        "map": {"cells": base64.b64encode(bytes(sum(cells, ()))).decode()},
    }
    console = Console(file=io.StringIO(), width=100, force_terminal=True, no_color=True)
    console.print(frame(state, 100, 10))
    lines = console.file.getvalue().split("\n")  # type: ignore[attr-defined]
    assert lines[1] == "H" * 20 + "F" * 20 + "P" * 20 + "C" * 20 + "·" * 20
    assert all(f"{letter} {name} 1" in lines[2] for letter, name in
               (("H", "held"), ("F", "in_flight"), ("P", "pinned"), ("C", "cached"), ("·", "free")))  # fmt: skip
    assert "HcFP·" in lines[3] + lines[4]
    state["counts"] |= {"state_slots": 10, "free_state_slots": 3, "checkpoints": 5, "evicted_checkpoints": 7}
    state["counts"] |= {"short_hits": 2, "slots_from_blocks": 4, "slots_to_blocks": 1}
    console.print(frame(state, 100, 10))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "10 states: 2 of sequences, 5 checkpoints, 3 free; 7 checkpoints evicted" in shown
    assert "2 hits ended early" in shown
    assert "4 states made of blocks, 1 became blocks" in " ".join(shown.split())
    assert "drafts" not in shown
    state["counts"] |= {
        "draft_slots": 1,
        "num_drafts": 40,
        "num_draft_tokens": 100,
        "num_accepted_tokens": 50,
    }
    state["counts"]["num_accepted_by_position"] = [30, 15, 5]
    console.print(frame(state, 120, 10))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "1 of sequences, 5 checkpoints, 3 free, 1 for drafts; 7" in shown
    assert (
        "50 of 100 drafts accepted; with drafts 2.25 tokens a step; accepted by place: 75 %, 38 %, 12 %"
        in shown
    )
