"""The torch device on the fake card (`support.card`): the tokens of `model.generate` in every way of serving.

A read of the card's memory from the host ends the process there, and tensors of two devices do not mix. On CPU tensors,
where the machine has no compiler: `test_torch_tokens.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support import every_type, tiny_llm
from support.architectures import tiny
from support.card import card, counted, limited_memory, lost_card
from support.conversations_case import START, TURNS
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected
from support.preempted import generate_preempted
from support.running_server import running
from support.state_layers import tiny_model
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.errors import ArgumentError, BackendError, CapacityError, DeviceLostError, UnsupportedModelError
from quire.server.settings import ServerSettings

GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
TURN = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
ON_CARD: dict[str, Any] = {"device": "card:0", "backend": "torch"}
NAMES = [
    "qwen3",
    "gemma3_text",
    "bloom",
    *(
        pytest.param(name, marks=pytest.mark.ci)
        for name in ("deepseek_v3", "gpt_oss", "qwen3_moe", "gpt2", "mpt", "falcon")
    ),
]


@pytest.fixture(autouse=True)
def device() -> torch.device:
    return card()


def open_llm(name: str, **options: Any) -> LLM:
    options = {"kv_memory": "4MiB", "block_size": 4, "max_batch_tokens": 11, "max_num_seqs": 4} | options
    return LLM((expected(name)[0], None), **ON_CARD, **options)


def small_llm(**options: Any) -> LLM:
    return tiny_llm.llm(**ON_CARD, **options)


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def host_tokens(prompt: list[int], params: SamplingParams = TURN) -> list[int]:
    """The tokens of the reference on this machine, without a cached prefix."""
    with tiny_llm.llm(backend="python", prefix_caching=False) as llm:
        return tokens_of(llm, [prompt], params)[0]


@pytest.mark.parametrize("name", NAMES)
def test_cold_hit_chunked_and_swapped(name: str) -> None:
    """Prompts of up to 41 tokens in steps of 11: with room to share what begins alike, and with room for one."""
    model, tokens, logits = expected(name)
    for room in (8.0, 1.0):
        options = {"preemption": "swap", "swap_memory": "4MiB", "device": "card:0"}
        run = EngineRun(model, PROMPTS, MAX_TOKENS, backend="torch", room=room, **options)
        with run.llm:
            answers, stats = run.answer(), run.llm.stats()
        del run
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits.cpu(), want, atol=2e-3, rtol=0)
        if room == 1.0:
            assert stats["num_swapped"] > 0
            assert stats["num_restored_tokens"] > 0
        else:
            assert sum(answer.num_cached_tokens for answer in answers) > 0


def test_preempted_and_computed_again() -> None:
    _, tokens, _ = expected("qwen3")
    with open_llm("qwen3", preemption="recompute") as llm:
        outputs = generate_preempted(llm, PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == tokens


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.ci)])
def test_restored_from_a_disk_after_a_restart(name: str, tmp_path: Path) -> None:
    _, tokens, _ = expected(name)
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with open_llm(name, **options) as llm:
        assert tokens_of(llm, PROMPTS) == tokens
    with open_llm(name, **options) as llm:
        assert tokens_of(llm, [PROMPTS[3]]) == [tokens[3]]
        assert llm.stats()["num_loaded_tokens"] > 0


@pytest.mark.parametrize("params", [TURN, DRAWN], ids=["greedy", "drawn"])
def test_forks_rewinds_and_copied_blocks(params: SamplingParams) -> None:
    with small_llm() as llm:
        root = llm.conversation(START)
        root.generate(params)
        said = root.token_ids
        assert said == START + host_tokens(START, params)
        for turn in TURNS[:2]:
            branch = root.fork()
            branch.append(turn)
            output = branch.generate(params)
            assert output.outputs[0].token_ids == host_tokens(said + turn, params)
            assert output.num_cached_tokens >= len(said) - 1
        assert llm.stats()["copied_blocks"] > 0
        branch = root.fork()
        branch.rewind(21)
        assert branch.generate(params).outputs[0].token_ids == host_tokens(said[:21], params)
        llm.cache.check()


def test_a_request_under_way_is_forked() -> None:
    with small_llm() as llm:
        stream = llm.stream(START, TURN)
        next(stream)
        fork = llm.fork(stream)
        for each in (stream, fork):
            for _ in each:
                pass
        assert stream.result is not None
        assert fork.result is not None
        tokens = stream.result.outputs[0].token_ids
        assert tokens == host_tokens(START)
        assert fork.result.prompt_token_ids + fork.result.outputs[0].token_ids == START + tokens


def test_a_snapshot_is_resumed_after_a_restart_and_explained(tmp_path: Path) -> None:
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with small_llm(**options) as llm:
        conversation = llm.conversation(START)
        conversation.generate(TURN)
        conversation.snapshot("talk")
        said = conversation.token_ids
        known = llm.monitor.explain(START)
        assert (known.num_hit_tokens, known.reason) == (len(START) - 1, "complete")
    with small_llm(**options) as llm:
        assert llm.monitor.explain([*said, *TURNS[0]]).num_tier_tokens["disk"] > 0
        again = llm.resume("talk")
        again.append(TURNS[0])
        output = again.generate(TURN)
        assert output.num_tier_tokens["disk"] > 0
        assert output.outputs[0].token_ids == host_tokens(said + TURNS[0])


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_codes_are_those_of_the_reference(kv_dtype: str) -> None:
    with tiny_llm.llm(backend="python", kv_dtype=kv_dtype) as llm:
        want = tokens_of(llm, [START, TURNS[0]], TURN)
    with small_llm(kv_dtype=kv_dtype) as llm:
        assert tokens_of(llm, [START, TURNS[0]], TURN) == want


@pytest.mark.parametrize("name", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.ci)])
def test_state_layers(name: str) -> None:
    model = tiny_model(name)
    options: dict[str, Any] = {"kv_memory": "8MiB", "max_batch_tokens": 11, "max_num_seqs": 4}
    answers = []
    for place in ({"backend": "python"}, ON_CARD):
        with LLM((model, None), **options, **place) as llm:
            answers.append([tokens_of(llm, PROMPTS), tokens_of(llm, PROMPTS)])
    assert answers[0] == answers[1]


def test_drawn_tokens_and_their_log_probabilities() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.8, top_k=20, seed=3, n=2, logprobs=3, ignore_eos=True)
    found = []
    for llm in (tiny_llm.llm(backend="python"), small_llm()):
        with llm:
            found.append(llm.generate([START], params)[0].outputs)
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs is not None
        assert ours.logprobs == [pytest.approx(row, abs=1e-3) for row in theirs.logprobs or []]


def test_answers_follow_an_expression() -> None:
    """The grammar's masks are of this machine, the logits of the card."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, regex=r"[0-9]{3}-[0-9]{4}")
    with small_llm() as llm:
        ruled, free = llm.generate(["tel = ", "tel = "], [params, TURN])
        assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", ruled.outputs[0].text)
        assert free.outputs[0].token_ids == host_tokens(free.prompt_token_ids)


