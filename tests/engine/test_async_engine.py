"""`quire.AsyncEngine`: concurrent streams, abort, cancellation, errors that reach every waiting caller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from support import tiny_llm

from quire import LLM, AsyncEngine, SamplingParams
from quire.errors import ArgumentError, CancelledError, PromptError, PromptTooLongError
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import RequestValidator

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm.llm(max_num_seqs=4) as made:
        yield made


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncEngine]:
    made = AsyncEngine(llm)
    yield made
    made.close()
    assert llm.stats()["held"] == 0
    assert llm.stats()["num_unfinished_requests"] == 0


@pytest.fixture
def slow_steps(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes at least 0.2 s: LONG is then under way for 40 s."""
    step = engine.llm.engine.step

    def slow() -> Any:
        time.sleep(0.2)
        return step()

    monkeypatch.setattr(engine.llm.engine, "step", slow)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(
    engine: AsyncEngine, prompt: Any, params: SamplingParams = GREEDY, **more: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **more)]


def test_many_streams_at_once_equal_generate(engine: AsyncEngine, llm: LLM) -> None:
    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, f"prompt {i}") for i in range(7)))

    streams = run(main())
    for outputs in streams:
        assert [output.finished for output in outputs] == [False] * 9 + [True]
        assert "".join(output.outputs[0].new_text for output in outputs) == outputs[-1].outputs[0].text
    engine.close()
    for i, outputs in enumerate(streams):
        assert outputs[-1].outputs[0].token_ids == llm.generate(f"prompt {i}", GREEDY)[0].outputs[0].token_ids


def test_abort_gives_a_last_output(engine: AsyncEngine) -> None:
    async def main() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate("abc", LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                engine.abort("mine")
                engine.abort("unknown")
        return outputs

    outputs = run(main())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 200


def test_leaving_the_iteration_aborts(engine: AsyncEngine, llm: LLM) -> None:
    async def main() -> dict[str, Any]:
        stream = engine.generate("abc", LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        return await engine.stats()

    assert run(main())["num_unfinished_requests"] == 0


def test_cancelling_a_task_aborts(engine: AsyncEngine, slow_steps: None) -> None:
    async def main() -> dict[str, Any]:
        task = asyncio.create_task(collect(engine, "abc", LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await engine.stats()

    assert run(main())["num_unfinished_requests"] == 0


def test_the_event_loop_is_never_blocked_by_a_step(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step waits for the loop: were the loop to wait for the step, neither would go on."""
    step, stepping, go_on = engine.llm.engine.step, threading.Event(), threading.Event()

    def waiting() -> Any:
        stepping.set()
        assert go_on.wait(30)
        return step()

    monkeypatch.setattr(engine.llm.engine, "step", waiting)

    async def main() -> bool:
        task = asyncio.create_task(collect(engine, "abc"))
        while not stepping.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        return (await task)[-1].finished

    assert run(main())


def _prompts(*prompts: str) -> list[tuple[Prompt, RequestOptions]]:
    return [(Prompt(None, np.frombuffer(text.encode(), np.uint8)), RequestOptions(LONG)) for text in prompts]


def test_requests_begin_together_or_not_at_all_and_are_checked_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = RequestValidator.check_tokens

    def counted(self: RequestValidator, tokens: Any, **options: Any) -> Any:
        checked.append(len(tokens))
        return check(self, tokens, **options)

    monkeypatch.setattr(RequestValidator, "check_tokens", counted)

    async def main() -> None:
        with pytest.raises(PromptTooLongError, match="in prompt 1 of 3"):
            await engine.begin(_prompts("abc", "x" * 400, "def"))
        assert (await engine.stats())["num_unfinished_requests"] == 0
        assert checked == [3, 400]
        checked.clear()
        streams = await engine.begin(_prompts("abc", "defg"))
        assert checked == [3, 4]
        ends = [[output async for output in stream][-1] for stream in streams]
        assert [len(end.outputs[0].token_ids) for end in ends] == [200, 200]
        with pytest.raises(StopAsyncIteration):
            await anext(streams[0])

    run(main())


def test_what_has_begun_and_is_closed_unread_is_aborted(engine: AsyncEngine, slow_steps: None) -> None:
    async def main() -> dict[str, Any]:
        (stream,) = await engine.begin(_prompts("abc"))
        assert (await engine.stats())["num_unfinished_requests"] == 1
        await stream.aclose()
        return await engine.stats()

    assert run(main())["num_unfinished_requests"] == 0


def test_cancelled_while_it_begins_it_is_aborted(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        entered.set()
        assert go_on.wait(30)

    async def main() -> dict[str, Any]:
        hold = engine.submit_between_steps(busy)
        assert await asyncio.to_thread(entered.wait, 30)
        task = asyncio.create_task(engine.begin(_prompts("abc")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.wrap_future(hold)
        return await engine.stats()

    assert run(main())["num_unfinished_requests"] == 0


def test_bad_requests_fail_alone(engine: AsyncEngine) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(
            collect(engine, "good"),
            collect(engine, ""),
            collect(engine, [999]),
            collect(engine, "x" * 400),
            collect(engine, "abc", LONG, request_id="same"),
            collect(engine, "abc", LONG, request_id="same"),
            return_exceptions=True,
        )

    good, empty, out_of_range, too_long, first, second = run(main())
    assert good[-1].finished
    errors = [PromptError, PromptError, PromptTooLongError, ArgumentError]
    assert [type(e) for e in (empty, out_of_range, too_long, second)] == errors
    assert len(first[-1].outputs[0].token_ids) == 200


def test_an_error_of_the_engine_reaches_every_waiter_and_it_goes_on(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: Any) -> Any:
        raise RuntimeError("no luck")

    async def main() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(engine.llm.engine._runner, "run", broken)
            failed = await asyncio.gather(
                *(collect(engine, f"p{i}") for i in range(6)), return_exceptions=True
            )
        with monkeypatch.context() as patch:
            patch.setattr(
                engine.llm.engine.scheduler, "schedule", lambda: broken(None)
            )  # a bug in the bookkeeping
            failed += await asyncio.gather(
                *(collect(engine, f"q{i}") for i in range(2)), return_exceptions=True
            )
        return [*failed, await collect(engine, "fine")]

    *failed, fine = run(main())
    assert [str(error) for error in failed] == ["no luck"] * 8
    assert fine[-1].finished


def test_closing_tells_whoever_waits(engine: AsyncEngine, slow_steps: None) -> None:
    async def main() -> Any:
        task = asyncio.create_task(collect(engine, "abc", LONG))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.close)
        result = await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(CancelledError, match="closed"):
            await collect(engine, "abc")
        return result[0]

    assert isinstance(run(main()), CancelledError)


def test_it_sleeps_while_there_is_nothing_to_do(engine: AsyncEngine) -> None:
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_options_go_to_the_llm() -> None:
    async def main() -> str:
        async with AsyncEngine((tiny_llm.model(), tiny_llm.tokenizer()), kv_memory="1MiB") as engine:
            return (await collect(engine, "abc"))[-1].outputs[0].finish_reason or ""

    assert run(main()) == "length"
    with pytest.raises(ArgumentError):
        AsyncEngine((tiny_llm.model(), None), block_size=0)
