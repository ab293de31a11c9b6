"""The same request gives the same bits, with any other requests and any chunking (docs/exactness.md).

Logits (as bytes), tokens and logprobs of every drawn position against those of the request alone: one prompt in one
piece, one thread, blocks of 16, nothing cached. Drawn at random: how many requests, whether they arrive together, the
prefix they share, block size, budget of a step (chunks, and rows of a forward), room (preemptions), threads, caching.
The pool is poisoned with NaN and handed out in shuffled order (`EngineRun`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import attention_of, randomize
from support.at_length import at_length
from support.engine_run import Answer, EngineRun
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire.weights import load

native = pytest.importorskip("quire._native")

MAX_TOKENS = 6
MAX_LENGTH = 3000
# Numbers of rows around the sizes of register tiles, of blocks of rows, and beyond.
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129]
# Widths that are no multiple of a vector, GQA groups of 5, 3 and 1, heads of 24 and 40.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 100, "intermediate_size": 1365, "num_attention_heads": 5, "num_key_value_heads": 1,
              "head_dim": 24},
    "gemma2": {"hidden_size": 72, "intermediate_size": 688, "num_attention_heads": 9, "num_key_value_heads": 3,
               "head_dim": 40, "query_pre_attn_scalar": 40, "sliding_window": 70, "attn_logit_softcapping": 5.0,
               "final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_moe": {"hidden_size": 120, "intermediate_size": 100, "moe_intermediate_size": 100, "num_experts": 9,
                  "num_experts_per_tok": 3, "shared_expert_intermediate_size": 52, "num_attention_heads": 5,
                  "num_key_value_heads": 5, "decoder_sparse_step": 1},
    "deepseek_v3": {"hidden_size": 100, "intermediate_size": 140, "moe_intermediate_size": 100,
                    "num_attention_heads": 5, "num_key_value_heads": 5, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 36,
                    "kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """How the requests are served."""

    num_requests: int = 5
    shared: int = 40  # tokens all prompts begin with
    long: bool = False  # the first prompt reaches into a third partial (of 512 tokens)
    together: bool = True
    block_size: int = 16
    max_batch_tokens: int = 64
    room: float = 50.0  # of the longest prompts, the pool holds so many at once
    num_threads: int = 1
    prefix_caching: bool = True

    def prompts(self) -> list[tuple[int, ...]]:
        return [_prompt(index, self.shared, self.long and index == 0) for index in range(self.num_requests)]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    yield
    native.set_num_threads(2)


def _tokens(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 250) for _ in range(length)]


@cache
def _prompt(index: int, shared: int, long: bool) -> tuple[int, ...]:
    return (*_tokens(-1, shared), *_tokens(index, 1100 if long else 1 + 11 * index % 37))


@cache
def _model(name: str, dtype: torch.dtype, copy: int = 0) -> PreTrainedModel:
    """`copy`: an LLM changes its model while it is open, so two of them need two."""
    if name == "embedded":
        return load(None, dtype=str(dtype).removeprefix("torch.")).model
    fields = {"vocab_size": 251, "num_hidden_layers": 2, "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}  # fmt: skip
    torch.manual_seed(7)
    config = AutoConfig.for_model(name, **{**fields, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention_of(config))
    randomize(model)
    return model.to(dtype).eval()


_alone: dict[tuple[str, torch.dtype, tuple[int, ...]], Answer] = {}


def _expected(name: str, dtype: torch.dtype, prompts: list[tuple[int, ...]]) -> list[Answer]:
    """The answers to prompts run alone, each in one piece."""
    missing = [prompt for prompt in dict.fromkeys(prompts) if (name, dtype, prompt) not in _alone]
    if missing:
        model = _model(name, dtype, 1)
        options = {"block_size": 16, "max_batch_tokens": 4096, "prefix_caching": False, "num_threads": 1}
        run = EngineRun(
            model, [list(max(missing, key=len))], MAX_TOKENS, backend="native", room=1.0, **options
        )
        with run.llm:
            for prompt in missing:
                run.prompts = [list(prompt)]
                (_alone[name, dtype, prompt],) = run.answer(logprobs=2)
                assert run.llm.stats()["num_preemptions"] == 0
    return [_alone[name, dtype, prompt] for prompt in prompts]


def check(name: str, dtype: torch.dtype, case: Case) -> dict[str, Any]:
    """Serve a case and compare every bit; the engine's figures, and the numbers of rows its forwards had."""
    prompts = case.prompts()
    expected = _expected(name, dtype, prompts)
    run = EngineRun(
        _model(name, dtype),
        [list(prompt) for prompt in prompts],
        MAX_TOKENS,
        backend="native",
        room=case.room,
        block_size=case.block_size,
        max_batch_tokens=case.max_batch_tokens,
        max_num_seqs=256,
        prefix_caching=case.prefix_caching,
        num_threads=case.num_threads,
    )
    with run.llm:
        answers = run.answer(together=case.together, logprobs=2)
        stats = {**run.llm.stats(), "step_sizes": run.step_sizes}
    for index, (answer, alone) in enumerate(zip(answers, expected, strict=True)):
        assert not alone.logits.isnan().any()
        for position, (got, want) in enumerate(zip(answer.logits, alone.logits, strict=True)):
            equal = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            assert equal, f"request {index}, output {position}: {int((got != want).sum())} logits differ"
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == alone.logprobs
    return stats


