"""Speculation: with any drafts every request gets the tokens that it gets without, and nothing of a draft stays."""

from __future__ import annotations

from typing import Any

import pytest
from support.drafts import SteadySpeculation, TruthProposer
from support.fake_engine import FakeEngine
from support.fake_model import VOCAB, expected_tokens, full_spec, window_spec

from quire.sampling.params import SamplingParams
from quire.step import StepRefusedError

PROMPTS = [[(5 * i + j * j) % 90 for j in range(9 + 3 * i)] for i in range(5)]


def speculation(texts: list[list[int]], share: float, num_drafts: int = 5) -> SteadySpeculation:
    return SteadySpeculation(TruthProposer(texts, share, VOCAB), num_drafts)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_blocks", [24, 80])
def test_greedy_tokens_are_those_without_drafts(num_blocks: int, share: float, window: int) -> None:
    spec = window_spec(window) if window else full_spec()
    expected = [expected_tokens(spec, prompt, 20) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    drafts = speculation(texts, share)
    engine = FakeEngine(num_blocks, spec=spec, max_batch_tokens=40, speculation=drafts)
    ids = [engine.submit(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    outputs = engine.run()
    assert [outputs[i].outputs[0].token_ids for i in ids] == expected
    counts = engine.engine.stats()
    assert counts["num_draft_tokens"] > 0
    assert (counts["num_accepted_tokens"] == counts["num_draft_tokens"]) == (share == 1.0)
    assert (counts["num_accepted_tokens"] == 0) == (share == 0.0)
    assert sum(counts["num_accepted_by_position"]) == counts["num_accepted_tokens"]
    assert counts["num_generated_tokens"] == 100
    assert drafts._proposer.num_opened == drafts._proposer.num_closed  # type: ignore[attr-defined]
    if share == 1.0 and num_blocks == 80:
        assert counts["num_steps"] < 15


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "several": {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 2},
    "narrow": {"temperature": 0.8, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "seed": 1},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 0},
    "bias": {"logit_bias": {7: 3.0, 11: float("-inf")}, "temperature": 0.5, "seed": 9},
    "masked": {"allowed_token_ids": [2, 3, 5, 7, 11, 13], "min_tokens": 6, "stop_token_ids": [3, 5]},
    "stopped": {"temperature": 1.5, "seed": 4, "stop_token_ids": list(range(0, 97, 9)), "logprobs": 1},
    "stop string": {"temperature": 1.5, "seed": 4, "stop": [chr(32 + t) for t in range(0, 97, 8)], "logprobs": 1},
    "stop string shown": {
        "temperature": 1.5, "seed": 6, "stop": [chr(32 + t) for t in range(0, 97, 8)], "min_tokens": 3,
        "include_stop_str_in_output": True,
    },
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2, "temperature": 1.0, "seed": 2},
}  # fmt: skip


