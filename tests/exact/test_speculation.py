"""Speculation on a real model: tokens, log probabilities and texts are those without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from support import state_layers, tiny_llm
from support.architectures import tiny
from support.drafts import SteadySpeculation, TruthProposer, texts_of
from support.every_type import build
from support.preempted import generate_preempted
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.config import PROPOSERS, EngineConfig
from quire.engine.kv_capacity import fit_within, kv_layout
from quire.engine.serving_plan import plan
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


STATE_FAMILIES: list[Any] = [
    *(("native", name) for name in ("lfm2", "mamba2", "qwen3_next")),
    ("python", "granitemoehybrid"),
    *(
        pytest.param(backend, name, marks=pytest.mark.ci)
        for backend in ("native", "python")
        for name in state_layers.FAMILIES
    ),
]


@pytest.mark.parametrize(("backend", "name"), STATE_FAMILIES)
def test_states_go_back_to_the_last_accepted_draft(backend: str, name: str) -> None:
    """In chunks, with hits, and with answers that are continued; slots hold NaN before they are written.

    The products of the python back end depend on the number of rows: there the log probabilities differ by rounding.
    """
    if backend == "native":
        pytest.importorskip("quire._native")
    if name == "mamba2" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"Mamba 2 of transformers {transformers.__version__} takes no cache")
    served = state_layers.tiny_model(name)
    vocab_size = served.config.get_text_config().vocab_size
    prompts = [[token % (vocab_size - 2) + 1 for token in prompt] for prompt in PROMPTS]
    params = [replace(PARAMS[0], max_tokens=12), replace(PARAMS[1], max_tokens=12, ignore_eos=True)]
    options = {
        "kv_memory": "8MiB",
        "block_size": 4,
        "max_model_len": 100,
        "max_batch_tokens": 24,
        "backend": backend,
    }

    def run(llm: LLM) -> list[Any]:
        found = [llm.generate(prompts, one) for one in params]
        turns = [[*text, 3, 4, 5] for some in found for text in texts_of(some)]
        return [*found, llm.generate(turns, replace(params[0], max_tokens=4))]

    def answers_of(outputs: list[Any], about: Callable[[Any], Any] = lambda entry: entry) -> list[Any]:
        return [
            (output.num_cached_tokens, [(o.token_ids, list(map(about, o.logprobs))) for o in output.outputs])
            for some in outputs
            for output in some
        ]

    with LLM((served, None), **options) as llm:
        expected = run(llm)
    with LLM((served, None), speculation="ngram:5", **options) as llm:
        llm._opened.storage.states.fill(float("nan"))
        drafts = speculate(llm, [text for some in expected for text in texts_of(some)], 0.7)
        about = partial(pytest.approx, abs=1e-4) if backend == "python" else lambda entry: entry
        assert answers_of(run(llm)) == answers_of(expected, about)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
        llm._opened.cache.check()


@pytest.mark.parametrize(("name", "preemption"), [("falcon_h1", "swap"), ("lfm2", "recompute")])
def test_preempted_states_give_the_bits_without_drafts(name: str, preemption: str) -> None:
    pytest.importorskip("quire._native")
    served = state_layers.tiny_model(name)
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=3, ignore_eos=True, logprobs=2)
    options = {"kv_memory": "8MiB", "block_size": 4, "max_model_len": 100, "preemption": preemption}
    prompts = [[token % 50 + 2 for token in prompt] for prompt in PROMPTS]
    with LLM((served, None), **options) as llm:
        expected = llm.generate(prompts, params)
    with LLM((served, None), speculation="ngram:3", **options) as llm:
        drafts = speculate(llm, texts_of(expected), 0.6)
        found = generate_preempted(llm, prompts, params)
        assert [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found] == [
            (o.outputs[0].token_ids, o.outputs[0].logprobs) for o in expected
        ]
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
        llm._opened.cache.check()


def test_the_memory_of_drafts_is_in_the_budget_and_the_plan(tmp_path: Path) -> None:
    served = state_layers.tiny_model("lfm2")
    config = EngineConfig(speculation="ngram:4", kv_memory="2MiB", max_num_seqs=8, block_size=4)
    with LLM((served, None), config=config) as llm:
        cache: Any = llm._opened.cache
        assert cache.num_draft_slots == llm.engine._speculation._max_step_drafts == 32
        assert llm._opened.budget.num_bytes <= 2 << 20
        assert "(32 for drafts)" in str(llm._opened.budget)
        llm.resize("1MiB")
        assert cache.num_draft_slots == 32
        with pytest.raises(ArgumentError, match="expected a kv_memory of at least"):
            llm.resize(33 * llm.spec.bytes_per_state)
        assert cache.num_draft_slots == 32
    layout = kv_layout("paged", config, llm.spec, 64)
    fit = fit_within(config, layout, 64, 1 << 30)
    without = fit_within(replace(config, speculation="off"), layout, 64, 1 << 30)
    assert fit.num_draft_slots == 32
    assert fit.max_num_sequences(64) < without.max_num_sequences(64)
    served.config.save_pretrained(tmp_path)
    planned = plan(tmp_path, config=config, context=64, memory="4GiB")
    assert planned.num_state_slots == fit.num_state_slots
    [row] = [row for row in planned.rows if row.name == "draft slots"]
    assert row.num_bytes == 32 * llm.spec.bytes_per_state
    small = replace(config, kv_memory=3 * llm.spec.bytes_per_state)
    with pytest.raises(ArgumentError, match=r"two states of \d+ bytes, 1 for drafts and"):
        fit_within(small, layout, 64, 1 << 30)


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
    with pytest.raises(ArgumentError, match=r"own forward.*`speculation`"):
        LLM((build(AutoModelForCausalLM, "rwkv"), None), kv_memory="2MiB", speculation="ngram")
    with LLM((build(AutoModelForCausalLM, "rwkv"), None), kv_memory="2MiB", speculation="auto") as llm:
        assert "num_drafts" not in llm.stats()
    for wrong in (
        "ngrams",
        "ngram:0",
        "ngram:99",
        "off:3",
        "model",
        "model:",
        "model::4",
        "model:folder:0",
        "model:folder:99",
        "mtp",
    ):
        with pytest.raises(ArgumentError, match=r"expected .*got .*`speculation`"):
            EngineConfig(speculation=wrong)
