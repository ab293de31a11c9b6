"""A request that goes on behind tokens which another engine drew: tokens, log probabilities, text and end as without a
break, at each position."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support import tiny_llm
from support.cache_case import BACKENDS

from quire import LLM, AsyncEngine, SamplingParams
from quire.errors import ArgumentError
from quire.scheduler.prompts import Prompt
from quire.scheduler.request_options import BegunAnswer, RequestOptions

PROMPT = [(7 * position) % 90 + 5 for position in range(37)]
LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=2)
CASES = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=1.3, seed=7, top_p=0.9),
    "unseeded": replace(GREEDY, temperature=1.3),
    "penalties": replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.4),
    "minimum": replace(GREEDY, ignore_eos=False, min_tokens=6, logit_bias={tiny_llm.END: 100.0}),
    "bad words": replace(GREEDY, temperature=1.0, seed=3, bad_words=["a", "b", "ab"]),
    "regex": replace(GREEDY, temperature=1.0, seed=5, ignore_eos=False, regex="[a-f]{4,9}x?"),
    "prompt scores": replace(GREEDY, prompt_logprobs=1),
}


@pytest.fixture(scope="module", params=BACKENDS)
def llms(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """The engine that is lost, and the one that goes on, with chunks of another size."""
    with (
        tiny_llm.llm(backend=request.param) as one,
        tiny_llm.llm(backend=request.param, max_batch_tokens=16) as other,
    ):
        yield one, other


async def read(llm: LLM, options: RequestOptions) -> tuple[int, Any, list[Any]]:
    """(seed, the output of the tokens drawn before, the further outputs)."""
    engine = AsyncEngine(llm)
    (stream,) = await engine.begin([(Prompt(None, PROMPT), replace(options, deltas=True))])
    outputs = [output async for output in stream]
    assert stream.seed is not None
    return stream.seed, stream.drawn, outputs


def answer(outputs: list[Any]) -> dict[str, Any]:
    parts = [output.outputs[0] for output in outputs]
    return {
        "token_ids": [token for part in parts for token in part.token_ids],
        "logprobs": [entry for part in parts for entry in part.logprobs or []],
        "text": "".join(part.new_text for part in parts),
        "end": (parts[-1].finish_reason, parts[-1].stop_reason),
    }


@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_at_each_position_as_without_a_break(llms: tuple[LLM, LLM], case: str) -> None:
    one, other = llms
    seed, drawn, outputs = asyncio.run(read(one, RequestOptions(CASES[case])))
    assert drawn is None
    whole = answer(outputs)
    for count in range(len(whole["token_ids"])):
        begun = BegunAnswer(seed, tuple(whole["token_ids"][:count]))
        own_seed, drawn, rest = asyncio.run(read(other, RequestOptions(CASES[case], begun=begun)))
        assert own_seed == seed
        found = answer(rest)
        shown = "" if drawn is None else drawn.outputs[0].new_text
        assert (drawn is None) == (count == 0)
        assert shown + found["text"] == whole["text"]
        assert whole["text"].startswith(shown)
        assert found["token_ids"] == whole["token_ids"][count:]
        assert found["end"] == whole["end"]
        if one.cache.backend == "native":  # the other is not exact
            assert found["logprobs"] == whole["logprobs"][count:]
        assert rest[-1].num_cached_tokens <= len(PROMPT)


def test_a_stop_string_across_the_break_ends_the_answer(llms: tuple[LLM, LLM]) -> None:
    one, other = llms
    _, _, outputs = asyncio.run(read(one, RequestOptions(GREEDY)))
    text = answer(outputs)["text"]
    stopping = replace(GREEDY, stop=text[3:9])
    seed, _, outputs = asyncio.run(read(one, RequestOptions(stopping)))
    whole = answer(outputs)
    assert whole["end"] == ("stop", text[3:9])
    for count in range(1, len(whole["token_ids"])):
        begun = BegunAnswer(seed, tuple(whole["token_ids"][:count]))
        _, drawn, rest = asyncio.run(read(other, RequestOptions(stopping, begun=begun)))
        found = answer(rest)
        assert (drawn.outputs[0].new_text + found["text"], found["end"]) == (whole["text"], whole["end"])


@pytest.mark.parametrize(
    ("more", "tokens", "problem"),
    [
        ({}, range(LENGTH), "less than max_tokens 12 tokens, got 12"),
        ({"n": 2}, [5], "n=1 and beam_width=1, got 2"),
        ({}, [tiny_llm.VOCAB_SIZE], "token ids of 0 to 257, got 258"),
        ({"stop_token_ids": [9]}, [8, 9], "got its end"),
    ],
)
def test_tokens_that_no_answer_goes_on_behind_are_refused(
    llms: tuple[LLM, LLM], more: dict[str, Any], tokens: Any, problem: str
) -> None:
    options = RequestOptions(replace(GREEDY, **more), begun=BegunAnswer(1, tuple(tokens)))
    with pytest.raises(ArgumentError, match=problem):
        asyncio.run(read(llms[1], options))
    assert llms[1].stats()["num_unfinished_requests"] == 0
