"""Tokens that a request forbids: the mask against its definition, and answers that obey it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny_llm

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.sampling.token_mask import BadWords, TokenMask

VOCAB = 6
IDS = st.integers(0, VOCAB - 1)
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm.llm() as one:
        yield one


def answer(llm: LLM, **params):
    output = llm.generate(PROMPT, SamplingParams(**{"max_tokens": 12, **params}))[0].outputs[0]
    if output.error is not None:
        raise output.error
    return output


@given(
    allowed=st.none() | st.lists(IDS, min_size=1, max_size=4),
    words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4),
    stop_ids=st.frozensets(IDS, max_size=2),
    min_tokens=st.integers(0, 3),
    output=st.lists(IDS, max_size=5),
)
def test_a_mask_forbids_what_its_definition_says(allowed, words, stop_ids, min_tokens, output) -> None:
    def is_allowed(token: int) -> bool:
        if allowed is not None and token not in allowed:
            return False
        if len(output) < min_tokens and token in stop_ids:
            return False
        then = (*output, token)
        return not any(then[len(then) - len(word) :] == word for word in words)

    params = SamplingParams(allowed_token_ids=allowed, bad_words=["x"] * bool(words), min_tokens=min_tokens)
    row = torch.arange(VOCAB, dtype=torch.float32)
    try:
        mask = TokenMask.of(params, words, stop_ids)
    except ArgumentError:  # the first token is impossible already
        output = []
        assert not any(is_allowed(token) for token in range(VOCAB))
        return
    if mask is not None:
        mask.apply(row, output)
    for token in range(VOCAB):
        assert row[token] == (token if is_allowed(token) else float("-inf"))


def test_a_word_is_forbidden_with_a_space_before_it_and_without(llm: LLM) -> None:
    ids = llm.tokenizer("ab")["input_ids"]
    space = llm.tokenizer(" ")["input_ids"]
    words = BadWords(llm.tokenizer, 258)
    for word in ("ab", " ab"):
        assert words.sequences([word]) == (tuple(ids), (*space, *ids))
    assert words.sequences(["\n"]) == (
        tuple(llm.tokenizer("\n")["input_ids"]),
    )  # nothing but space is itself
    assert BadWords(llm.tokenizer, ids[0]).sequences(["ab"]) == ()  # not this model's tokens
    with pytest.raises(ArgumentError, match="tokenizer, got none - in `bad_words`"):
        BadWords(None, 258).sequences(["ab"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_do_not_come(llm: LLM, temperature: float) -> None:
    letters = llm.tokenizer("abcdefgh")["input_ids"]
    common = {"temperature": temperature, "seed": 3, "allowed_token_ids": letters}
    free = answer(llm, **common).text
    assert len(free) == 12
    words = [free[2:4], free[0]]
    kept = answer(llm, **common, bad_words=words)
    assert len(kept.text) == 12
    assert not any(word in kept.text for word in words)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_come_and_logprobs_stay_those_of_the_model(llm: LLM, temperature: float) -> None:
    allowed = [5, 70, 90]
    masked = answer(llm, temperature=temperature, seed=1, allowed_token_ids=allowed, logprobs=2)
    assert set(masked.token_ids) <= set(allowed)
    free = answer(llm, temperature=temperature, seed=1, logprobs=2)
    best = sorted(free.logprobs[0].values())[-1]
    assert max(masked.logprobs[0].values()) == best  # of the raw logits, whatever may come


def test_masks_add_up_with_a_grammar_and_penalties(llm: LLM) -> None:
    ids = llm.tokenizer("abc")["input_ids"]
    output = answer(
        llm, regex="[a-c]{6}", allowed_token_ids=[*ids, tiny_llm.END], bad_words=["b"], presence_penalty=1.0
    )
    assert len(output.text) == 6
    assert set(output.text) <= {"a", "c"}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"allowed_token_ids": [5], "logit_bias": {5: float("-inf")}}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"min_tokens": 300}, "min_tokens"),
        ({"regex": "[0-9]", "min_tokens": 3}, "min_tokens"),  # known once the answer is complete
        ({"regex": "x", "bad_words": ["x"]}, "bad_words"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_leaves_no_token_is_an_error_that_names_it(llm, params, named, temperature) -> None:
    with pytest.raises(ArgumentError, match=f"`{named}`"):
        answer(llm, **{"max_tokens": None, "temperature": temperature, **params})
    assert llm.stats()["num_unfinished_requests"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_an_answer_before_min_tokens(llm: LLM, temperature: float) -> None:
    free = answer(llm, temperature=temperature, seed=2, ignore_eos=True)
    first, text = free.token_ids[0], free.text
    stops = {"stop_token_ids": [first, *free.token_ids[1:3]], "stop": [text[0]]}
    common = {"temperature": temperature, "seed": 2, "ignore_eos": True}
    assert len(answer(llm, **common, **stops).token_ids) == 1
    long = answer(llm, **common, **stops, min_tokens=4).token_ids
    assert len(long) > 4
    assert not set(long[:4]) & set(stops["stop_token_ids"])
    bias = {tiny_llm.END: 50.0}
    common = {"temperature": temperature, "seed": 2}
    assert answer(llm, **common, logit_bias=bias).token_ids == [tiny_llm.END]
    late = answer(llm, **common, logit_bias=bias, min_tokens=5)
    assert late.token_ids[5:] == [tiny_llm.END]
    assert tiny_llm.END not in late.token_ids[:5]


def test_min_tokens_raises_what_nobody_has_limited(llm: LLM) -> None:
    room = llm.max_model_len - len(llm.tokenizer(PROMPT)["input_ids"])
    assert len(answer(llm, max_tokens=None, min_tokens=room, ignore_eos=True).token_ids) == room


def test_what_ended_an_answer_is_told(llm: LLM) -> None:
    free = answer(llm, ignore_eos=True)
    third = free.token_ids[2]
    assert third not in free.token_ids[:2]
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    by_token = answer(llm, ignore_eos=True, stop_token_ids=[third])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", third)
    by_end = answer(llm, logit_bias={tiny_llm.END: 50.0}, stop_token_ids=[tiny_llm.END])
    assert (by_end.finish_reason, by_end.stop_reason) == ("stop", None)
    ids = llm.tokenizer("xyz")["input_ids"]
    by_text = answer(llm, regex="xyz.*", stop=["q", "yz"])
    assert by_text.token_ids == ids
    assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == ("x", "stop", "yz")


def test_the_text_may_have_what_ended_it(llm: LLM) -> None:
    (y,) = llm.tokenizer("y")["input_ids"]
    common = {"regex": "xyz.*", "include_stop_str_in_output": True}
    assert answer(llm, **common, stop=["yz"]).text == "xyz"
    assert answer(llm, **common, stop_token_ids=[y]).text == "xy"
    assert answer(llm, **common, stop_token_ids=[y], stop=["q"]).text == "xy"
    assert answer(llm, regex="xyz.*", stop_token_ids=[y]).text == "x"


def test_a_branch_has_to_be_as_long_as_the_request(llm: LLM) -> None:
    from quire.scheduler.request_options import RequestOptions

    engine = llm.engine
    params = SamplingParams(max_tokens=8, min_tokens=8, logit_bias={tiny_llm.END: 50.0})
    request_id = engine.submit(llm.tokenizer(PROMPT)["input_ids"], RequestOptions(params))
    while len(engine.scheduler.requests[request_id].sequences[0].output_ids) < 3:
        engine.step()
    child = engine.fork(request_id)
    ended = {}
    while engine.has_work:
        ended |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert ended[child].token_ids == ended[request_id].token_ids[3:]
    assert len(ended[child].token_ids) == 5