def test_a_server_answers_from_the_card() -> None:
    body = {"model": "any", "prompt": START, "max_tokens": 9, "temperature": 0, "logprobs": 2}
    found = []
    for llm in (tiny_llm.llm(backend="python"), small_llm()):
        with llm, running(llm, ServerSettings()) as (url, _):
            body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"][0])
            assert httpx.get(f"{url}/health").status_code == 200
            assert "quire:" in httpx.get(f"{url}/metrics").text
    ours, theirs = found
    assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"])
    assert ours["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_step_is_one_copy_there_and_one_back(name: str) -> None:
    """Its numbers and tables, and the tokens it draws with their logits; the host waits for the card once a step. The
    first step of decodes has the copies of the next one too, the last one none: it was launched ahead."""
    with open_llm(name, max_batch_tokens=64) as llm:
        engine = llm.engine
        for prompt in PROMPTS[:4]:
            engine.submit(prompt, GREEDY)
        copies = []
        while engine.has_work:
            with counted() as counts:
                engine.step()
            copies.append((counts.to_card, counts.to_host))
            assert (counts.waits, counts.races) == (1, 0)
            assert counts.to_host_bytes <= counts.to_host * 4 * (4 + 4)
        assert copies == [(1, 1), (2, 2), *[(1, 1)] * (MAX_TOKENS - 3), (0, 0)]


def test_memory_goes_back_at_the_end(device: torch.device) -> None:
    """Of a model that the engine loaded too, and while objects of a closed one are still there."""
    module: Any = torch.get_device_module(device)
    used = module.memory_allocated()
    for model in (None, (expected("qwen3")[0], None)):
        llm = LLM(model, kv_memory="4MiB", **ON_CARD)
        assert module.memory_allocated() > used + (4 << 20)
        tokens_of(llm, [PROMPTS[2]])
        llm.close()
        assert module.memory_allocated() == used


def test_weights_are_moved_once_and_a_callers_model_comes_back(device: torch.device) -> None:
    model, tokens, _ = expected("qwen3")
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.named_parameters()}
    with open_llm("qwen3") as llm:
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device}
        assert tokens_of(llm, [PROMPTS[2]]) == [tokens[2]]
    for name, tensor in model.named_parameters():
        assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1]))


