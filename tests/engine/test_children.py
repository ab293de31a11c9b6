"""An LLM in a child of `os.fork`: every call raises one error at once, and the parent is unaffected."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.forked import in_child, refusal

from quire import LLM, AsyncEngine, SamplingParams

GREEDY = SamplingParams(max_tokens=4, temperature=0)
PROMPT = "def f("


def make(storage: str = "paged", **options: Any) -> LLM:
    return LLM(kv_memory="16MiB", storage=storage, max_model_len=128, **options)


def ask(llm: LLM) -> str:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].text


@pytest.mark.parametrize("storage", ["paged", "virtual"])
def test_every_call_is_refused_and_close_does_nothing(storage: str, tmp_path: Path) -> None:
    tiers: Any = {"host_cache": "4MiB", "disk_cache": tmp_path / "tier"}
    with make(storage, **tiers) as llm:
        expected = ask(llm)
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        conversation = llm.conversation(PROMPT)
        calls = {
            "generate": lambda: ask(llm),
            "stream": lambda: llm.stream(PROMPT, GREEDY),
            "next": lambda: next(stream),
            "fork": lambda: llm.fork(stream.request_id),
            "conversation": lambda: llm.conversation(PROMPT),
            "turn": lambda: conversation.generate(GREEDY),
            "resume": lambda: llm.resume("a"),
            "snapshots": llm.snapshots,
            "pin": lambda: llm.pins.add(PROMPT),
            "tenant": lambda: llm.tenants.add("a"),
            "explain": lambda: llm.monitor.explain(PROMPT),
            "subscribe": lambda: llm.monitor.subscribe(print),
            "stats": llm.stats,
            "report": llm.monitor.report,
            "resize": lambda: llm.resize("8MiB"),
            "trim": llm.trim,
            "flush": llm.flush,
            "prefault": llm.prefault,
            "bytes": lambda: llm.kv_committed_bytes,
        }

        def refusals() -> dict[str, str]:
            found = {name: refusal(call) for name, call in calls.items()}
            stream.close()
            llm.close()
            return found

        for name, message in in_child(refusals).items():
            assert "make a new LLM in the child" in message, name
        assert "".join(stream) != ""
        assert ask(llm) == expected
        llm.flush()
        assert in_child(lambda: _answer_of_a_new_one(storage)) == expected


def _answer_of_a_new_one(storage: str) -> str:
    with make(storage) as llm:
        return ask(llm)


def test_a_child_forked_in_the_middle_of_a_step_does_not_wait() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with make() as llm:
        llm.driver.post(lambda: (begun.set(), goes_on.wait(60)))
        assert begun.wait(60)
        try:
            assert "LLM" in in_child(lambda: refusal(lambda: ask(llm)))
        finally:
            goes_on.set()


def test_an_async_engine_is_refused_and_closes_at_once() -> None:
    engine = AsyncEngine(make())

    async def answer() -> str:
        outputs = [output async for output in engine.generate(PROMPT, GREEDY)]
        return outputs[-1].outputs[0].text

    async def every_call() -> list[str]:
        found = []
        for call in (answer, engine.stats, engine.report, lambda: engine.pin(PROMPT)):
            try:
                await call()
                found.append("")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    def refusals() -> list[str]:
        found = asyncio.run(every_call())
        engine.abort("nobody")
        engine.close()
        return found

    try:
        expected = asyncio.run(answer())
        for message in in_child(refusals):
            assert message.startswith("OtherProcessError")
        assert asyncio.run(answer()) == expected
    finally:
        engine.close()
        engine.llm.close()