CASES = st.builds(
    Case,
    num_requests=st.sampled_from([1, 2, 3, 15, 16, 17, 31, 32, 33]),
    shared=st.sampled_from([0, 3, 37, 64, 513, 530]),
    long=st.sampled_from([False, False, True]),
    together=st.booleans(),
    block_size=st.sampled_from([1, 2, 4, 7, 16, 32, 100]),
    max_batch_tokens=st.sampled_from([*ROWS, 2048]),
    room=st.sampled_from([1.0, 1.5, 3.0, 50.0]),
    num_threads=st.sampled_from([1, 2]),
    prefix_caching=st.sampled_from([True, True, False]),
)
BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # each by default in one type
        pytest.param(name, dtype, marks=[pytest.mark.ci] * ((number + place) % 2))
        for number, name in enumerate(MODELS)
        for place, dtype in enumerate(BOTH)
    ],
    ids=str,
)
def test_alone_and_among_32_others(name: str, dtype: torch.dtype) -> None:
    """One prompt over three partials, chunks, a shared prefix that ends within a block, two threads, in one go."""
    stats = check(
        name,
        dtype,
        Case(num_requests=33, shared=45, long=True, block_size=7, max_batch_tokens=129, num_threads=2),
    )
    assert stats["num_cached_tokens"] > 0
    assert 129 in stats["step_sizes"]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", MODELS)
def test_preempted_and_recomputed(name: str, dtype: torch.dtype) -> None:
    stats = check(name, dtype, Case(num_requests=9, shared=5, block_size=2, max_batch_tokens=33, room=1.0))
    assert stats["num_preemptions"] > 0


@pytest.mark.parametrize(
    ("num_requests", "dtype"),
    [  # each number by default in one type
        pytest.param(num_requests, dtype, marks=[pytest.mark.ci] * ((number + place) % 3 != 0))
        for number, num_requests in enumerate([1, 2, 17, 65])
        for place, dtype in enumerate([*BOTH, torch.float16])
    ],
    ids=str,
)
def test_decodes_of_many_at_once(num_requests: int, dtype: torch.dtype) -> None:
    stats = check("qwen3", dtype, Case(num_requests=num_requests, shared=0, max_batch_tokens=2048))
    assert num_requests in stats["step_sizes"]


@settings(max_examples=4, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    dtype=st.sampled_from(BOTH),
    case=CASES.map(lambda case: replace(case, long=False, num_requests=min(case.num_requests, 9))),
)
def test_however_it_is_served(name: str, dtype: torch.dtype, case: Case) -> None:
    check(name, dtype, case)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [*BOTH, torch.float16])
@pytest.mark.parametrize("name", [*MODELS, "embedded"])
def test_however_it_is_served_at_length(name: str, dtype: torch.dtype) -> None:
    @settings(max_examples=at_length(25), deadline=None)
    @given(CASES)
    def served(case: Case) -> None:
        check(name, dtype, case)

    served()


@pytest.mark.ci
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("name", [*MODELS, "embedded"])
def test_any_number_of_rows(name: str, num_rows: int, dtype: torch.dtype) -> None:
    """As decodes of so many sequences, and as chunks of so many tokens."""
    stats = check(
        name, dtype, Case(num_requests=num_rows, shared=2, max_batch_tokens=4096, room=1.0 + num_rows)
    )
    assert num_rows in stats["step_sizes"]
    stats = check(name, dtype, Case(num_requests=2, shared=130, max_batch_tokens=num_rows))
    assert num_rows in stats["step_sizes"]


def test_the_check_can_fail() -> None:
    _expected("qwen3", torch.float32, (prompts := Case(num_requests=1).prompts()))
    key = ("qwen3", torch.float32, prompts[0])
    before = _alone[key]
    changed = before.logits.clone()
    changed.view(torch.int32)[2, 3] ^= 1  # one bit
    _alone[key] = replace(before, logits=changed)
    try:
        with pytest.raises(AssertionError, match="request 0, output 2: 1 logits differ"):
            check("qwen3", torch.float32, Case(num_requests=1))
    finally:
        _alone[key] = before
