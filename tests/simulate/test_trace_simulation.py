"""`quire simulate`: times by hand, a store against a plain count, rows, and every option obeyed or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.made_traces import chats

from quire.cli.main import app
from quire.errors import ArgumentError
from quire.simulate import CostLine, TraceRequest, Workload
from quire.simulate.replay import replay
from quire.simulate.routing import LongestPrefix, RandomRouting, RoundRobin
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_replica import SimulatedReplica
from quire.simulate.simulated_store import SimulatedStore
from quire.simulate.trace_simulation import TraceSimulation, simulate_trace

BLOCK = 16
COST = CostLine(fixed_s=1.0, token_s=0.01, context_s=0.001)


def replica(num_blocks: int = 1000, **options: Any) -> SimulatedReplica:
    given = {"cost": COST, "block_tokens": BLOCK, "step_tokens": 64, **options}
    return SimulatedReplica("one", SimulatedCache(num_blocks), given.pop("cost"), **given)


def test_a_prompt_takes_its_steps_behind_those_before_it() -> None:
    one = replica()
    first = one.serve(TraceRequest(0.0, 100, 1, tuple(range(6))))
    assert (first.num_found_tokens, first.num_computed_tokens) == (0, 100)
    first_s = (1 + 0.64 + 0.064) + (1 + 0.36 + 0.1)  # steps of 64 and 36 tokens
    assert first.first_token_s == pytest.approx(first_s)
    second = one.serve(TraceRequest(1.0, 100, 1, tuple(range(6))))
    assert (second.num_found_tokens, second.num_computed_tokens) == (96, 4)
    assert second.first_token_s == pytest.approx(first_s - 1.0 + (1 + 0.04 + 0.1))
    assert one.num_computed_tokens == 104
    assert one.queue_s(2.0) == pytest.approx(one.free_at_s - 2.0)


def test_requests_that_decode_slow_the_steps_of_a_prompt() -> None:
    one = replica()
    first = one.serve(TraceRequest(0.0, 16, 11, (1,)))
    assert first.step_s is not None
    assert first.step_s == pytest.approx(1 + 0.01 + 0.016)
    decodes_until = first.first_token_s + 10 * first.step_s
    second = one.serve(TraceRequest(5.0, 16, 1, (2,)))
    prefill_s = 1 + 0.17 + 0.032  # one token and its context more
    assert second.first_token_s == pytest.approx(first.step_s / 2 + prefill_s)  # and half of a decode step
    third = one.serve(TraceRequest(decodes_until + 1, 16, 1, (3,)))
    assert third.first_token_s == pytest.approx(1 + 0.16 + 0.016)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    one = replica()
    for arrival_s in (0.0, 100.0):
        served = one.serve(TraceRequest(arrival_s, 2 * BLOCK, 1, (1, 2)))
    assert (served.num_found_tokens, served.num_computed_tokens) == (2 * BLOCK - 1, 1)


@pytest.mark.parametrize("load", ["1us/token", "100s"])
def test_a_replica_loads_what_takes_less_time_than_computing_it(load: str) -> None:
    store = SimulatedStore(100, CostLine.parse(load))
    first, second = (replica(store=store) for _ in range(2))
    request = TraceRequest(0.0, 100, 1, tuple(range(6)))
    first.serve(request)
    served = second.serve(request)
    loads = load == "1us/token"
    assert (served.num_loaded_blocks, served.num_loaded_tokens) == ((6, 96) if loads else (0, 0))
    assert served.num_computed_tokens == (4 if loads else 100)
    loaded_s = 96e-6 + 1 + 0.04 + 0.1
    assert served.prefill_s == pytest.approx(loaded_s if loads else (1 + 0.64 + 0.064) + (1 + 0.36 + 0.1))
    assert second.serve(request).num_found_blocks == 6, "loaded blocks are in memory"


def test_a_store_keeps_whole_beginnings() -> None:
    generator = random.Random(0)
    store = SimulatedStore(12, CostLine())
    paths = [tuple(range(100 * n, 100 * n + generator.randrange(1, 16))) for n in range(6)]
    for _ in range(200):
        path = generator.choice(paths)
        path = path[: generator.randrange(1, len(path) + 1)]
        store.put(path)
        assert len(store) <= 12
        assert store.count(path, 0) == min(12, len(path))
        for other in paths:
            stored = [block in store for block in other]
            assert stored == sorted(stored, reverse=True)
            assert store.count(other, 0) == sum(stored)


@pytest.mark.parametrize("make", [RandomRouting, RoundRobin, LongestPrefix])
def test_every_token_is_found_loaded_or_computed(make: Any) -> None:
    workload = chats(4, 150)
    store = SimulatedStore(80, CostLine(0.0, 1e-6, 0.0))
    replicas = [replica(20, store=store) for _ in range(3)]
    run = replay(workload, replicas, make())
    figures = run.figures(replicas)
    total = sum(request.num_prompt_tokens for request in workload.requests)
    assert figures.num_requests == len(run.served) == 150
    found = [served for served in run.served if served is not None]
    for request, served in zip(workload.requests, found, strict=True):
        parts = served.num_found_tokens, served.num_loaded_tokens, served.num_computed_tokens
        assert min(parts) >= 0
        assert sum(parts) == request.num_prompt_tokens
        assert served.first_token_s >= served.prefill_s - 1e-9
    assert figures.computed_tokens == sum(served.num_computed_tokens for served in found)
    assert figures.hit_rate + figures.store_rate + figures.computed_tokens / total == pytest.approx(1)


def test_the_longest_prefix_sends_all_to_one_replica() -> None:
    replicas = [replica() for _ in range(3)]
    replay(chats(0), replicas, LongestPrefix())
    assert [bool(one.num_computed_tokens) for one in replicas] == [True, False, False]


def test_rows_come_in_the_order_of_the_lists() -> None:
    simulation = TraceSimulation(
        chats(0),
        [10, 1000],
        ["lru", "sessions"],
        {"a": lambda _: RoundRobin(), "b": lambda _: RandomRouting()},
        COST,
        2,
    )
    rows = list(simulate_trace(simulation))
    assert [(row.policy, row.routing, row.num_blocks) for row in rows] == [
        (policy, routing, capacity)
        for policy in ("lru", "sessions")
        for routing in "ab"
        for capacity in (10, 1000)
    ]
    assert rows[1].figures.hit_rate > rows[0].figures.hit_rate


def test_a_trace_without_content_or_sessions_is_refused() -> None:
    lengths = Workload("lengths", (TraceRequest(0.0, 4, 1),))
    with pytest.raises(ArgumentError, match="got lengths alone"):
        TraceSimulation(lengths, [1], ["lru"], {}, COST)
    content = Workload("content", (TraceRequest(0.0, 4, 1, (1,)),))
    with pytest.raises(ArgumentError, match="expected a trace with sessions for policy 'sessions'"):
        TraceSimulation(content, [1], ["sessions"], {}, COST)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """20 prompts of two chats, a request each second."""
    lines = []
    for number in range(20):
        ids = [number % 2, *(10 * (number % 2) + turn for turn in range(2, 3 + number // 2))]
        record = {
            "timestamp": 1000 * number, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids
        }  # fmt: skip
        lines.append(json.dumps(record))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    app(["simulate", *words, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_the_command_gives_a_row_for_each_capacity(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, trace, "--capacity", "1,100", "--policy", "lru,frequency", "--cost", "1ms/token")
    assert found["cost"] == "0ms + 1ms/token + 0us/context"
    assert found["cost_origin"] == "given"
    assert [(row["policy"], row["num_blocks"]) for row in found["rows"]] == [
        ("lru", 1), ("lru", 100), ("frequency", 1), ("frequency", 100)
    ]  # fmt: skip
    rows = found["rows"]
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"] == rows[3]["hit_rate"]
    assert rows[1]["computed_tokens"] == 22 * 512, "each block once"
    less = run(capsys, trace, "--requests", "3")
    assert less["rows"][0]["num_requests"] == 3
    assert [row["num_blocks"] for row in less["rows"]] == [1, 2, 5], "shares of five different blocks"


def test_a_size_in_bytes_is_a_number_of_blocks_of_the_model(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, trace, "--model", "embedded", "--capacity", "3, 8MiB", "--block-tokens", "1024")
    assert found["block_tokens"] == 1024
    assert [row["num_blocks"] for row in found["rows"]] == [3, (8 << 20) // found["block_bytes"]]
    smaller = run(capsys, trace, "--kv-dtype", "int8", "--model", "embedded", "--capacity", "8MiB")
    assert smaller["block_bytes"] < found["block_bytes"] / 2


def test_replicas_share_a_store(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        trace,
        "--capacity",
        "100",
        "--replicas",
        "2",
        "--router",
        "ranked,random,round-robin,longest-prefix",
    ]
    alone = run(capsys, *words, "--digest-s", "0.1")["rows"]
    assert [row["router"] for row in alone] == ["ranked", "random", "round-robin", "longest-prefix"]
    assert all(row["store_rate"] == 0 for row in alone)
    shared = run(capsys, *words, "--store", "100", "--store-cost", "1us/token")["rows"]
    assert shared[1]["store_rate"] > 0
    for row in shared:
        assert row["computed_tokens"] == 22 * 512, "each block once"


def test_the_scheduler_gives_the_time_of_its_steps(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [trace, "--replicas", "2", "--router", "ranked,longest-prefix", "--time", "scheduler"]
    found = run(capsys, *words, "--store", "100", "--store-cost", "1us/token", "--cost", "1ms + 1ms/token")
    assert found["time"] == "scheduler"
    assert {row["num_requests"] for row in found["rows"]} == {20}, "each default capacity holds the longest"
    assert all(row["computed_tokens"] == 22 * 512 for row in found["rows"]), "each block once"
    assert all(row["decode_step_s_mean"] > 1.99e-3 for row in found["rows"])
    assert (found["max_num_seqs"], found["long_prefill_tokens"]) == (256, 64), "an engine's defaults"
    lone = run(capsys, trace, "--capacity", "100", "--time", "scheduler", "--cost", "1ms + 1ms/token")[
        "rows"
    ][0]
    assert lone["computed_tokens"] == found["rows"][0]["computed_tokens"]


def test_the_limits_of_the_scheduler_are_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two answers at once, and a long prompt behind them."""
    records = [(0, 512, 40), (0, 512, 40), (2000, 4096, 1)]
    lines = [
        {
            "timestamp": at_ms,
            "input_length": num_in,
            "output_length": num_out,
            "hash_ids": [*range(at, at + num_in // 512)],
        }
        for at, (at_ms, num_in, num_out) in zip((0, 10, 20), records, strict=True)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    words = [str(path), "--capacity", "50", "--time", "scheduler", "--cost", "100ms + 0.1ms/token"]
    whole = run(capsys, *words, "--long-prefill-tokens", "0")["rows"][0]
    assert run(capsys, *words)["rows"][0]["first_token_s_p99"] > 2 * whole["first_token_s_p99"]
    alone = run(capsys, *words, "--long-prefill-tokens", "0", "--max-num-seqs", "1")["rows"][0]
    assert alone["first_token_s_p99"] > 2 * whole["first_token_s_p99"]


def test_a_request_beyond_memory_is_told(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    app(["simulate", trace, "--capacity", "8", "--time", "scheduler"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "up to 8 requests are larger than a replica's memory; their rows leave them out" in text


def test_a_store_is_measured(trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [trace, "--capacity", "100", "--model", "embedded", "--replicas", "2", "--router", "round-robin"]
    found = run(capsys, *words, "--store", f"folder://{tmp_path}", "--store-size", "9")
    assert found["store_blocks"] == 9
    measured = found["measured_store"]
    assert measured["value_bytes"] == found["block_bytes"]
    assert measured["where"] == str(tmp_path)
    line = CostLine(measured["lookup_s"], measured["load_s"] / 512, 0.0)
    assert found["store_cost"] == str(line)
    whole = run(capsys, *words, "--store", f"folder://{tmp_path}")
    assert whole["store_blocks"] == 22, "all blocks of the trace"
    assert not list(tmp_path.rglob("*.kv"))
    app(["simulate", *words, "--store", f"folder://{tmp_path}"], standalone_mode=False)
    assert f"({tmp_path}, measured here: a look-up" in " ".join(capsys.readouterr().out.split("\n"))


def test_a_measured_cost_is_that_of_the_model(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, trace, "--measure", "--capacity", "100", "--model", "embedded")
    assert found["cost_origin"] == "measured here"
    assert CostLine.parse(found["cost"]).token_s > 0


def test_the_table_names_an_assumed_cost(
    trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    app(["simulate", trace, "--replicas", "2", "--plot", str(picture)], standalone_mode=False)
    text = capsys.readouterr().out
    assert "28ms + 2.4ms/token + 3.5us/context (an example, give --cost or --measure)" in text
    assert "20 requests of trace.jsonl" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "expected at least 1, got 0 - in `replicas`"),
        (["--requests", "0"], "expected at least 1, got 0 - in `requests`"),
        (["--router", "random"], "expected 2 or more with --router or --digest-s, got 1"),
        (["--replicas", "2", "--router", "best"], "expected some of ranked, random.*got 'best'"),
        (
            ["--replicas", "2", "--router", "random", "--digest-s", "1"],
            "expected router ranked with --digest-s",
        ),
        (["--replicas", "2", "--digest-s", "-1"], r"expected seconds of 0 or more, got -1\.0"),
        (["--store", "10"], "expected --store and --store-cost together"),
        (["--store-cost", "1us/token"], "expected --store and --store-cost together"),
        (["--store", "10", "--store-cost", "1us/context"], "expected no term of context or decode"),
        (["--store", "10", "--store-cost", "1us/decode"], "expected no term of context or decode"),
        (["--store", "redis://there", "--store-cost", "1us/token"], "expected no --store-cost with the URL"),
        (["--store", "redis://there"], "expected --model or --config with the URL of a store"),
        (["--store", "redis://127.0.0.1:1", "--model", "embedded"], "expected a store that answers"),
        (["--store-size", "4"], "expected the URL of a store in --store with --store-size"),
        (
            ["--store", "4", "--store-cost", "1ms", "--store-size", "4"],
            "expected the URL of a store in --store",
        ),
        (["--max-num-seqs", "4"], "expected --time scheduler with `max_num_seqs`, got --time queue"),
        (["--long-prefill-tokens", "4"], "expected --time scheduler with `long_prefill_tokens`"),
        (["--time", "clock"], "expected queue or scheduler, got 'clock' - in `time`"),
        (["--time", "scheduler", "--capacity", "1"], "expected a replica that holds a request"),
        (["--measure", "--cost", "1us/token"], "expected either --cost or --measure"),
        (["--config", "x", "--measure"], "expected --config without --model and --measure"),
        (["--capacity", "4GiB"], "or --model or --config too, got '4GiB' - in `capacity`"),
        (["--capacity", "²"], "or --model or --config too, got '²' - in `capacity`"),
        (["--capacity", "4,04"], "expected each number of blocks once, got '4,04'"),
        (["--store", "4GiB", "--store-cost", "1ms"], "--config too, got '4GiB' - in `store`"),
        (
            ["--capacity", "4", "--model", "embedded"],
            "with a capacity in bytes, the URL of a store or --measure",
        ),
        (["--capacity", "1B", "--model", "embedded"], "expected at least one block of .* bytes, got 1B"),
        (["--capacity", "0"], "expected at least one block, got 0"),
        (["--capacity", "4,x", "--model", "embedded"], "expected a size such as"),
        (["--policy", "lru,lru"], "expected each once"),
        (["--policy", "arc"], "expected some of lru, frequency, sessions, got 'arc'"),
        (["--policy", "sessions"], "expected a trace with sessions"),
        (["--session-every-s", "2"], "expected no session_every_s"),
        (["--block-tokens", "100"], "expected a multiple of 512"),
        (["--cost", "fast"], "expected a cost line"),
        (["--plot", "no-such-folder/a.png"], "expected a file in a folder that exists"),
    ],
)
def test_an_option_is_obeyed_or_refused(trace: str, words: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        app(["simulate", trace, *words], standalone_mode=False)
