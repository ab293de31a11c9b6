"""bfloat16: Quire's bits are the same in any batch, and its likelihood of the text is as good as the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.at_length import at_length
from support.cache_argument import CACHE
from support.preempted import generate_preempted
from support.real_text import library_text, licence_text, tokens_of
from support.scorer import model_logprobs, paged_logprobs, perplexity

from quire import LLM, SamplingParams
from quire.hf import QuireCache, accelerate, restore
from quire.model import PreparedModel
from quire.scheduler.request import RequestOutput
from quire.weights import LoadedModel, load

NUM_TOKENS = at_length(20_000)
WITHIN = 0.002  # of the model's own perplexity
LENGTHS = [5, 40, 333, 600, 1100]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load(checkpoint, dtype="bfloat16", is_dense=True)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    texts = [library_text(), licence_text()]
    return [tokens_of(loaded.tokenizer, texts[i % 2], length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, prompts: list[list[int]]) -> list[Any]:
    """Tokens and logprobs of each prompt by itself, in one chunk, without a cache of prefixes."""
    with LLM((loaded.model, None), kv_memory="512MiB", max_num_seqs=1, prefix_caching=False) as llm:
        return answers(llm, prompts)


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return [answer_of(output) for output in llm.generate(prompts, GREEDY)]


def answer_of(output: RequestOutput) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_the_same_bits_in_a_batch_in_chunks_and_from_hits(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Any]
) -> None:
    with LLM((loaded.model, None), kv_memory="512MiB", max_batch_tokens=96) as llm:
        assert answers(llm, prompts) == alone
        assert answers(llm, prompts) == alone
        assert llm.generate(prompts, GREEDY)[-1].num_cached_tokens == LENGTHS[-1] - 1


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_same_bits_when_preempted(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Any], preemption: Any
) -> None:
    with LLM((loaded.model, None), kv_memory="512MiB", preemption=preemption) as llm:
        assert [answer_of(output) for output in generate_preempted(llm, prompts, GREEDY)] == alone


def test_perplexity_is_the_models_own(loaded: LoadedModel) -> None:
    tokens = tokens_of(loaded.tokenizer, library_text(), NUM_TOKENS)
    own = perplexity(tokens, model_logprobs(loaded.model))
    prepared = PreparedModel(loaded)
    try:
        found = perplexity(tokens, paged_logprobs(prepared))
    finally:
        prepared.restore()
    print(f"perplexity of {NUM_TOKENS} tokens: the model's own {own:.4f}, Quire's {found:.4f}")
    assert abs(found / own - 1) < WITHIN, f"expected the model's own perplexity {own:.4f}, got {found:.4f}"


@pytest.fixture
def accelerated(loaded: LoadedModel) -> Iterator[LoadedModel]:
    accelerate(loaded.model)
    yield loaded
    restore(loaded.model)


def test_generate_on_a_quire_cache(accelerated: LoadedModel, prompts: list[list[int]]) -> None:
    model = accelerated.model
    for prompt in prompts[:3]:
        cache = QuireCache(model.config, kv_memory="512MiB")
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=False,
                **{CACHE: cache},
            )
        assert output.shape[1] == len(prompt) + 8
        assert len(set(output[0, len(prompt) :].tolist())) > 1