def test_a_model_on_the_card_stays_there(device: torch.device) -> None:
    _, tokens, _ = expected("qwen3")
    model = tiny("qwen3").to(device)
    with LLM((model, None), kv_memory="4MiB", **ON_CARD) as llm:
        assert tokens_of(llm, PROMPTS) == tokens
    assert {tensor.device for tensor in model.parameters()} == {device}
    with pytest.raises(ArgumentError, match=r"expected a model on cpu, got .* on card:0"):
        LLM((model, None), kv_memory="4MiB")


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": change_in_place,
    "rows through .data": lambda model: model.model.layers[0].mlp.up_proj.weight.data[3:9].mul_(-9.0),
    "a norm through .data": lambda model: model.model.norm.weight.data.mul_(-3.0),
    "new data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.flip(0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_the_card_is_followed(name: str) -> None:
    model, twin = tiny("qwen3"), tiny("qwen3")
    with torch.inference_mode(False):
        CHANGES[name](twin)
    options: dict[str, Any] = {"kv_memory": "4MiB"}
    with LLM((twin, None), backend="python", **options) as llm:
        want = tokens_of(llm, [PROMPTS[3]])
    with LLM((model, None), **ON_CARD, **options) as llm:
        assert tokens_of(llm, [PROMPTS[3]]) != want
        CHANGES[name](model)
        for num_cached in (0, len(PROMPTS[3]) - 1):
            output = llm.generate([PROMPTS[3]], GREEDY)[0]
            assert ([output.outputs[0].token_ids], output.num_cached_tokens) == (want, num_cached)


@pytest.mark.parametrize("model", ["given", "loaded"])
def test_a_lost_card_ends_the_engine_in_order(model: str, tmp_path: Path) -> None:
    """Every call of the card fails from then on: requests have one clear error, and the engine still closes."""
    source = (tiny("qwen3"), None) if model == "given" else None
    options: dict[str, Any] = {"kv_memory": "4MiB", "max_num_seqs": 1, "swap_memory": "4MiB"}
    options |= {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with LLM(source, **options, **ON_CARD) as llm:
        tokens_of(llm, [PROMPTS[1]])
        with lost_card():
            for prompts in (PROMPTS[:3], PROMPTS[:1]):  # later requests too
                with pytest.raises(
                    DeviceLostError, match=r"got one that fails every call .*illegal memory access"
                ):
                    llm.generate(prompts, GREEDY)
            assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0
            llm.cache.check()
            llm.close()


def test_no_room_on_the_card_is_one_error() -> None:
    module: Any = torch.get_device_module("card")
    with (
        limited_memory(module.memory_allocated() + (1 << 20)),
        pytest.raises(CapacityError, match=r"expected .* on card:0") as refused,
    ):
        open_llm("qwen3", kv_memory="8MiB")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["gpt_neo", "rwkv"])
def test_a_model_that_runs_by_its_own_forward_is_refused(name: str) -> None:
    model = every_type.build(AutoModelForCausalLM, name)
    with pytest.raises(UnsupportedModelError, match="its own forward runs in host memory only"):
        LLM((model, None), kv_memory="4MiB", **ON_CARD)
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


def test_refusals_have_names() -> None:
    for storage in ("virtual", "contiguous", "growing"):
        with pytest.raises(ArgumentError, match='expected storage="paged" on backend'):
            open_llm("qwen3", storage=storage)
    with pytest.raises(BackendError, match="expected a device card:0 to card:0, got 'card:1'"):
        LLM((expected("qwen3")[0], None), device="card:1", backend="torch")
