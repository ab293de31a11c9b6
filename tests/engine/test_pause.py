"""A request whose stream is not read pauses and later misses no token; the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens

from quire import LLM, AsyncEngine, SamplingParams
from quire.engine.driver import FlowControl
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions

LONG = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)


def submit(engine: FakeEngine, first: int, num_tokens: int, **options: Any) -> str:
    return engine.submit([first, 1, 2], SamplingParams(max_tokens=num_tokens), **options)


def length(engine: FakeEngine, request_id: str) -> int:
    return len(engine.scheduler.requests[request_id].sequences[0].output_ids)


def tokens(engine: FakeEngine, request_id: str) -> list[int]:
    return engine.outputs[request_id].outputs[0].token_ids


def test_a_paused_request_keeps_its_place_while_nobody_wants_it() -> None:
    engine = FakeEngine(num_blocks=64, max_num_seqs=2)
    paused, other = submit(engine, 3, 20), submit(engine, 4, 20)
    engine.step()
    engine.engine.pause(paused)
    for _ in range(5):
        engine.step()
    assert (length(engine, paused), length(engine, other)) == (1, 6)
    assert len(engine.scheduler.running) == 2
    engine.engine.resume(paused)
    engine.step()
    assert (length(engine, paused), length(engine, other)) == (2, 7)
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    assert tokens(engine, paused) == expected_tokens(engine.spec, [3, 1, 2], 20)


def test_a_pause_is_no_time_between_tokens() -> None:
    """What a client does not read is not computed; the time until it reads on is its own."""
    engine = FakeEngine()
    paused, gaps = submit(engine, 3, 20), engine.scheduler.token_gaps
    for _ in range(4):
        engine.step()
    assert gaps.count == 3  # each token but the first
    engine.engine.pause(paused)
    before = gaps.count, gaps.sum_s
    engine.now += 1000
    engine.engine.resume(paused)
    engine.step()
    assert (gaps.count, gaps.sum_s) == before
    engine.step()
    assert gaps.count == before[0] + 1
    assert gaps.max_s < 1000


@pytest.mark.parametrize("room", [{"max_num_seqs": 2}, {"num_blocks": 8, "watermark": 0.0}])
def test_whoever_is_read_goes_on_whatever_came_before_it(room: dict[str, Any]) -> None:
    """Places and memory are full of paused requests: they give both up, and come back."""
    engine = FakeEngine(**{"num_blocks": 64, "block_size": 2, **room})
    paused = [submit(engine, 3 + at, 9) for at in range(2)]
    engine.step()
    for one in paused:
        engine.engine.pause(one)
    read = submit(engine, 9, 9)
    while read in engine.scheduler.requests:
        engine.step()
    assert len(engine.scheduler.requests) == 2
    assert engine.engine.step() == [], "nothing is computed for those that nobody reads"
    for one in reversed(paused):
        engine.engine.resume(one)
        while one in engine.scheduler.requests:
            engine.step()
    engine.check_empty()
    for at, one in enumerate(paused):
        assert tokens(engine, one) == expected_tokens(engine.spec, [3 + at, 1, 2], 9)


def test_a_paused_request_can_be_ended_in_any_state() -> None:
    engine = FakeEngine(max_num_seqs=1)
    running, waiting = submit(engine, 3, 9), submit(engine, 4, 9)
    engine.step()
    for one in (running, waiting):
        engine.engine.pause(one)
    engine.engine.pause("unknown")
    engine.engine.resume("unknown")
    assert len(engine.scheduler.paused_waiting) == 1
    for one in (running, waiting):
        assert engine.engine.abort(one) is not None
    engine.check_empty()


def test_unread_outputs_are_counted_from_both_sides() -> None:
    unread = FlowControl(4)
    assert [unread.count_sent() for _ in range(4)] == [False, False, False, True]
    assert [unread.count_taken() for _ in range(4)] == [False, True, False, False]
    assert not unread.count_sent()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm.llm(max_num_seqs=2) as made:
        yield made


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_streams_are_read_one_after_the_other_and_wait_within_bounds(llm: LLM, order: list[int]) -> None:
    """Two places, four streams of which a few outputs may wait: each is read whole, in whatever order."""
    prompts = [np.frombuffer(f"prompt {at}".encode(), np.uint8) for at in range(4)]

    async def main(engine: AsyncEngine) -> dict[int, list[RequestOutput]]:
        requests = [(Prompt(None, prompt), RequestOptions(LONG)) for prompt in prompts]
        streams = await engine.begin(requests, max_unread=8)
        while any(stream.queue.qsize() < 8 for stream in streams):
            await asyncio.sleep(0.001)
        num_steps = llm.engine.scheduler.num_steps
        await engine.stats()
        await engine.stats()
        assert llm.engine.scheduler.num_steps == num_steps, "nothing more is computed"
        read = {}
        for at in order:
            read[at] = [output async for output in streams[at]]
            assert all(stream.queue.qsize() <= 8 for stream in streams)
        return read

    with_engine = AsyncEngine(llm)
    read = asyncio.run(asyncio.wait_for(main(with_engine), 60))
    with_engine.close()
    for at, prompt in enumerate(prompts):
        assert len(read[at]) == 150
        expected = llm.generate(prompt.tolist(), LONG)[0].outputs[0]
        assert read[at][-1].outputs[0].token_ids == expected.token_ids
    assert llm.stats()["held"] == 0


def test_a_stream_that_nobody_can_read_any_more_is_ended(llm: LLM) -> None:
    async def main(engine: AsyncEngine) -> None:
        await engine.begin([(Prompt(None, np.array([5, 6])), RequestOptions(LONG))], max_unread=8)
        while (await engine.stats())["num_unfinished_requests"]:
            pass

    engine = AsyncEngine(llm)
    asyncio.run(asyncio.wait_for(main(engine), 60))
    engine.close()
