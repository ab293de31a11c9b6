"""Sampling: against transformers' own pipeline, statistics, and independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from quire.backends import extension
from quire.sampling.greedy import most_likely
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import sample_tokens
from quire.scheduler.request import Request, RequestSequence

VOCAB = 50


def make_sample(seed: int = 0, output: tuple[int, ...] = (), **params: Any) -> RequestSequence:
    prompt = np.array([1, 2, 3, 3], np.int32)
    request = Request("r", prompt, SamplingParams(**params).resolved(), max_tokens=9, seed=seed)
    request.sequences[0].output_ids = list(output)
    return request.sequences[0]


def logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(rows: torch.Tensor, *sequences: RequestSequence) -> list[int]:
    return sample_tokens(rows, sequences, np.arange(len(sequences))).tolist()


def test_greedy_rows_are_the_argmax() -> None:
    rows = logits(5)
    assert draw(rows, *(make_sample() for _ in range(5))) == rows.argmax(-1).tolist()


@pytest.mark.skipif(extension() is None, reason="the extension does not compute here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_extension_finds_the_most_likely_that_torch_finds(dtype: torch.dtype) -> None:
    rows = logits(70).to(dtype)
    rows[3, 5:9] = 90.0  # the first of equals
    rows[4, 7] = torch.nan
    for got, expected in zip(most_likely(rows, extension()), most_likely(rows), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_several_samples_may_draw_from_one_row() -> None:
    rows = logits(2)
    tokens = sample_tokens(rows, [make_sample() for _ in range(3)], np.array([1, 1, 0]))
    best = rows.argmax(-1)
    assert tokens.tolist() == [best[1], best[1], best[0]]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.5},
    ],
)
def test_draws_follow_the_distribution_of_transformers_pipeline(params: dict[str, Any]) -> None:
    row = logits(1)
    scores = row
    if "repetition_penalty" in params:
        scores = hf.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])(
            torch.tensor([[1, 2, 3, 3]]), scores
        )
    scores = hf.TemperatureLogitsWarper(params["temperature"])(None, scores)
    for name, warper in (
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
    ):
        if name in params:
            scores = warper(params[name])(None, scores)
    expected = scores.softmax(-1)[0].double().numpy()
    num_draws = 2500
    sequences = [make_sample(seed=seed, **params) for seed in range(num_draws)]
    tokens = sample_tokens(row, sequences, np.zeros(num_draws, np.int64))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    likely = expected * num_draws >= 5
    chi_squared = ((counts - expected * num_draws) ** 2 / np.maximum(expected * num_draws, 1e-9))[
        likely
    ].sum()
    degrees = likely.sum()
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_penalties_and_bias_change_the_right_logits() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 7] = 1.0
    row[0, 8] = 0.9
    assert draw(row, make_sample()) == [7]
    assert draw(row, make_sample(output=(7,), presence_penalty=0.2)) == [8]
    assert draw(row, make_sample(output=(7,), frequency_penalty=0.06)) == [7]
    assert draw(row, make_sample(output=(7, 7), frequency_penalty=0.06)) == [8]
    assert draw(row, make_sample(output=(7,), repetition_penalty=1.2)) == [8]
    assert draw(row, make_sample(logit_bias={3: 2.0})) == [3]
    assert draw(row, make_sample(logit_bias={7: float("-inf")})) == [8]
    row[0, 3] = 1.05  # in the prompt: repetition counts it, presence does not
    assert draw(row, make_sample(presence_penalty=1.0)) == [3]
    assert draw(row, make_sample(repetition_penalty=1.2)) == [7]


def test_a_request_draws_the_same_alone_and_in_company() -> None:
    rows = logits(6)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.5, "presence_penalty": 1.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 5},
    ]
    alone = [draw(rows[i : i + 1], make_sample(seed=i, output=(4, 5), **kinds[i]))[0] for i in range(6)]
    together = draw(rows, *(make_sample(seed=i, output=(4, 5), **kinds[i]) for i in range(6)))
    assert together == alone


def test_logprobs_are_of_the_raw_logits_chosen_first() -> None:
    row = logits(1)
    sequence = make_sample(logprobs=3, temperature=0.3, logit_bias={9: 100.0})
    assert draw(row, sequence) == [9]
    expected = row.log_softmax(-1)[0]
    assert sequence.logprobs is not None
    entry = sequence.logprobs[0]
    assert next(iter(entry)) == 9
    assert set(entry) == {9, *expected.topk(3).indices.tolist()}
    assert all(value == pytest.approx(float(expected[token])) for token, value in entry.items())


def test_a_row_of_nan_fails_its_own_sample_and_no_other() -> None:
    rows = logits(3)
    rows[1, 4] = float("nan")
    sequences = [make_sample(), make_sample(), make_sample(temperature=1.0)]
    tokens = draw(rows, *sequences)
    assert sequences[0].error is None
    assert sequences[2].error is None
    assert "NaN" in str(sequences[1].error)
    assert tokens[0] == int(rows[0].argmax())


def test_forbidding_every_token_fails_the_sample() -> None:
    sequence = make_sample(temperature=1.0, logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))
    draw(logits(1), sequence)
    assert "no token possible" in str(sequence.error)
    greedy = make_sample(logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))
    rows = logits(2)
    assert draw(rows, greedy, make_sample(temperature=1.0, top_k=1))[1] == int(rows[1].argmax())
    assert "no token possible" in str(greedy.error)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    rows = logits(3)
    sequences = [make_sample(temperature=temperature, top_p=1e-300) for _ in range(3)]
    assert draw(rows, *sequences) == rows.argmax(-1).tolist()
    assert all(sequence.error is None for sequence in sequences)


def test_the_logits_are_not_changed() -> None:
    rows = logits(2)
    before = rows.clone()
    draw(
        rows, make_sample(temperature=1.0, top_k=2, logit_bias={1: 1.0}), make_sample(repetition_penalty=2.0)
    )
    assert torch.equal(rows, before)
