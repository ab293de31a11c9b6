"""Speculation: with any drafts every request gets the tokens that it gets without, and nothing of a draft stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.drafts import SteadySpeculation, TruthProposer
from support.fake_engine import FakeEngine
from support.fake_model import VOCAB, expected_tokens, full_spec, window_spec

from quire.sampling.params import SamplingParams
from quire.scheduler.speculation import Speculation
from quire.scheduler.step_costs import StepCosts
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


STATES = [{}, {"num_state_slots": 6, "num_draft_slots": 25}]


@pytest.mark.parametrize("states", STATES, ids=["kv", "states"])
def test_a_failed_step_and_an_abort_leave_nothing(states: dict[str, int]) -> None:
    texts = [prompt + expected_tokens(full_spec(), prompt, 20) for prompt in PROMPTS]
    engine = FakeEngine(speculation=speculation(texts, 0.5), **states)
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


@pytest.mark.parametrize("states", STATES, ids=["kv", "states"])
def test_a_step_without_memory_is_undone_with_its_drafts(states: dict[str, int]) -> None:
    expected = [expected_tokens(full_spec(), prompt, 20) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    engine = FakeEngine(speculation=speculation(texts, 0.7), **states)
    ids = [engine.submit(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    num_refused = 0
    while engine.engine.has_work:
        if num_refused < 3 and engine.scheduler.num_steps > 2 * num_refused + 1:
            num_refused += 1
            engine.runner.fail = StepRefusedError()
        engine.step()
        for sequence in engine.scheduler.running:
            assert sequence.cache_sequence.num_tokens == sequence.num_tokens
            assert sequence.cache_sequence.num_computed_tokens == sequence.num_computed
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


class Costs(StepCosts):
    """A step of n rows takes 1 + n * row_s seconds."""

    num_points = 2

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self.row_s = row_s

    def add(self, num_rows: int, seconds: float) -> None:
        pass

    def seconds(self, num_rows: np.ndarray) -> np.ndarray:
        return 1 + self.row_s * num_rows


@pytest.mark.parametrize(("row_s", "share", "least", "most"), [
    (0.0, 1.0, 0.9, 1.0),
    (0.1, 1.0, 0.8, 1.0),
    (0.1, 0.0, 0.0, 0.2),
    (9.0, 1.0, 0.0, 0.0),
])  # fmt: skip
def test_the_number_of_drafts_follows_their_share_and_the_cost_of_rows(
    row_s: float, share: float, least: float, most: float
) -> None:
    """In parts of the drafts that there could be, 5 for each step of a sequence without drafts."""
    expected = [expected_tokens(full_spec(), prompt, 200) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    drafts = Speculation(TruthProposer(texts, share, VOCAB), 5)
    drafts.costs = Costs(row_s)
    engine = FakeEngine(400, speculation=drafts)
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_tokens=200))
    engine.run()
    possible = 5 * (drafts.num_drafts if share else 5 * 200)
    assert least <= drafts.num_draft_tokens / max(1, possible) <= most


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 0.7, 1.0), (0.0, 0.0, 0.0)])
def test_guesses_show_the_share_of_texts_before_a_row_is_computed_for_them(
    share: float, least: float, most: float
) -> None:
    """A row costs too much for drafts of texts that nothing is known of. In parts of the steps of a sequence."""
    expected = [expected_tokens(full_spec(), prompt, 200) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    drafts = Speculation(TruthProposer(texts, share, VOCAB), 1)
    drafts.costs = Costs(0.07)
    engine = FakeEngine(400, speculation=drafts)
    ids = [engine.submit(prompt, SamplingParams(max_tokens=200)) for prompt in PROMPTS]
    outputs = engine.run()
    assert [outputs[i].outputs[0].token_ids for i in ids] == expected
    assert least <= drafts.num_drafts / (100 * len(PROMPTS)) <= most


def test_one_quick_text_does_not_hold_up_the_others() -> None:
    """Eight drafts would give the most tokens a second, and hold up the others by a third."""
    expected = [expected_tokens(full_spec(), prompt, 60) for prompt in PROMPTS]
    drafts = Speculation(TruthProposer([PROMPTS[0] + expected[0]], 1.0, VOCAB), 8)
    drafts.costs = Costs(0.05)
    engine = FakeEngine(400, speculation=drafts)
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_tokens=60))
    while len(engine.scheduler.running) + len(engine.scheduler.waiting) == len(PROMPTS):
        engine.step()
    assert drafts.num_drafts < drafts.num_draft_tokens < 3 * drafts.num_drafts


def test_an_old_cost_follows_a_slower_machine_soon() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.add(1, 1.0)
        costs.add(8, 1.5)
    for _ in range(100):
        costs.add(1, 2.0)
    for _ in range(8):
        for _ in range(16):
            costs.add(1, 2.0)
        costs.add(8, 3.0)
    found = costs.seconds(np.array([1, 8]))
    assert found is not None
    np.testing.assert_allclose(found, [2.0, 3.0], atol=0.2)


def test_a_cost_that_was_measured_too_high_falls_until_a_step_tries_it() -> None:
    """And never below that of the rows without drafts."""
    costs = StepCosts()
    costs.add(1, 1.0)
    costs.add(4, 90.0)
    costs.doubt(64)  # of rows that no step had: without effect
    for doubts, expected in ((0, 90.0), (69, 45.5), (1500, 1.0)):
        for _ in range(doubts):
            costs.doubt(1)
        found = costs.seconds(np.array([1, 4]))
        assert found is not None
        np.testing.assert_allclose(found, [1.0, expected], rtol=0.02)
    costs.add(4, 3.0)
    found = costs.seconds(np.array([1, 4]))
    assert found is not None
    np.testing.assert_allclose(found, [1.0, 3.0])
    costs.doubt(1)
    costs.add(4, 4.0)  # slow once: what was measured before counts again
    found = costs.seconds(np.array([4]))
    assert found is not None
    assert 3.0 <= found[0] < 3.1


def test_the_cost_of_a_step_is_a_line_through_the_measured_ones() -> None:
    costs = StepCosts()
    assert costs.seconds(np.arange(1, 3)) is None
    for _ in range(100):
        costs.add(1, 1.0)
        costs.add(4, 1.3)
        costs.add(8, 2.1)
    costs.add(4, 50.0)  # an interruption
    found = costs.seconds(np.array([1, 2, 4, 6, 8, 16]))
    assert found is not None
    np.testing.assert_allclose(found, [1.0, 1.1, 1.3, 1.7, 2.1, 3.7], atol=0.06)
    for _ in range(400):
        costs.add(4, 2.0)
    found = costs.seconds(np.array([4]))
    assert found is not None
    np.testing.assert_allclose(found, [2.0], atol=0.01)
