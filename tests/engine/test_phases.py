"""The names of a sequence's phases."""

from __future__ import annotations

from typing import Any

from support.fake_engine import FakeEngine

from quire import SamplingParams


def submit(engine: FakeEngine, first: int, num_prompt: int, max_tokens: int = 20, **options: Any) -> str:
    prompt = [first, *range(5, 4 + num_prompt)]
    return engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **options)


def phases(engine: FakeEngine) -> dict[str, str]:
    scheduler = engine.scheduler
    return {
        sequence.request.request_id: scheduler.phase_of(sequence)
        for sequence in (
            *scheduler.running,
            *scheduler.loading,
            *scheduler.waiting,
            *scheduler.paused_waiting,
        )
    }


def test_prompt_then_tokens_and_the_others_turn() -> None:
    engine = FakeEngine(max_batch_tokens=8)
    first, second = submit(engine, 3, 12), submit(engine, 4, 12)
    assert phases(engine) == {first: "turn", second: "turn"}
    engine.step()
    assert phases(engine) == {first: "prefill", second: "turn"}
    engine.step()
    assert phases(engine) == {first: "decode", second: "prefill"}
    engine.engine.pause(first)
    engine.engine.pause(second)
    assert phases(engine) == {first: "paused", second: "paused"}


def test_no_seat_and_no_memory() -> None:
    engine = FakeEngine(max_num_seqs=1)
    first, second = submit(engine, 3, 12), submit(engine, 4, 12)
    engine.step()
    assert phases(engine) == {first: "decode", second: "seat"}
    engine = FakeEngine(num_blocks=8, block_size=4)
    first, second, third = (submit(engine, 3 + at, 20, max_tokens=8) for at in range(3))
    engine.step()
    assert phases(engine) == {first: "decode", second: "memory", third: "memory"}


def test_the_same_beginning_and_the_own_quota() -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_batch_tokens=8)
    first, second = submit(engine, 3, 16), submit(engine, 3, 18)
    engine.step()
    (waiting,), (running,) = engine.scheduler.waiting, engine.scheduler.running
    waiting.waits_for = (running, 16)  # as an admission finds it that has tokens left
    assert phases(engine) == {first: "prefill", second: "prefix"}
    engine.step()
    assert phases(engine) == {first: "decode", second: "turn"}
    engine = FakeEngine(num_blocks=64, block_size=4)
    engine.engine.tenants.add("alice", quota=11 * engine.cache.block_bytes)
    mine, more, others = (
        submit(engine, 3, 24, tenant="alice"),
        submit(engine, 4, 24, tenant="alice"),
        submit(engine, 5, 16),
    )
    engine.step()
    assert phases(engine) == {mine: "decode", more: "quota", others: "decode"}


def test_a_preempted_sequence_says_so_while_it_waits() -> None:
    engine = FakeEngine(num_blocks=8, block_size=4, watermark=0.0)
    first, second = submit(engine, 3, 8), submit(engine, 4, 8)
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.step()  # in which it finds no room
    (out,) = engine.scheduler.waiting
    assert (out.request.request_id, out.is_preempted) == (second, True)
    assert engine.scheduler.phase_of(out) == "memory"
    assert [sequence.is_preempted for sequence in engine.scheduler.running] == [False]
    engine.run()
    assert {first, second} <= engine.outputs.keys()
