"""Random numbers of positions: the published answer of Philox, both ways to compute them, statistics, and requests."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_engine import FakeEngine

from quire.sampling.noise import _number, _numbers, uniform_numbers
from quire.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("seed", "index", "position", "words"),
    [
        (0, 0, 0, (0x6627E8D5, 0xE169C58D)),  # the first vector of Random123's kat_vectors
        (2**64 - 1, 2**32 - 1, 2**32 - 1, None),
    ],
)
def test_a_number_has_the_published_words(
    seed: int, index: int, position: int, words: tuple[int, int] | None
) -> None:
    got = uniform_numbers([seed], [index], [position])[0]
    assert 0 <= got < 1
    if words is not None:
        assert got == ((words[0] << 32 | words[1]) >> 11) / 2**53


def test_many_numbers_are_those_computed_one_by_one() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 300, np.uint64)
    indices, positions = rng.integers(0, 2**32, (2, 300), np.uint64)
    one_by_one = [_number(*map(int, row)) for row in zip(seeds, indices, positions, strict=True)]
    assert _numbers(seeds, indices, positions).tolist() == one_by_one
    for count in (0, 1, 24, 25, 300):
        got = uniform_numbers(seeds[:count].tolist(), indices[:count].tolist(), positions[:count].tolist())
        assert got.tolist() == one_by_one[:count]


@pytest.mark.parametrize("varied", ["seed", "index", "position"])
def test_numbers_are_uniform_and_neighbours_independent(varied: str) -> None:
    count = 20_000
    rows = {name: np.full(count, 7) for name in ("seed", "index", "position")}
    rows[varied] = np.arange(count)
    got = uniform_numbers(*(values.tolist() for values in rows.values()))
    assert len(set(got.tolist())) == count
    expected = count / 64
    deviation = (np.histogram(got, 64, (0, 1))[0] - expected) ** 2 / expected
    assert deviation.sum() < 120  # chi squared with 63 degrees of freedom: 1 in 100 000
    for lag in (1, 2, 256):
        assert abs(np.corrcoef(got[:-lag], got[lag:])[0, 1]) < 4.5 / count**0.5


PROMPT = [(5 * i + i * i) % 90 for i in range(17)]
OTHERS = [[(3 * i + j) % 90 for j in range(12)] for i in range(5)]


def drawn(engine: FakeEngine, prompt: list[int], max_tokens: int = 20, n: int = 1) -> str:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=5, n=n)
    return engine.submit(prompt, params)


def answer_alone(prompt: list[int], max_tokens: int = 20, n: int = 1) -> list[list[int]]:
    engine = FakeEngine(max_batch_tokens=100)
    request_id = drawn(engine, prompt, max_tokens, n)
    output = engine.run()[request_id]
    return [one.token_ids for one in output.outputs]


@pytest.mark.parametrize("budget", [3, 100])
@pytest.mark.parametrize("num_blocks", [14, 64])
def test_company_chunks_and_preemption_change_no_drawn_token(num_blocks: int, budget: int) -> None:
    expected = answer_alone(PROMPT, n=2)
    assert expected[0] != expected[1]
    engine = FakeEngine(num_blocks, max_batch_tokens=budget)
    others = [drawn(engine, prompt) for prompt in OTHERS]
    request_id = drawn(engine, PROMPT, n=2)
    outputs = engine.run()
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 14)
    assert [one.token_ids for one in outputs[request_id].outputs] == expected
    for prompt, other in zip(OTHERS, others, strict=True):
        assert [outputs[other].outputs[0].token_ids] == answer_alone(prompt)


def test_a_request_that_continues_a_text_with_its_seed_draws_the_same_tokens() -> None:
    [tokens] = answer_alone(PROMPT)
    assert answer_alone(PROMPT + tokens[:8], 12) == [tokens[8:]]
    engine = FakeEngine()
    request_id = drawn(engine, PROMPT)
    for _ in range(6):
        engine.step()
    forked = engine.engine.fork(request_id, SamplingParams(max_tokens=4, temperature=1.0, seed=5))
    outputs = engine.run()
    num_before = len(outputs[forked].prompt_token_ids) - len(PROMPT)
    assert outputs[request_id].outputs[0].token_ids == tokens
    assert outputs[forked].outputs[0].token_ids == tokens[num_before : num_before + 4]
