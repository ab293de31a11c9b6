"""Chunks of long prompts: how many steps others wait behind one. All counts are of steps and tokens."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine

from quire.sampling.params import SamplingParams

LONG = 32_000


def tokens(number: int, length: int) -> list[int]:
    """A prompt that has no beginning in common with one of another number."""
    return [3 + number % 80, *(5 + (number + at) % 70 for at in range(length - 1))]


def big(**options: Any) -> FakeEngine:
    limits: dict[str, Any] = {"max_batch_tokens": 2048, "long_prefill_tokens": 256}
    return FakeEngine(num_blocks=16_384, block_size=16, max_model_len=40_000, **(limits | options))


def steps_to_first_token(engine: FakeEngine, request_id: str, most: int = 200) -> int:
    for count in range(1, most + 1):
        engine.engine.step()
        request = engine.scheduler.requests.get(request_id)
        if request is None or request.first_token_s is not None:
            return count
    raise AssertionError(f"no token in {most} steps")


def drain(engine: FakeEngine) -> None:
    while engine.engine.has_work:
        for output in engine.engine.step():
            assert output.error is None
    engine.check_empty()


def computed(engine: FakeEngine) -> int:
    before = engine.scheduler.num_computed_tokens
    engine.engine.step()
    return engine.scheduler.num_computed_tokens - before


@pytest.mark.parametrize("max_batch_tokens", [64, 256, 2048])
@pytest.mark.parametrize(("priority", "most"), [(0, 3), (-1, 1)])
def test_a_short_request_behind_a_long_prompt(max_batch_tokens: int, priority: int, most: int) -> None:
    engine = big(max_batch_tokens=max_batch_tokens)
    engine.submit(tokens(0, LONG), SamplingParams(max_tokens=2))
    for _ in range(3):
        engine.engine.step()
    short = engine.submit(tokens(1, 10), SamplingParams(max_tokens=2), priority=priority)
    assert steps_to_first_token(engine, short) <= most
    drain(engine)


def test_both_at_once() -> None:
    engine = big()
    engine.submit(tokens(0, LONG), SamplingParams(max_tokens=1))
    short = engine.submit(tokens(1, 10), SamplingParams(max_tokens=1))
    assert steps_to_first_token(engine, short) == 1
    drain(engine)


def test_a_step_with_decodes_has_so_many_tokens_of_long_prompts() -> None:
    engine = big()
    answers = [engine.submit(tokens(at, 10), SamplingParams(max_tokens=40)) for at in range(8)]
    engine.engine.step()
    for at in (20, 21):
        engine.submit(tokens(at, 4000), SamplingParams(max_tokens=1))
    assert [computed(engine) for _ in range(15)] == [8 + 256] * 15
    assert engine.scheduler.num_withheld_tokens > 0
    # The last tokens of the first prompt are no long prompt any more; then the second one is alone with the decodes.
    assert computed(engine) == 8 + 160 + 256
    for request_id in answers:
        engine.engine.abort(request_id)
    withheld = engine.scheduler.num_withheld_tokens
    assert computed(engine) == 2048
    assert engine.scheduler.num_withheld_tokens == withheld
    drain(engine)


def test_alone_a_long_prompt_has_the_whole_step() -> None:
    engine = big()
    engine.submit(tokens(0, 5000), SamplingParams(max_tokens=1))
    assert [computed(engine) for _ in range(3)] == [2048, 2048, 904]
    drain(engine)


def test_without_a_limit_a_long_prompt_takes_all_that_decodes_leave() -> None:
    engine = big(long_prefill_tokens=0)
    engine.submit(tokens(0, 10), SamplingParams(max_tokens=40))
    engine.engine.step()
    engine.submit(tokens(1, 5000), SamplingParams(max_tokens=1))
    assert [computed(engine) for _ in range(2)] == [2048, 2048]
    drain(engine)


def test_a_prompt_whose_missing_tokens_are_few_is_not_long() -> None:
    engine = big()
    engine.submit(tokens(0, 3000), SamplingParams(max_tokens=1))
    drain(engine)
    engine.submit(tokens(9, 4000), SamplingParams(max_tokens=1))
    engine.engine.step()
    found = engine.submit([*tokens(0, 3000), 7, 8, 9], SamplingParams(max_tokens=1))
    assert steps_to_first_token(engine, found) == 1
    drain(engine)


def test_a_prompt_of_better_priority_passes_a_running_one_between_chunks() -> None:
    engine = big()
    late = engine.submit(tokens(0, LONG), SamplingParams(max_tokens=1))
    engine.engine.step()
    urgent = engine.submit(tokens(1, 6000), SamplingParams(max_tokens=1), priority=-1)
    first, second = (engine.scheduler.requests[name].sequences[0] for name in (late, urgent))
    rows = []
    for _ in range(4):
        before = first.num_computed
        engine.engine.step()
        rows.append((second.num_computed, first.num_computed - before))
    # A chunk of the limit's size as it is admitted, then whole steps; the rest is the running prompt's.
    assert rows == [(256, 1792), (2304, 0), (4352, 0), (6000, 400)]
    drain(engine)


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 64}])
def test_a_running_prompt_gives_its_place_and_its_memory_to_a_better_priority(limits: dict[str, Any]) -> None:
    options: dict[str, Any] = {"num_blocks": 16_384, "block_size": 16, "max_batch_tokens": 256}
    options |= {"max_model_len": 2000, "watermark": 0.0, **limits}
    engine = FakeEngine(**options)
    engine.submit(tokens(0, 1000), SamplingParams(max_tokens=2))
    engine.step()
    short = engine.submit(tokens(1, 60), SamplingParams(max_tokens=2), priority=-1)
    assert steps_to_first_token(engine, short) == 1
    assert engine.scheduler.num_preemptions == 1
    engine.run()


def test_a_decode_gives_its_place_to_no_priority() -> None:
    engine = FakeEngine(num_blocks=64, max_num_seqs=1)
    engine.submit(tokens(0, 8), SamplingParams(max_tokens=10))
    engine.step()
    engine.submit(tokens(1, 8), SamplingParams(max_tokens=2), priority=-1)
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_the_prompts_of_one_call_have_whole_steps() -> None:
    """No reader waits for one of its answers. With another call's request they have the tokens of the limit."""
    engine = big(long_prefill_tokens=64)
    params = SamplingParams(max_tokens=8)
    engine.engine.submit_all([(tokens(at, 2500), params) for at in range(3)])
    assert [computed(engine) for _ in range(3)] == [2048, 2048, 2048]
    other = engine.submit(tokens(9, 10), params)
    assert computed(engine) <= 64 + 10 + 2
    assert engine.scheduler.requests[other].first_token_s is not None
    drain(engine)
