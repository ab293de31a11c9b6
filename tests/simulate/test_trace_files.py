"""Traces of agents: read by content, gzipped or not, with sessions; grouped blocks; useless arguments are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ArgumentError
from quire.simulate import read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
SESSIONS: list[dict[str, Any]] = [
    {
        "block_size": 16,
        "requests": [
            {
                "t": 0.0,
                "type": "n",
                "in": 40,
                "out": 7,
                "hash_ids": [5, 6],
                "stop": "tool_use",
                "api_time": 1.5,
            },
            {
                "t": 2.0,
                "type": "subagent",
                "requests": [{"t": 3.0, "type": "s", "in": 20, "out": 0, "hash_ids": [9]}],
            },
            {"t": 9.0, "type": "n", "in": 64, "out": 2, "hash_ids": [5, 6, 7, 8], "stop": "end_turn"},
        ],
    },
    {"block_size": 16, "requests": [{"t": 0.0, "type": "n", "in": 33, "out": 1, "hash_ids": [5, 6]}]},
]


def written(path: Path, sessions: list[dict[str, Any]] = SESSIONS, *, zipped: bool = False) -> Path:
    data = "".join(json.dumps(session) + "\n" for session in sessions).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_an_agents_trace_has_sessions_with_content_of_their_own(tmp_path: Path, zipped: bool) -> None:
    workload = read_trace(written(tmp_path / "trace", zipped=zipped))
    assert workload.block_tokens == 16
    assert [
        (r.arrival_s, r.session, r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests
    ] == [
        (0.0, "0", 40, 7),
        (3.0, "0", 20, 1),  # of a sub-agent; an answer has at least one token
        (5.0, "1", 33, 1),
        (9.0, "0", 64, 2),
    ]
    first, _, other, last = workload.requests
    assert first.content_ids == last.content_ids[:2]
    assert not set(first.content_ids) & set(other.content_ids), "ids count within a session"
    assert (first.has_calls, first.answer_s, last.has_calls, last.answer_s) == (True, 1.5, False, 0.0)
    ids = workload.token_ids(0, 4096)
    assert len(ids) == 40
    assert (ids[:32] == workload.token_ids(3, 4096)[:32]).all()


def test_blocks_are_grouped_and_sessions_begin_as_told(tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path / "trace"), block_tokens=32, session_every_s=1.0)
    assert [r.arrival_s for r in workload.requests] == [0.0, 1.0, 3.0, 9.0]
    assert [len(r.content_ids) for r in workload.requests] == [1, 1, 0, 2]
    assert workload.requests[0].content_ids == workload.requests[3].content_ids[:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "expected the block_size of the first session, at least 1, got 0"),
        ({"block_size": 32}, "expected the block_size of the first session, at least 1, got 32"),
        ({"requests": [{"t": 0}]}, "KeyError: 'in'"),
        ({"requests": [{"t": 0, "in": 40, "out": 1, "hash_ids": [1]}]}, "1 hash ids for 40 tokens"),
    ],
)
def test_a_wrong_session_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path / "trace", [SESSIONS[0], SESSIONS[1] | change])
    with pytest.raises(ArgumentError, match=rf"(?s){message}.*line 2"):
        read_trace(path)


def test_an_argument_that_a_format_has_no_use_for_is_refused(tmp_path: Path) -> None:
    agents, mooncake, azure = (tmp_path / name for name in ("agents", "mooncake", "azure"))
    written(agents)
    mooncake.write_text('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n")
    with pytest.raises(
        ArgumentError, match="expected a multiple of 16 tokens, the trace's own block, got 24"
    ):
        read_trace(agents, block_tokens=24)
    with pytest.raises(ArgumentError, match=r"expected no session_every_s, got 1\.0"):
        read_trace(mooncake, session_every_s=1.0)
    with pytest.raises(ArgumentError, match="expected no block_tokens, got 64"):
        read_trace(azure, block_tokens=64)
    assert [r.content_ids for r in read_trace(mooncake, block_tokens=1024).requests] == [(2,)]


def test_a_broken_gzip_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", zipped=True)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArgumentError, match="expected a readable trace file"):
        read_trace(path)


@pytest.mark.ci
@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the public traces")
def test_the_public_trace_of_agents() -> None:
    workload = read_trace(TRACES / "agentic_claude_code_0001-0120.jsonl.gz", block_tokens=1024)
    assert len(workload.requests) == 6136
    assert len({request.session for request in workload.requests}) == 116
