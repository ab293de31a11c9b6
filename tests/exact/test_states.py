"""Models with state layers in the engine: the tokens of `model.generate`, and the same bits in every way of serving.

Hits end at checkpoints: the same prompt again computes its last token, a next turn its new tokens. Slots are poisoned
with NaN before anything runs.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.generate_oracle import generate
from support.preempted import generate_preempted
from support.state_layers import FAMILIES, tiny_model
from transformers import PreTrainedModel

from quire import LLM, KVSpec, SamplingParams
from quire.errors import ArgumentError, CapacityError
from quire.memory.placement import unsupported_reason
from quire.memory.state_slots import StateSlots
from quire.model.cache_keyword import cache_keyword
from quire.server.metrics import Metrics
from quire.sizes import format_size

SOME = ("falcon_h1", "kimi_linear", "lfm2", "mamba2", "qwen3_next", "zaya")
MORE = (
    "bailing_hybrid", "bamba", "falcon_mamba", "granitemoehybrid", "jamba", "lara_mini", "lfm2_moe", "lfm3", "mamba",
    "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
# In 16 bits those whose code is peculiar there, and at length all.
EVERY_BIT = [
    *((name, torch.float32) for name in SOME),
    ("mamba", torch.bfloat16),
    ("falcon_mamba", torch.float16),
    ("jamba", torch.float16),
    ("minimax", torch.bfloat16),
    ("minimax", torch.float16),
    ("zamba2", torch.float16),
    *(pytest.param(name, torch.float32, marks=pytest.mark.ci) for name in MORE),
    *(pytest.param(name, torch.bfloat16, marks=pytest.mark.ci) for name in (*SOME, *MORE)),
    *(pytest.param(name, torch.float16, marks=pytest.mark.ci) for name in (*SOME, *MORE)),
]
MAX_TOKENS = 10
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
_DRAW = random.Random(3)
_SHARED = [_DRAW.randrange(2, 60) for _ in range(19)]
PROMPTS = [
    [7],
    [_DRAW.randrange(2, 60) for _ in range(5)],
    [*_SHARED, 5, 6],
    [*_SHARED, 9, 8, 7, 6],
    [_DRAW.randrange(2, 60) for _ in range(41)],
]


@cache
def expected(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    if name not in FAMILIES:
        pytest.skip(f"this transformers has no {name}")
    model = tiny_model(name)
    if cache_keyword(model.forward) is None:
        pytest.skip("in this transformers its forward takes a cache by a name that Quire does not know")
    answers = [
        generate(model, prompt, MAX_TOKENS, eos_token_id=None, pad_token_id=0)[0] for prompt in PROMPTS
    ]
    return model, answers


def serve(model: PreTrainedModel, **options: Any) -> LLM:
    llm = LLM(
        (model, None),
        **{
            "kv_memory": "8MiB",
            "block_size": 4,
            "max_batch_tokens": 11,
            "max_num_seqs": 4,
            "max_model_len": 128,
            **options,
        },
    )
    storage: Any = llm._opened.storage
    storage.fill(float("nan"))
    storage.states.fill(float("nan"))
    return llm


def answers_of(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, GREEDY)]


def _check(name: str, backend: str, storage: str) -> None:
    model, tokens = expected(name)
    with serve(model, backend=backend, storage=storage) as llm:
        assert [list(one.token_ids) for one in answers_of(llm, PROMPTS)] == tokens
        again = llm.generate(PROMPTS, GREEDY)
        assert [list(one.outputs[0].token_ids) for one in again] == tokens
        assert [one.num_cached_tokens for one in again] == [len(prompt) - 1 for prompt in PROMPTS]
        turn = [*PROMPTS[4], *tokens[4], 11, 12, 13]
        output = llm.generate([turn], GREEDY)[0]
        # The last token of an answer is drawn and never computed.
        assert output.num_cached_tokens == len(PROMPTS[4]) + MAX_TOKENS - 1
        llm._opened.cache.check()


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", SOME)
def test_tokens_are_generates(name: str, backend: str) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    _check(name, backend, "paged")


@pytest.mark.skipif(unsupported_reason() is not None, reason="no virtual storage on this machine")
def test_tokens_are_generates_on_virtual_storage() -> None:
    _check("falcon_h1", "python", "virtual")


@pytest.mark.ci
@pytest.mark.parametrize("name", MORE)
def test_tokens_of_every_family(name: str) -> None:
    _check(name, "native", "paged")


@pytest.mark.parametrize(("name", "dtype"), EVERY_BIT)
def test_bits_do_not_depend_on_chunks_hits_or_company(name: str, dtype: torch.dtype) -> None:
    """Logprobs, of float32 logits, are compared as they are."""
    pytest.importorskip("quire._native")
    model, _ = expected(name)
    model = copy.deepcopy(model).to(dtype=dtype)
    prompt = PROMPTS[4]
    with serve(model, max_batch_tokens=64, prefix_caching=False) as llm:
        alone = answers_of(llm, [prompt])[0]
    for options in (
        {"max_batch_tokens": 7},
        {"max_batch_tokens": 64, "num_threads": 1},
        {"block_size": 16, "checkpoint_every": 8},
    ):
        with serve(model, **options) as llm:
            for _ in range(2):  # cold, and from a checkpoint
                got = answers_of(llm, PROMPTS)[4]
                assert (got.token_ids, got.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_go_on_from_checkpoints_or_their_own_state(preemption: str) -> None:
    model, tokens = expected("qwen3_next")
    spec = KVSpec.from_config(model.config)
    # Four states, and blocks of the longest prompt with its answer.
    kv_memory = 4 * spec.bytes_per_state + 60 * spec.bytes_per_token
    options: dict[str, Any] = {"preemption": preemption, "max_model_len": None}
    if preemption == "swap":
        options["swap_memory"] = "8MiB"
    with serve(model, kv_memory=kv_memory, backend="python", **options) as llm:
        for _ in range(2):
            assert [list(one.token_ids) for one in answers_of(llm, PROMPTS)] == tokens
            llm._opened.cache.check()
        stats = llm.stats()
        assert stats["num_preemptions"] > 0
        assert (stats["num_restored_tokens"] > 0) == (preemption == "swap")


@pytest.mark.parametrize(
    "name", ["falcon_h1", "mamba2", pytest.param("recurrent_gemma", marks=pytest.mark.ci)]
)
def test_bits_do_not_depend_on_being_swapped_out(name: str) -> None:
    pytest.importorskip("quire._native")
    model, _ = expected(name)
    with serve(model, prefix_caching=False) as llm:
        wanted = [(one.token_ids, one.logprobs) for one in answers_of(llm, PROMPTS)]
    with serve(model, preemption="swap", swap_memory="8MiB") as llm:
        got = [output.outputs[0] for output in generate_preempted(llm, PROMPTS, GREEDY)]
        assert [(one.token_ids, one.logprobs) for one in got] == wanted
        assert llm.stats()["num_restored_tokens"] > 0
        llm._opened.cache.check()


def test_samples_of_one_prompt_fork_its_state() -> None:
    model, tokens = expected("lfm2")
    with serve(model, backend="python") as llm:
        output = llm.generate(
            [PROMPTS[2]], SamplingParams(n=3, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        )[0]
        assert [list(one.token_ids) for one in output.outputs] == [tokens[2]] * 3


def test_what_a_missing_state_costs_is_told() -> None:
    model, _ = expected("lfm2")
    with serve(model, backend="python") as llm:
        llm.generate([PROMPTS[2]], GREEDY)
        told = llm.monitor.explain([*_SHARED, 50, 51])
        assert (told.num_hit_tokens, told.reason) == (0, "no state")
        assert "K and V to 19, state to 0: computed from 0" in str(told)
        llm.generate([[*_SHARED, 50, 51]], GREEDY)
        assert llm.monitor.explain([*_SHARED, 40, 41]).num_hit_tokens == 19


def test_a_model_of_states_alone_has_nothing_to_map() -> None:
    model, _ = expected("mamba2")
    with pytest.raises(ArgumentError, match="storage paged for a model of states alone"):
        serve(model, backend="python", storage="virtual")
    with serve(model, backend="python", storage="auto") as llm:
        assert llm.storage == "paged"


def test_slots_are_given_back_with_the_engine() -> None:
    model, _ = expected("lfm2")
    with serve(model, backend="python") as llm:
        storage: Any = llm._opened.storage
        layer = storage.spec.states[0].layer
        assert storage.states.layer_fields(layer)
    with pytest.raises(ArgumentError, match="a layer that keeps a state"):
        storage.states.layer_fields(layer)


def test_states_are_counted() -> None:
    model, _ = expected("qwen3_next")
    spec = KVSpec.from_config(model.config)
    num_bytes = sum(
        tensor.numel() * 4
        for layer in spec.states
        for tensor in (torch.empty(field.shape, device="meta") for field in layer.fields)
    )
    assert spec.bytes_per_state == num_bytes > 0
    with serve(model, backend="python") as llm:
        llm.generate(PROMPTS, GREEDY)
        stats = llm.stats()
        assert stats["state_slots"] == 2 * 4 + 2
        assert stats["checkpoints"] > 0
        assert (
            stats["kv_memory_bytes"] == llm._opened.budget.num_blocks * llm.cache.block_bytes + 10 * num_bytes
        )
        assert f"10 states of {format_size(num_bytes)}" in str(llm._opened.budget)
        page = Metrics("m").render(stats).decode()
        assert 'quire:state_slots{model_name="m"} 10.0' in page
        assert f'quire:checkpoints{{model_name="m"}} {stats["checkpoints"]}.0' in page
        assert f'quire:short_hits_total{{model_name="m"}} {stats["short_hits"]}.0' in page


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_long_prompt_takes_the_memory_of_idle_states(backend: str) -> None:
    """And many short ones take that of idle blocks; the bits are those of fixed shares."""
    pytest.importorskip("quire._native")
    model, _ = expected("qwen3_next")
    draw = random.Random(5)
    long = [draw.randrange(2, 60) for _ in range(100)]
    short = [[draw.randrange(2, 60) for _ in range(3)] for _ in range(30)]
    one_token = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=3)

    def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(prompts, params)]

    tens = [short[first : first + 10] for first in range(0, len(short), 10)]
    with serve(model, prefix_caching=False, backend=backend) as llm:
        wanted = answers(llm, [long], GREEDY)
        for ten in tens:
            wanted += answers(llm, ten, one_token)
    kv_memory = 20 * KVSpec.from_config(model.config).bytes_per_state
    with serve(model, kv_memory=kv_memory, backend=backend, max_model_len=None) as llm:
        cache: Any = llm._opened.cache
        num_slots, num_blocks = cache.num_state_slots, cache.num_blocks
        assert (num_slots, num_blocks) == (10, 17)  # half of it each; the long prompt needs 28 blocks
        got = answers(llm, [long], GREEDY)
        assert cache.num_state_slots <= 4
        assert cache.num_blocks >= 28
        cache.check()
        llm.trim()
        most = 0
        for ten in tens * 2:
            got += answers(llm, ten, one_token)
            cache.check()
            most = max(most, len(cache.checkpoints))
        assert most > 10  # more than half of it
        assert got == [*wanted, *wanted[1:]]
        stats = llm.stats()
        assert stats["kv_memory_bytes"] <= kv_memory
        assert 10 + stats["slots_from_blocks"] - stats["slots_to_blocks"] == cache.num_state_slots
        llm.resize(kv_memory // 2)
        assert llm.kv_memory_bytes <= kv_memory // 2
        cache.check()
        with pytest.raises(CapacityError, match=r"needs 28 blocks of 14"):
            answers_of(llm, [long])
        llm.resize(kv_memory)
        cache.exchange = None
        with pytest.raises(CapacityError, match="needs 28 blocks"):
            answers_of(llm, [long])


@pytest.mark.skipif(unsupported_reason() is not None, reason="no virtual storage on this machine")
def test_states_and_blocks_of_virtual_storage_exchange_memory() -> None:
    model, _ = expected("qwen3_next")
    draw = random.Random(6)
    short = [[draw.randrange(2, 60) for _ in range(6)] for _ in range(8)]
    with serve(model, storage="virtual", kv_memory="1MiB", backend="python") as llm:
        cache: Any = llm._opened.cache
        first = answers_of(llm, short)
        stats = llm.stats()
        assert stats["slots_from_blocks"] > 0
        assert stats["slots_to_blocks"] > 0
        assert [one.token_ids for one in answers_of(llm, short)] == [one.token_ids for one in first]
        cache.check()


def test_memory_of_states_goes_back_to_the_system() -> None:
    model, answers = expected("qwen3_next")
    with serve(model, backend="python") as llm:
        states: Any = llm._opened.storage.states  # type: ignore[union-attr]
        states.give_back(range(states.num_slots))  # those that were poisoned
        before = states.bytes_committed
        llm.generate(PROMPTS, GREEDY)
        used, whole = states.bytes_committed, llm.kv_committed_bytes
        assert before < used <= whole
        llm.trim()
        assert states.bytes_committed == before
        assert llm.kv_committed_bytes <= whole - used + before
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == answers


def test_slots_that_are_needed_keep_their_bytes() -> None:
    spec = KVSpec.from_config(expected("qwen3_next")[0].config)
    slots = StateSlots(spec, 40)
    slots.fill(1.0)
    slots.give_back([3, 0, 1, 39, 12])
    for layer in spec.states:
        for field in slots.layer_fields(layer.layer).values():
            kept = [slot for slot in range(40) if slot not in (0, 1, 3, 12, 39)]
            assert bool((field[kept] == 1.0).all())
    slots.close()
    slots = StateSlots(spec, 2, 40)
    slots.fill(1.0)
    before = slots.bytes_committed
    slots.resize(40)
    assert slots.bytes_committed == before  # addresses, and no memory before it is written
    slots.apply([(1, 39)])
    assert np.array_equal(slots.read(39), slots.read(0))
    slots.resize(2)
    assert slots.bytes_committed == before
    with pytest.raises(CapacityError, match="1 to 40 state slots"):
        slots.resize(41)
    slots.close()
    slots.close()
    assert slots.bytes_committed == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "contiguous"}, "storage paged or virtual for a model with state layers"),
        ({"storage": "growing"}, "storage paged or virtual for a model with state layers"),
        ({"host_cache": "1MiB"}, "no tiers"),
        ({"kv_memory": 4096}, "two states of"),
    ],
)
def test_what_states_do_not_have_yet_is_refused(options: dict[str, Any], message: str) -> None:
    name = "qwen3_next" if "kv_memory" in options else "mamba2" if "host_cache" in options else "lfm2"
    model, _ = expected(name)
    with pytest.raises(ArgumentError, match=message):
        serve(model, backend="python", **options)
