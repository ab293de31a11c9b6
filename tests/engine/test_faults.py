"""A fault in one place stays local, and every block is returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens, full_spec

from quire.sampling.params import SamplingParams

PROMPT = [5, 9, 2, 7, 1]


def test_an_error_of_a_step_ends_its_requests_and_those_that_wait_go_on() -> None:
    engine = FakeEngine(max_num_seqs=1)
    ids = [engine.submit([i, *PROMPT], SamplingParams(max_tokens=4)) for i in range(3)]
    engine.step()
    engine.runner.fail = RuntimeError("out of luck")
    outputs = engine.run()
    assert str(outputs[ids[0]].error) == "out of luck"
    assert outputs[ids[0]].outputs[0].finish_reason == "error"
    for i in (1, 2):
        assert outputs[ids[i]].outputs[0].token_ids == expected_tokens(full_spec(), [i, *PROMPT], 4)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_interruption_is_raised_and_every_block_returned(num_steps: int) -> None:
    engine = FakeEngine(max_batch_tokens=8)
    for i in range(3):
        engine.submit([i, *PROMPT], SamplingParams(max_tokens=6, n=2, temperature=1.0))
    for _ in range(num_steps):
        engine.step()
    engine.runner.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_empty()
    request_id = engine.submit(PROMPT, SamplingParams(max_tokens=3))
    assert engine.run()[request_id].outputs[0].token_ids == expected_tokens(full_spec(), PROMPT, 3)


def test_logits_that_are_nan_fail_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    ids = [engine.submit([i, *PROMPT], SamplingParams(max_tokens=4)) for i in range(2)]
    engine.step()
    run = engine.runner.run

    def poisoned(step: Any) -> torch.Tensor:
        logits = run(step)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "run", poisoned)
    engine.step()
    monkeypatch.undo()
    outputs = engine.run()
    assert "NaN" in str(outputs[ids[0]].error)
    assert outputs[ids[1]].outputs[0].token_ids == expected_tokens(full_spec(), [1, *PROMPT], 4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_fails_fails_one_request_alone(stream: bool) -> None:
    engine = FakeEngine()
    bad = expected_tokens(full_spec(), [0, *PROMPT], 4)
    good = expected_tokens(full_spec(), [1, *PROMPT], 4)
    tokenizer = engine.engine._outputs._tokenizer
    plain_decode = tokenizer.decode

    def decode(token_ids: list[int], **options: Any) -> str:
        if set(token_ids) & (set(bad) - set(good) - set(PROMPT)):
            raise ValueError("no such piece")
        return plain_decode(token_ids, **options)

    tokenizer.decode = decode
    ids = [engine.submit([i, *PROMPT], SamplingParams(max_tokens=4), stream=stream) for i in range(2)]
    outputs = engine.run()
    assert str(outputs[ids[0]].error) == "no such piece"
    assert outputs[ids[0]].outputs[0].finish_reason == "error"
    assert outputs[ids[1]].outputs[0].token_ids == good


def test_a_bug_in_the_bookkeeping_is_raised_after_everything_was_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    engine.submit(PROMPT, SamplingParams(max_tokens=4))
    engine.step()

    def broken(*_: Any) -> None:
        raise AssertionError("bug")

    monkeypatch.setattr(engine.cache, "reserve_unchecked", broken)
    with pytest.raises(AssertionError, match="bug"):
        engine.engine.step()
    engine.check_empty()


def test_a_prompt_array_is_not_kept() -> None:
    engine = FakeEngine()
    prompt = np.array(PROMPT, np.int32)
    request_id = engine.submit(prompt, SamplingParams(max_tokens=3))
    prompt[:] = 0
    assert engine.run()[request_id].outputs[0].token_ids == expected_tokens(full_spec(), PROMPT, 3)
