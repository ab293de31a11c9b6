"""SamplingParams: invalid values, their errors, and the precedence of values."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", -1, "0 or more"),
        ("max_tokens", 2.5, "0 or more"),
        ("prompt_logprobs", 1025, "0 to 1024"),
        ("prompt_logprobs_start", 3, "prompt_logprobs with"),
        ("temperature", -1, "0 (greedy) or more"),
        ("temperature", float("nan"), "0 (greedy) or more"),
        ("temperature", "hot", "0 (greedy) or more"),
        ("top_p", -0.1, "0 (the most likely token) to 1"),
        ("top_p", 1.01, "0 (the most likely token) to 1"),
        ("min_tokens", -1, "0 or more"),
        ("top_k", -1, "0 or more"),
        ("top_k", True, "0 or more"),
        ("min_p", 1.5, "0 to 1"),
        ("repetition_penalty", 0.0, "more than 0"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("presence_penalty", None, "-2 to 2"),
        ("frequency_penalty", -2.5, "-2 to 2"),
        ("n", 0, "1 to 1024"),
        ("seed", -1, "0 to"),
        ("logprobs", -1, "0 to 1024"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_range(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert f"`{field}`" in message
    assert repr(value) in message
    assert allowed in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["a"]),
    ],
)
def test_bad_strings_and_ids_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"`{field}`"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("bias", [{-1: 1.0}, {3: float("nan")}, {3: float("inf")}, {3: "x"}])
def test_bad_logit_bias_is_refused(bias: dict[int, Any]) -> None:
    with pytest.raises(ArgumentError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_a_single_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_token_ids == (1,)


def test_what_the_user_gave_wins_over_the_model_and_the_model_over_neutral() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 77}
    resolved = SamplingParams(top_p=0.5, temperature=0.0).resolved(defaults)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.max_tokens) == (0.0, 0.5, 20, 77)
    assert (resolved.min_p, resolved.repetition_penalty) == (0.0, 1.0)
    assert SamplingParams().resolved(defaults).temperature == 0.6
    assert SamplingParams().resolved({}).temperature == 1.0  # a model that sequences and names no temperature
    assert SamplingParams().resolved(None).temperature == 0.0


def test_a_top_p_of_nothing_is_greedy() -> None:
    resolved = SamplingParams(top_p=0, temperature=0.9).resolved()
    assert (resolved.temperature, resolved.top_p) == (0.0, 1.0)
    assert resolved.is_plain_greedy


def test_an_answer_cannot_be_shorter_and_longer() -> None:
    with pytest.raises(ArgumentError, match=r"at most max_tokens 3, got 4 - in `min_tokens`"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=9).resolved({"max_new_tokens": 4}).max_tokens == 9


def test_plain_greedy_is_only_what_one_argmax_decides() -> None:
    assert SamplingParams().resolved().is_plain_greedy
    for changed in (
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 2.0}},
        {"min_tokens": 1},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
    ):
        assert not SamplingParams(**changed).resolved().is_plain_greedy  # type: ignore[arg-type]
