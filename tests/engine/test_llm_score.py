"""`LLM.score` and `AsyncEngine.score`: log probabilities of given tokens, against a float64 forward of the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import tiny_llm

from quire import LLM, AsyncEngine, SamplingParams
from quire.backends import extension
from quire.engine.scored_prompt import ScoredPrompt, perplexity_of
from quire.errors import ArgumentError, CancelledError, PromptError
from quire.scheduler.request import CompletionOutput, RequestOutput

IDS = [(7 * i * i + 3 * i) % 250 for i in range(150)]
TEXT = "def f(x): return x"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm.llm() as one:
        yield one


def reference(token_ids: list[int]) -> list[float]:
    """Of each token behind the first, by transformers in float64."""
    model: Any = tiny_llm.model().double()
    with torch.no_grad():
        table = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return [float(table[place, token]) for place, token in enumerate(token_ids[1:])]


def test_scores_are_those_of_the_model(llm: LLM) -> None:
    """150 tokens: three steps of 64, and more rows than one reduction takes."""
    (scored,) = llm.score(IDS)
    assert scored.token_ids == IDS
    assert scored.logprobs[0] is None
    expected = reference(IDS)
    assert scored.logprobs[1:] == pytest.approx(expected, abs=2e-5)
    assert scored.num_scored == len(IDS) - 1
    assert scored.total == pytest.approx(math.fsum(expected), abs=1e-3)
    assert scored.perplexity == pytest.approx(math.exp(-math.fsum(expected) / 149), rel=1e-5)


def test_several_prompts_of_several_forms(llm: LLM) -> None:
    text, ids, chat = llm.score([TEXT, IDS[:9], [{"role": "user", "content": "a"}]])
    assert llm.tokenizer.decode(text.token_ids) == TEXT
    assert ids.token_ids == IDS[:9]
    assert llm.tokenizer.decode(chat.token_ids) == "<user>a\n<assistant>"
    assert ids == llm.score(IDS[:9])[0] or ids.logprobs == llm.score(IDS[:9])[0].logprobs
    assert all(score is not None for scored in (text, ids, chat) for score in scored.logprobs[1:])


def test_start(llm: LLM) -> None:
    (whole,) = llm.score(IDS)
    (late,) = llm.score(IDS, start=100)
    assert late.logprobs == [None] * 100 + whole.logprobs[100:]
    assert late.num_scored == 50
    each = llm.score([IDS, IDS[:20]], start=[140, 0])
    assert [scored.num_scored for scored in each] == [10, 19]


def test_behind_a_start_the_keys_and_values_of_a_hit_are_used(llm: LLM) -> None:
    prompt = [(11 * i + 5) % 240 for i in range(100)]
    llm.score(prompt)
    (scored,) = llm.score([*prompt, 1, 2, 3], start=100)
    assert scored.num_cached_tokens >= 99
    with tiny_llm.llm() as other:
        assert other.score([*prompt, 1, 2, 3], start=100)[0].logprobs == scored.logprobs


@pytest.mark.skipif(extension() is None, reason="plain Python promises no bits")
def test_scores_of_an_answer_are_those_of_its_generation(llm: LLM) -> None:
    (output,) = llm.generate(
        TEXT, SamplingParams(max_tokens=20, logprobs=0, ignore_eos=True, seed=3, temperature=1.0)
    )
    (answer,) = output.outputs
    (scored,) = llm.score([*output.prompt_token_ids, *answer.token_ids], start=len(output.prompt_token_ids))
    generated = [entry[token] for entry, token in zip(answer.logprobs or [], answer.token_ids, strict=True)]
    assert scored.logprobs[len(output.prompt_token_ids) :] == generated


def test_one_token_has_no_score(llm: LLM) -> None:
    (scored,) = llm.score([5])
    assert (scored.logprobs, scored.num_scored, scored.total) == ([None], 0, 0)
    assert math.isnan(scored.perplexity)


def test_perplexity_that_no_float_holds() -> None:
    assert perplexity_of(-1e6, 1) == math.inf
    assert ScoredPrompt([1, 2], [None, -math.inf]).perplexity == math.inf


@pytest.mark.parametrize(
    ("prompts", "start", "says"),
    [
        (TEXT, -1, "expected a position of 0 or more, got -1 - in `start`"),
        (TEXT, "a", "one for each of the 1 prompts|expected a position"),
        (TEXT, 1.5, "got 1.5 - in `start`"),
        (TEXT, True, "got True - in `start`"),
        ([TEXT, TEXT], [1], "one for each of the 2 prompts, got 1 - in `start`"),
    ],
)
def test_bad_starts(llm: LLM, prompts: Any, start: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        llm.score(prompts, start=start)


def test_bad_prompts(llm: LLM) -> None:
    with pytest.raises(PromptError):
        llm.score("")
    with pytest.raises(PromptError):
        llm.score([IDS * 2])  # longer than the model's longest sequence


def test_a_request_that_was_ended_has_no_scores() -> None:
    fields: Any = {
        "request_id": "r",
        "prompt": None,
        "prompt_token_ids": [1],
        "num_cached_tokens": 0,
        "finished": True,
    }
    failed = RequestOutput(
        **fields, outputs=[CompletionOutput(0, "", [], "error", error=MemoryError("full"))]
    )
    with pytest.raises(MemoryError, match="full"):
        ScoredPrompt.of(failed)
    with pytest.raises(CancelledError, match="ended elsewhere"):
        ScoredPrompt.of(RequestOutput(**fields, outputs=[CompletionOutput(0, "", [], "abort")]))


def test_awaited(llm: LLM) -> None:
    async def main() -> list[ScoredPrompt]:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(ArgumentError, match="in `start`"):
                await engine.score(IDS, start=-1)
            return await engine.score([TEXT, IDS], start=[0, 100])

    found = asyncio.run(main())
    expected = llm.score([TEXT, IDS], start=[0, 100])
    assert [scored.logprobs for scored in found] == [scored.logprobs for scored in expected]


def test_a_failed_prompt_ends_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(output: RequestOutput) -> ScoredPrompt:
        raise MemoryError("full")

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(ScoredPrompt, "of", fail)
            with pytest.raises(MemoryError):
                await engine.score([IDS, IDS[:50]])
            assert not engine._requests

    asyncio.run(main())