def answers(engine: FakeEngine, params: SamplingParams, *, stream: bool = False) -> list[Any]:
    """All of the answers; with `stream` from the pieces of their outputs."""
    ids = [engine.submit(prompt, params, stream=stream, deltas=stream) for prompt in PROMPTS]
    pieces: dict[str, list[Any]] = {request_id: [] for request_id in ids}
    while engine.engine.has_work:
        for output in engine.step():
            pieces[output.request_id].append(output)
    engine.check_empty()
    found: list[Any] = []
    for request_id in ids:
        for index, last in enumerate(pieces[request_id][-1].outputs):
            parts = [output.outputs[index] for output in pieces[request_id]]
            found.append(
                (
                    [token for part in parts for token in part.token_ids],
                    "".join(part.new_text for part in parts),
                    [entry for part in parts for entry in part.logprobs or ()],
                    (last.finish_reason, last.stop_reason, str(last.error)),
                )
            )
    return found


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", PARAMS)
def test_every_sampling_option_gives_what_it_gives_without_drafts(name: str, share: float) -> None:
    params = SamplingParams(**{"max_tokens": 20, **PARAMS[name]})
    expected = answers(FakeEngine(), params)
    texts = [PROMPTS[i // params.n] + one[0] for i, one in enumerate(expected)]
    for num_blocks, stream in ((80, False), (80, True), (22, False)):
        drafts = speculation(texts, share)
        engine = FakeEngine(num_blocks, speculation=drafts)
        assert answers(engine, params, stream=stream) == expected
        assert (drafts.num_accepted_tokens > 0) == (params.max_tokens > 2)


def test_content_is_findable_only_as_far_as_without_drafts() -> None:
    """Also behind a stop string in the middle of accepted drafts."""
    for params in (
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, stop=[chr(32 + t) for t in range(0, 97, 6)]),
    ):
        engine = FakeEngine()
        expected = answers(engine, params)
        trees = [engine.cache.tree()]
        texts = [prompt + one[0] + [1, 2, 3] for prompt, one in zip(PROMPTS, expected, strict=True)]
        for share in (0.0, 0.5, 1.0):
            engine = FakeEngine(speculation=speculation(texts, share))
            assert answers(engine, params) == expected
            trees.append(engine.cache.tree())
        matches = [sorted(tree.num_tokens.tolist()) for tree in trees]
        assert matches == matches[:1] * 4


def test_an_error_of_a_draw_ends_the_sequence_behind_the_tokens_before_it() -> None:
    expected = expected_tokens(full_spec(), PROMPTS[0], 20)
    engine = FakeEngine(speculation=speculation([PROMPTS[0] + expected], 1.0))
    request_id = engine.submit(PROMPTS[0], SamplingParams(max_tokens=20))
    run, num_calls = engine.runner.run, 0

    def spoiled(step: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        logits = run(step)
        if num_calls == 2:
            logits[2] = float("nan")
        return logits

    engine.runner.run = spoiled  # type: ignore[method-assign]
    [output] = engine.run()[request_id].outputs
    assert output.token_ids == expected[:3]
    assert output.finish_reason == "error"
    assert "NaN" in str(output.error)


def test_a_failed_step_and_an_abort_leave_nothing() -> None:
    texts = [prompt + expected_tokens(full_spec(), prompt, 20) for prompt in PROMPTS]
    engine = FakeEngine(speculation=speculation(texts, 0.5))
    ids = [engine.submit(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    engine.step()
    engine.step()
    engine.engine.abort(ids[0])
    engine.cache.check()
    engine.step()
    engine.runner.fail = RuntimeError("no")
    outputs = engine.step()
    assert {output.request_id for output in outputs} == set(ids[1:])
    engine.check_empty()


def test_a_step_without_memory_is_undone_with_its_drafts() -> None:
    expected = [expected_tokens(full_spec(), prompt, 20) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    engine = FakeEngine(speculation=speculation(texts, 0.7))
    ids = [engine.submit(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    num_refused = 0
    while engine.engine.has_work:
        if num_refused < 3 and engine.scheduler.num_steps > 2 * num_refused + 1:
            num_refused += 1
            engine.runner.fail = StepRefusedError()
        engine.step()
        for sequence in engine.scheduler.running:
            assert sequence.cache_sequence.num_tokens == sequence.num_tokens
    engine.check_empty()
    assert [engine.outputs[i].outputs[0].token_ids for i in ids] == expected


def test_a_full_pool_takes_the_drafts_back() -> None:
    """Where blocks suffice for the step alone, it runs without drafts and preempts no other sequence for them."""
    prompt = PROMPTS[1]
    answer = expected_tokens(full_spec(), prompt, 5)
    drafts = speculation([prompt + answer], 1.0)
    engine = FakeEngine(num_blocks=-(-(len(prompt) + 4) // 2), block_size=2, speculation=drafts)
    request_id = engine.submit(prompt, SamplingParams(max_tokens=5))
    assert engine.run()[request_id].outputs[0].token_ids == answer
    assert engine.scheduler.num_preemptions == 0
