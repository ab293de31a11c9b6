"""The thread that computes an LLM's steps: many callers, interruptions, faults, and every way to end it."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_llm
from support.forked_program import run_program

from quire import LLM, AsyncEngine, SamplingParams
from quire.engine.driver import Driver
from quire.errors import ArgumentError, CancelledError

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
PROMPTS = ["def f(", "class A", "import", "return x"]


def text_of(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, GREEDY)[0].outputs[0].text


def test_many_threads_share_the_batch_and_each_gets_its_own() -> None:
    with tiny_llm.llm() as llm:
        want = {prompt: text_of(llm, prompt) for prompt in PROMPTS}

        def one(index: int) -> None:
            prompt = PROMPTS[index % len(PROMPTS)]
            if index % 3 == 0:
                assert "".join(llm.stream(prompt, GREEDY)) == want[prompt]
            elif index % 3 == 1:
                assert text_of(llm, prompt) == want[prompt]
            llm.stats()
            llm.monitor.report()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(48)))
        assert llm.stats()["held"] == 0


def test_async_and_blocking_callers_share_one_llm() -> None:
    with tiny_llm.llm() as llm:
        want = text_of(llm, PROMPTS[0])

        async def both() -> None:
            async with AsyncEngine(llm) as first, AsyncEngine(llm) as second:

                async def one(engine: AsyncEngine) -> str:
                    return [o async for o in engine.generate(PROMPTS[0], GREEDY)][-1].outputs[0].text

                blocking = asyncio.to_thread(text_of, llm, PROMPTS[0])
                assert await asyncio.gather(one(first), one(second), blocking) == [want] * 3

        asyncio.run(both())
        assert text_of(llm, PROMPTS[0]) == want  # closing those has not closed it


def test_nothing_but_the_driver_touches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llm.llm() as llm:
        threads: set[str] = set()
        for owner, name in (
            (llm.engine, "check"), (llm.engine, "submit"), (llm.engine, "step"), (llm.engine, "abort"),
            (llm.engine, "stats"), (llm.engine.pins, "expire"), (llm.cache, "memory_use"),
        ):  # fmt: skip
            original = getattr(owner, name)

            def noted(*arguments: Any, _original: Any = original, **options: Any) -> Any:
                threads.add(threading.current_thread().name)
                return _original(*arguments, **options)

            with suppress(AttributeError):  # a native object
                monkeypatch.setattr(owner, name, noted)
        text_of(llm, PROMPTS[0])
        stream = llm.stream(PROMPTS[1], LONG)
        next(stream)
        llm.fork(stream).close()
        stream.close()
        pin = llm.pins.add("a prompt that is kept")
        assert list(llm.pins) == [pin]
        llm.pins.remove(pin)
        llm.stats()
        assert threads == {"quire-engine"}


def test_an_unread_stream_computes_nothing() -> None:
    with tiny_llm.llm() as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        steps = llm.stats()["num_steps"]
        time.sleep(0.05)
        assert llm.stats()["num_steps"] == steps


def test_an_interrupted_call_leaves_the_others_alone() -> None:
    with tiny_llm.llm() as llm:
        want = llm.generate(PROMPTS[1], LONG)[0].outputs[0].text
        step, num_steps = llm.engine.step, 0

        def slow() -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                _thread.interrupt_main()
            time.sleep(0.002)
            return step()

        llm.engine.step = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(llm.generate, PROMPTS[1], LONG)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS[0], LONG)
            assert other.result()[0].outputs[0].text == want
        assert llm.stats()["held"] == 0


def test_errors_of_a_step_reach_all_who_wait_and_the_driver_goes_on() -> None:
    with tiny_llm.llm() as llm:
        want, step = text_of(llm, PROMPTS[0]), llm.engine.step

        def broken() -> Any:
            llm.engine.abort_all()
            raise RuntimeError("no luck")

        llm.engine.step = broken  # type: ignore[method-assign]
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(text_of, llm, prompt) for prompt in PROMPTS]:
                with pytest.raises(RuntimeError, match="no luck"):
                    future.result(60)
        llm.engine.step = step  # type: ignore[method-assign]
        assert text_of(llm, PROMPTS[0]) == want


def test_what_kills_the_driver_is_told_and_nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm.llm()

    def broken(*_: Any) -> None:
        raise AssertionError("a bug of the driver")

    monkeypatch.setattr(llm.driver, "_deliver", broken)
    with pytest.raises(AssertionError, match="a bug of the driver"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.driver._thread.join(60)
    with pytest.raises(ArgumentError, match="open LLM"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.close()


def test_closing_ends_the_calls_of_other_threads() -> None:
    llm = tiny_llm.llm()
    begun, step = threading.Event(), llm.engine.step

    def slow() -> Any:
        begun.set()
        time.sleep(0.002)
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, PROMPTS[0], LONG)
        assert begun.wait(60)
        llm.close()
        with pytest.raises(CancelledError):
            running.result(60)
    with pytest.raises(ArgumentError, match="open LLM"):
        llm.generate(PROMPTS[0], GREEDY)


def test_a_cancelled_task_ends_its_request() -> None:
    async def run(llm: LLM) -> None:
        async with AsyncEngine(llm) as engine:

            async def consume() -> None:
                async for _ in engine.generate(PROMPTS[0], LONG):
                    first.set()

            first = asyncio.Event()
            task = asyncio.create_task(consume())
            await first.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert (await engine.stats())["held"] == 0

    with tiny_llm.llm() as llm:
        asyncio.run(run(llm))


def test_a_callback_between_two_steps_may_look_but_not_wait() -> None:
    with tiny_llm.llm() as llm:
        errors: list[BaseException] = []

        def ask(_: object) -> None:
            llm.stats()
            try:
                llm.generate(PROMPTS[0], GREEDY)
            except ArgumentError as error:
                errors.append(error)

        llm.monitor.subscribe(ask)
        text_of(llm, PROMPTS[1])
        assert errors
        assert "from another thread" in str(errors[0])


def test_num_threads_are_those_of_the_driver_alone() -> None:
    before = torch.get_num_threads()
    with tiny_llm.llm(num_threads=1) as llm:
        assert llm.driver.call(torch.get_num_threads) == 1
        assert torch.get_num_threads() == before


def test_an_llm_left_without_close_gives_its_model_back() -> None:
    llm = tiny_llm.llm()
    text_of(llm, PROMPTS[0])
    driver, reference = llm.driver, weakref.ref(llm)
    del llm
    gc.collect()
    assert reference() is None
    assert not driver._thread.is_alive()
    assert isinstance(driver, Driver)


# What a program does last, before it falls off its end.
ENDS = (
    "llm.generate('a', SamplingParams(max_tokens=2))",
    "threading.Thread(target=llm.generate, args=('a', params), daemon=True).start(); time.sleep(0.05)",
    "stream = llm.stream('a', params); next(stream)",
    "llm.generate('a', SamplingParams(max_tokens=2)); del llm",
)
# All that is imported is imported once, and frozen, or each end would walk through it all, a second and a half; each
# end is that of a process of its own, which opens an LLM of its own.
PROGRAM = """
import contextlib, gc, os, sys, threading, time
from quire import SamplingParams
from support import tiny_llm
with contextlib.suppress(ImportError):
    import quire._native, quire.model.fused
gc.collect()
gc.freeze()
ends = sys.argv[1:]
for end in ends:
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("exit status", status, flush=True)
else:
    sys.exit()
llm = tiny_llm.llm()
params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
exec(end)
print("end", flush=True)
"""


def test_a_program_that_closes_nothing_ends() -> None:
    tests = str(Path(__file__).parents[1])
    done = run_program(PROGRAM, *ENDS, env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])})
    assert (done.returncode, done.stdout) == (0, "end\nexit status 0\n" * len(ENDS)), done.stderr
    assert "Fatal" not in done.stderr
