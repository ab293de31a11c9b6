"""The profile of a step: its phases sum to it, off means nothing is recorded, and the trace opens in Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny_llm
from support.fake_engine import FakeEngine

from quire import AsyncEngine, SamplingParams
from quire.backends import native_module
from quire.engine import profile as profile_module
from quire.engine.profile import PHASES, Profile
from quire.errors import ArgumentError

NUM_LAYERS = 2
# Products of a step: q, k and v, and gate and up, are one each in a fused layer; and the vocabulary.
NUM_LINEARS = {"native": 2 * 4 + 1, "python": 2 * 7 + 1}
# Of a prefill besides: in the last layer the queries of rows whose logits are asked for are a product of their own.
MORE_LINEARS = {"native": 1, "python": 0}
BACKENDS = ["python"] if native_module() is None else ["native", "python"]
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


def phase_ns(figures: dict[str, Any]) -> dict[str, int]:
    return {name: ns for name, (ns, _) in figures["phases"].items()}


def events_of(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_phases_are_all_there_and_sum_to_the_steps(backend: str) -> None:
    with tiny_llm.llm(backend=backend, profile=True) as llm:
        llm.generate(["abc", "a longer prompt"], GREEDY)
        figures = llm.profile.figures()
    assert {kind: f["num_steps"] for kind, f in figures.items()} == {"prefill": 1, "decode": 4}
    assert figures["prefill"]["num_tokens"] == len("abc") + len("a longer prompt")
    assert figures["decode"]["num_tokens"] == 2 * 4
    for kind, of_kind in figures.items():
        times = phase_ns(of_kind)
        assert list(times) == list(PHASES)
        assert sum(times.values()) == of_kind["duration_ns"]
        fused = (
            "fused operators" if backend == "python" else "KV writes"
        )  # which of the two is within another
        assert min(time for name, time in times.items() if name != fused) > 0
        assert times[fused] == 0
        calls = {name: calls for name, (_, calls) in of_kind["phases"].items()}
        steps = of_kind["num_steps"]
        assert calls["attention"] == NUM_LAYERS * steps
        assert calls["KV writes"] == (NUM_LAYERS * steps if backend == "python" else 0)
        more = MORE_LINEARS[backend] if kind == "prefill" else 0
        assert calls["linears"] == (NUM_LINEARS[backend] + more) * steps
        assert {calls[name] for name in ("schedule", "plan", "sampling", "update", "detokenize")} == {steps}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_is_nested_complete_events(backend: str, tmp_path: Path) -> None:
    with tiny_llm.llm(backend=backend, profile=True) as llm:
        llm.generate("abc", GREEDY)
        llm.profile.write_trace(tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    steps = [event for event in events if event["name"].endswith(" step")]
    assert [step["name"] for step in steps] == ["prefill step"] + ["decode step"] * 4
    assert [step["args"] for step in steps] == [{"tokens": 3, "sequences": 1}] + [
        {"tokens": 1, "sequences": 1}
    ] * 4
    # On one track any two events lie apart or one within the other; in ns, as the recorder counts.
    spans = [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in events]
    open_until: list[int] = []
    for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or stop <= open_until[-1]
        open_until.append(stop)
    forwards = [event for event in events if event["name"] == "forward"]
    linears = [event for event in events if event["name"] == "linears"]
    assert len(linears) == NUM_LINEARS[backend] * 5 + MORE_LINEARS[backend]
    for linear in linears:
        assert any(f["ts"] <= linear["ts"] <= f["ts"] + f["dur"] for f in forwards)


def test_without_a_profile_nothing_is_recorded() -> None:
    native = native_module()
    with tiny_llm.llm() as llm:
        llm.generate("abc", GREEDY)
        assert llm.profile is None
        if native is not None:
            assert native.take_records() == b""
        for module in llm._opened.prepared._model.modules():
            assert not module._forward_hooks


def test_a_profile_ends_with_its_engine() -> None:
    made = tiny_llm.model()
    with tiny_llm.LLM((made, None), kv_memory="2MiB", backend="python", profile=True):
        assert any(module._forward_hooks for module in made.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.modules())


def test_clear_forgets_and_a_table_names_every_phase() -> None:
    with tiny_llm.llm(profile=True) as llm:
        assert llm.profile.table() == "no step was profiled"
        llm.generate("abc", GREEDY)
        table = llm.profile.table()
        assert all(table.count(name) == 2 for name in PHASES)
        assert table.startswith("prefill: 1 steps, 3 tokens")
        assert "decode: 4 steps, 4 tokens" in table
        llm.profile.clear()
        assert llm.profile.table() == "no step was profiled"


def test_steps_that_fail_are_profiled_and_idle_ones_are_not() -> None:
    profile = Profile()
    fake = FakeEngine(profile=profile)
    assert fake.step() == []
    assert profile.figures()["prefill"]["num_steps"] == 0
    fake.submit([1, 2, 3], SamplingParams(max_tokens=2))
    fake.runner.run = lambda step: 1 / 0
    assert fake.step()[0].error is not None
    figures = profile.figures()["prefill"]
    assert figures["num_steps"] == 1
    assert sum(phase_ns(figures).values()) == figures["duration_ns"]


def test_the_trace_keeps_the_last_steps_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_module, "MAX_TRACED_STEPS", 3)
    profile = Profile()
    fake = FakeEngine(profile=profile)
    fake.submit([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    while fake.engine.has_work:
        fake.step()
    profile.write_trace(tmp_path / "trace.json")
    assert sum(event["name"].endswith(" step") for event in events_of(tmp_path / "trace.json")) == 3
    assert profile.figures()["decode"]["num_steps"] == 5


def test_a_trace_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"expected a writable file for the trace, got .*: No such file"):
        Profile().write_trace(tmp_path / "none" / "trace.json")


async def _one(engine: AsyncEngine) -> None:
    async for _ in engine.generate("abc", GREEDY):
        pass


def test_an_async_engine_profiles_its_own_thread() -> None:
    import asyncio

    async def run() -> dict[str, Any]:
        async with AsyncEngine(tiny_llm.llm(backend=BACKENDS[0], profile=True)) as engine:
            await _one(engine)
            return engine.llm.profile.figures()

    figures = asyncio.run(run())
    assert figures["decode"]["phases"]["linears"][1] == NUM_LINEARS[BACKENDS[0]] * 4
