"""Speculation on a real model: tokens, log probabilities and texts are those without, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support import state_layers, tiny_llm
from support.architectures import tiny
from support.drafts import SteadySpeculation, TruthProposer, texts_of

from quire import LLM, SamplingParams
from quire.config import PROPOSERS, EngineConfig
from quire.errors import ArgumentError
from quire.memory.placement import unsupported_reason

PROMPTS = [[(7 * i + j * j) % 90 + 5 for j in range(20 + 9 * i)] for i in range(3)]
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=16, temperature=1.0, seed=11, n=2, logprobs=0, presence_penalty=0.4),
    SamplingParams(max_tokens=16, temperature=1.0, seed=5, top_p=0.9, stop=["e", "9"], logprobs=1),
    SamplingParams(max_tokens=16, temperature=0.9, seed=5, regex="[a-z ]{3,12}x", logprobs=1),
]


def speculate(llm: LLM, texts: list[list[int]], share: float) -> SteadySpeculation:
    made = SteadySpeculation(TruthProposer(texts, share, llm._opened.model.loaded.vocab_size), 5)
    llm.engine.scheduler.speculation = llm.engine._speculation = made
    return made


def answers(llm: LLM) -> list[Any]:
    found: list[Any] = []
    for params in PARAMS:
        for output in llm.generate(PROMPTS, params):
            found += [
                (o.token_ids, o.text, o.logprobs, o.finish_reason, o.stop_reason) for o in output.outputs
            ]
    return found


def check(**options: Any) -> None:
    with tiny_llm.llm(**options) as llm:
        expected = answers(llm)
        texts = [text for params in PARAMS for text in texts_of(llm.generate(PROMPTS, params))]
    with tiny_llm.llm(**options) as llm:
        drafts = speculate(llm, texts, 0.7)
        assert answers(llm) == expected
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
        llm.engine._cache.check()
        stats = llm.stats()
        assert (stats["held"], stats["num_sequences"]) == (0, 0)


# Each value once, and in CI more of them alone.
VIRTUAL = unsupported_reason() is None
STORAGES: list[Any] = [
    {"storage": "virtual:4KiB" if VIRTUAL else "paged:4", "window": 9, "kv_dtype": "int8"},
    {"storage": "paged:4", "host_cache": "1MiB", "cache_write": "through"},
    {"storage": "contiguous", "max_model_len": 120},
    {"storage": "growing", "max_model_len": 120},
    *(
        pytest.param(options, marks=pytest.mark.ci)
        for options in (
            {"storage": "paged", "window": 9},
            {"prefix_caching": False},
            {"kv_dtype": "int8"},
            {"kv_dtype": "int4"},
            {"kv_dtype": "k8v4", "window": 9},
            *([{"storage": "virtual:4KiB"}, {"storage": "virtual:4KiB", "window": 9}] if VIRTUAL else []),
        )
    ),
]


@pytest.mark.parametrize("options", STORAGES, ids=lambda options: "-".join(map(str, options.values())))
def test_every_storage_and_format_gives_the_bits_without_drafts(options: dict[str, Any]) -> None:
    check(**options)


@cache
def model(name: str) -> Any:
    return tiny(name)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "llama4_text",
        *(pytest.param(name, marks=pytest.mark.ci) for name in ("gemma3_text", "qwen3_moe", "gpt_oss")),
    ],
)
def test_latents_chunks_windows_and_experts_give_the_bits_without_drafts(name: str) -> None:
    vocab_size = model(name).config.vocab_size
    prompts = [[token % (vocab_size - 2) + 1 for token in prompt] for prompt in PROMPTS]
    params = [PARAMS[0], replace(PARAMS[1], ignore_eos=True)]
    options = {"kv_memory": "2MiB", "block_size": 4, "max_model_len": 100}

    def run(llm: LLM) -> list[Any]:
        return [llm.generate(prompts, one) for one in params]

    def answers_of(outputs: list[Any]) -> list[Any]:
        return [(o.token_ids, o.logprobs) for some in outputs for output in some for o in output.outputs]

    with LLM((model(name), None), **options) as llm:
        expected = run(llm)
    with LLM((model(name), None), **options) as llm:
        drafts = speculate(llm, [text for some in expected for text in texts_of(some)], 0.7)
        assert answers_of(run(llm)) == answers_of(expected)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


def test_a_stream_and_the_proposers_of_the_option_give_the_same_tokens() -> None:
    repeated = [[5, 6, 7, 8, 9, 10] * 6, [7, 9, 11] * 12]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with tiny_llm.llm() as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(repeated, params)]
    for name in (*PROPOSERS, f"{PROPOSERS[0]}:2", "auto"):
        with tiny_llm.llm(speculation=name) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(repeated, params)] == expected
            texts = [tiny_llm.tokenizer().decode(tokens) for tokens in expected]
            assert ["".join(llm.stream(prompt, params)) for prompt in repeated] == texts
            assert llm.stats()["num_draft_tokens"] > 0


def test_models_whose_rows_cannot_be_checked_together_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"state layers.*`speculation`"):
        LLM((state_layers.tiny_model("mamba2"), None), kv_memory="2MiB", speculation="ngram")
    with LLM((state_layers.tiny_model("mamba2"), None), kv_memory="2MiB", speculation="auto") as llm:
        assert "num_drafts" not in llm.stats()
    for wrong in ("ngrams", "ngram:0", "ngram:99", "off:3", "model:folder:4", "mtp"):
        with pytest.raises(ArgumentError, match=r"expected .*got .*`speculation`"):
            EngineConfig(speculation=wrong)
