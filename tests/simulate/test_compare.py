"""`quire compare`: the storages' figures come from real allocations, are consistent, and are printed plainly."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support import tiny_llm

from quire import LLM
from quire.baselines.arena import Arena
from quire.cli.main import main
from quire.config import REGISTERED_STORAGES, STORAGES, EngineConfig
from quire.errors import ArgumentError
from quire.memory import placement
from quire.memory.virtual import virtual_storage as virtual
from quire.simulate import CostLine, Lengths, TraceRequest, Workload, synthetic
from quire.simulate.comparison import Comparison, Run, run_model, run_simulated
from quire.spec import KVSpec

SPEC = KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32")
FIGURES = {
    *("running_mean", "running_max", "reserved_bytes_mean", "used_bytes_mean", "waste_share"),
    *("waste_internal_share", "waste_external_share", "prefix_bytes_saved", "alloc_us_p50", "alloc_us_p99"),
    *("peak_bytes", "preemptions", "requests_done", "tokens_per_second"),
}
COMPARABLE = [name for name in STORAGES if name != "auto"]


def simulated(
    workload: Workload, storage: str, num_tokens: int, *, at_once: bool = True, **options: Any
) -> Run:
    comparison = Comparison(workload, num_tokens * SPEC.bytes_per_token, 512, options, at_once)
    return run_simulated(comparison, storage, SPEC, CostLine())


@pytest.mark.parametrize("storage", COMPARABLE)
def test_every_storage_does_all_the_work(storage: str) -> None:
    workload = synthetic(Lengths.parse("uniform:5-200/uniform:1-60"), 30, seed=3)
    run = simulated(workload, storage, 4096)
    figures = run.figures
    assert figures.requests_done == 30
    assert 0 < figures.used_bytes_mean <= figures.reserved_bytes_mean <= 4096 * SPEC.bytes_per_token
    assert figures.waste_share == pytest.approx(1 - figures.used_bytes_mean / figures.reserved_bytes_mean)
    assert max(run.reserved) <= figures.peak_bytes
    assert figures.tokens_per_second is not None
    assert figures.tokens_per_second > 0
    assert run.times == sorted(run.times)


def test_one_request_alone_is_counted_to_the_token() -> None:
    """A prompt of 20 and 5 more: after its steps 20, 21, 22, 23 tokens are computed, and after the last none."""
    workload = Workload("one", (TraceRequest(0.0, 20, 5),))
    token = SPEC.bytes_per_token
    paged = simulated(workload, "paged", 4096)
    assert paged.used == [n * token for n in (20, 21, 22, 23)]
    assert paged.reserved == [32 * token] * 4
    steps = [CostLine().seconds(20, 20), *(CostLine().seconds(1, 20 + i) for i in (1, 2, 3))]
    assert paged.times == pytest.approx(list(accumulate(steps)))
    by_clock = 5 / (
        sum(steps) + CostLine().seconds(1, 24)
    )  # the last step's time counts, though nothing is open then
    assert paged.figures.tokens_per_second == pytest.approx(by_clock)
    contiguous = simulated(workload, "contiguous", 4096)
    assert contiguous.reserved == [512 * token] * 4
    exact = simulated(workload, "contiguous", 4096, reservation="exact")
    assert exact.reserved == [25 * token] * 4
    assert exact.figures.waste_internal_share < 0.05


def test_paging_wastes_less_and_runs_more_at_once() -> None:
    workload = synthetic(Lengths.parse("lognormal:60,1.0/lognormal:30,0.8"), 60, seed=1).limited(512)
    paged, contiguous = (simulated(workload, name, 2048).figures for name in ("paged", "contiguous"))
    assert paged.waste_share < 0.1 < 0.6 < contiguous.waste_share
    assert paged.running_mean > 2 * contiguous.running_mean


def test_shared_prefixes_are_counted_where_they_are_shared() -> None:
    requests = tuple(TraceRequest(float(i), 300, 4, (7,)) for i in range(5))
    workload = Workload("same", requests)
    saved = simulated(workload, "paged", 8192, at_once=False).figures.prefix_bytes_saved
    assert saved == 4 * 299 * SPEC.bytes_per_token
    assert simulated(workload, "contiguous", 8192, at_once=False).figures.prefix_bytes_saved == 0


def test_a_request_that_can_never_fit_is_not_done() -> None:
    workload = Workload("two", (TraceRequest(0.0, 400, 100), TraceRequest(0.0, 10, 10)))
    run = simulated(workload, "paged", 64)
    assert run.figures.requests_done == 1
    assert len(run.errors) == 1
    assert "one of 499 tokens" in run.errors[0]


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["quire", "compare", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_the_command_prints_what_the_issue_of_a_planner_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "hidden_size": 64, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
            }
        )
    )  # fmt: skip
    picture = tmp_path / "out.png"
    status, out, _ = run_cli(
        capsys, "--config", str(config), "--simulate", "--json", "--requests", "12", "--lengths", "uniform:5-60",
        "--plot", str(picture),
    )  # fmt: skip
    assert status == 0
    told = json.loads(out)
    assert set(told) == {"workload", "storages"}
    assert set(told["storages"]) == set(COMPARABLE)
    for figures in told["storages"].values():
        assert set(figures) == FIGURES
        assert figures["requests_done"] == 12
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, out, _ = run_cli(
        capsys, "--config", str(config), "--simulate", "--requests", "5", "--storages", "paged"
    )
    assert status == 0
    assert "requests at once, mean" in out


def test_the_command_runs_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_cli(
        capsys,
        "--requests",
        "3",
        "--lengths",
        "uniform:4-8",
        "--max-model-len",
        "64",
        "--json",
        "--kv-memory",
        "8MiB",
    )
    assert status == 0
    for figures in json.loads(out)["storages"].values():
        assert set(figures) == FIGURES
        assert figures["requests_done"] == 3
        assert figures["tokens_per_second"] > 0
        assert (
            0
            < figures["used_bytes_mean"]
            <= figures["reserved_bytes_mean"]
            <= figures["peak_bytes"]
            <= 8 << 20
        )


def test_requests_that_were_not_done_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,200,9\n2023-11-16 18:17:04.97,20,9\n"
    )
    status, out, err = run_cli(
        capsys, "--simulate", "--trace", str(trace), "--storages", "paged", "--max-model-len", "256",
        "--kv-memory", "256KiB", "--json",
    )  # fmt: skip
    assert status == 0
    told = json.loads(out)["storages"]
    assert told["paged"]["requests_done"] == 1
    assert "quire: paged: 1 requests were not done; the first: " in err


def test_a_storage_with_its_option_is_compared_with_another_of_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run_cli(
        capsys, "--simulate", "--requests", "4", "--max-model-len", "512", "--storages", "paged:8,paged:64", "--json"
    )  # fmt: skip
    assert status == 0
    told = json.loads(out)["storages"]
    assert list(told) == ["paged:8", "paged:64"]
    assert told["paged:8"]["waste_share"] < told["paged:64"]["waste_share"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "a", "--lengths", "b"], "either --trace or --lengths"),
        (["--lengths", "odd:1"], "uniform:LOW-HIGH"),
        (["--trace", "/none"], "readable trace file"),
        (["--storages", "paged,heap"], "'heap'"),
        (["--config", "x"], "--simulate"),
        (["--cost", "1ms"], "--simulate"),
        (["--requests", "0"], "at least 1"),
        (["--simulate", "--max-model-len", "2", "--lengths", "uniform:9-9"], "raise the maximum length"),
        (["--simulate", "--kv-memory", "7 bananas"], "7 bananas"),
        (["--simulate", "--plot", "/none/x.png"], "folder that exists"),
        (["--simulate", "--reservation", "half"], "reservation"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = run_cli(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("storage", "expected"),
    [("contiguous:exact", "exact"), ("growing:together:64", ("together", 64)), ("growing", ("spread", 4096))],
)
def test_an_engine_with_a_model_opens_it_too(storage: str, expected: Any) -> None:
    workload = Workload("two", (TraceRequest(0.0, 4, 3), TraceRequest(0.0, 5, 2)))
    comparison = Comparison(workload, 1 << 20, 64, {"max_num_seqs": 4})
    seen: list[Any] = []

    def open_llm(config: EngineConfig) -> LLM:
        llm = LLM((tiny_llm.model(), None), config=config)
        space: Any = llm.cache
        space = space.space
        seen.append(space.reservation if isinstance(space, Arena) else (space.growth, space.step))
        return llm

    before = dict(REGISTERED_STORAGES)
    assert run_model(comparison, storage, open_llm).figures.requests_done == 2
    assert seen == [expected]
    assert before == REGISTERED_STORAGES  # an engine outside of the comparison does not find it


def test_a_comparison_refuses_what_no_storage_knows() -> None:
    with pytest.raises(ArgumentError, match="reservation"):
        simulated(Workload("one", (TraceRequest(0.0, 2, 2),)), "contiguous", 64, reservation="half")


def test_virtual_waits_where_mappings_run_out_and_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget in which one request can live at its worst, but not all that the memory holds."""
    if (reason := placement.unsupported_reason()) is not None:
        pytest.skip(reason)
    workload = synthetic(Lengths.parse("uniform:100-400/uniform:20-100"), 24, seed=2)
    budget = placement.MappingBudget(30, "mappings")
    monkeypatch.setattr(virtual, "MemfdBackend", lambda: placement.MemfdBackend(budget=budget))
    most: list[int] = []
    check = budget.check
    monkeypatch.setattr(budget, "check", lambda more: (most.append(budget.used + more), check(more))[1])
    comparison = Comparison(workload, 64 << 20, max_model_len=512, options={"max_num_seqs": 8})
    run = run_simulated(comparison, "virtual", SPEC, CostLine())
    assert max(most) > 30  # it did run out
    assert run.errors == []
    assert run.figures.requests_done == 24
