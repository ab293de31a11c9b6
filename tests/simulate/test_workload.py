"""Workloads: trace files, distributions of lengths, and the one-line errors of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ArgumentError
from quire.simulate import CostLine, Lengths, read_trace, synthetic

MOONCAKE = [
    {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 9, "hash_ids": [7, 9]},
    {"timestamp": 2000, "input_length": 512, "output_length": 0, "hash_ids": [7]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,27"""
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_a_mooncake_trace_shares_content_by_hash_id(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, "\n".join(map(json.dumps, MOONCAKE)) + "\n"))
    assert [r.arrival_s for r in workload.requests] == [0, 2], "in order, from the first that asks for tokens"
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests] == [(1024, 9), (700, 5)]
    first, second = (workload.token_ids(i, 1000) for i in range(2))
    assert (len(first), len(second)) == (1024, 700)
    assert (first[:512] == second[:512]).all()
    assert (first[512:700] != second[512:]).any()
    assert first.min() >= 0
    assert first.max() < 1000
    assert workload.limited(800).requests == workload.requests[1:]
    assert len(workload.limited(2000, 1).requests) == 1
    with pytest.raises(ArgumentError, match=r"at most 100 tokens.*the shortest has 705"):
        workload.limited(100)


def test_an_azure_trace_has_lengths_and_arrivals(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, AZURE))
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests] == [(4808, 10), (110, 27)]
    assert workload.requests[1].arrival_s == pytest.approx(1.5)
    assert (workload.token_ids(0, 50)[:110] != workload.token_ids(1, 50)).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "begins with 'hello"),
        ("", "begins with ''"),
        ('{"timestamp": 1}\n', "line 1"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "expected 2 hash ids"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": []}', "lengths of 0 or more"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "at least one request"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_trace(write(tmp_path, text))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="readable trace file"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="readable trace file"):
        read_trace(tmp_path / "binary")


def test_public_traces_are_read_whole() -> None:
    if not TRACES.is_dir():
        pytest.skip("the public traces are not beside this checkout")
    conversation = read_trace(TRACES / "mooncake_fast25_conversation.jsonl")
    assert len(conversation.requests) == 12_031
    assert len({i for r in conversation.requests for i in r.content_ids}) == 182_790
    code = read_trace(TRACES / "azure2023_code.csv")
    assert len(code.requests) == 8_819


def test_lengths_follow_their_mix() -> None:
    drawn = synthetic(Lengths.parse("uniform:3-9/bimodal:10,1000,0.25"), 4000, seed=1)
    prompts = np.array([r.num_prompt_tokens for r in drawn.requests])
    outputs = np.array([r.num_output_tokens for r in drawn.requests])
    assert set(prompts.tolist()) == set(range(3, 10))
    assert 0.2 < (outputs > 500).mean() < 0.3
    assert drawn == synthetic(Lengths.parse("uniform:3-9/bimodal:10,1000,0.25"), 4000, seed=1)
    skewed = synthetic(Lengths.parse("lognormal:200,1.0"), 4000, seed=1)
    assert 180 < np.median([r.num_prompt_tokens for r in skewed.requests]) < 220


@pytest.mark.parametrize(
    "text",
    [
        *("", "normal:3", "uniform:9-3", "uniform:0-3", "uniform:a-b", "uniform:1.5-3", "uniform:1-2/x"),
        *("lognormal:5", "lognormal:nan,1", "bimodal:1,2,3"),
    ],
)
def test_bad_lengths_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"expected \w+:"):
        Lengths.parse(text)


def test_a_cost_line_is_read_and_said() -> None:
    line = CostLine.parse("28ms + 2.4ms/token + 3.5us/context")
    assert line == CostLine()
    assert CostLine.parse(str(line)) == line
    assert line.seconds(10, 1000) == pytest.approx(0.028 + 0.024 + 0.0035)
    assert CostLine.parse("1s") == CostLine(1, 0, 0)
    both = CostLine.parse("1ms + 2ms/token + 5ms/decode")
    assert CostLine.parse(str(both)) == both
    assert both.seconds(10, 0, num_decodes=3) == pytest.approx(0.001 + 7 * 0.002 + 3 * 0.005)
    assert line.seconds(10, 1000, num_decodes=3) == line.seconds(10, 1000)
    for bad in ("", "fast", "3", "1ms/page", "1..2ms"):
        with pytest.raises(ArgumentError, match="expected a cost line"):
            CostLine.parse(bad)
