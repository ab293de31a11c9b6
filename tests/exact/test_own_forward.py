"""Models that run by their own forward, one sequence at a time: the tokens of `model.generate`, on every storage.

Hits, chunks, preemption, swap and tiers are those of every model; here they are asked of an encoder-decoder's half, of
a model whose layers compute attention themselves and mask it by a window, and of one that alters K after `update`.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_run import EngineRun
from support.every_type import build
from support.generate_oracle import MAX_TOKENS, PROMPTS, generate
from support.preempted import generate_preempted
from support.virtual_run import VirtualRun
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from quire import LLM, SamplingParams
from quire.errors import ArgumentError, UnsupportedModelError
from quire.memory.placement import unsupported_reason
from quire.model.sequence_cache import SequenceCache
from quire.model.sequential_model import SequentialModel, prepare
from quire.weights import load

# xglm's own code cannot compute in float64. doge masks a window, of 8 tokens.
SOME = ("bart", "doge", "gpt_neo")
MORE = ("diffllama", "falcon", "jetmoe", "roformer", "whisper", "xglm")
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)


def _made(name: str) -> PreTrainedModel:
    """Of a decoder half, its encoder has more layers and heads; Falcon's biases (ALiBi) are built from the length."""
    fields: dict[str, dict[str, Any]] = {
        "bart": {"decoder_layers": 1, "decoder_attention_heads": 8},
        "falcon": {"alibi": True},
    }
    return build(AutoModelForCausalLM, name, **fields.get(name, {}))


@cache
def expected(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = _made(name)
    return model, [_generated(model, prompt) for prompt in PROMPTS]


def _generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    return generate(model, prompt, eos_token_id=None)[0]


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.ci) for n in MORE)])
def test_paged(name: str) -> None:
    """Once so tight that sequences are preempted and blocks evicted, once with room to share prefixes."""
    model, tokens = expected(name)
    for room in (1.0, 8.0):
        run = EngineRun(model, PROMPTS, MAX_TOKENS, backend="python", room=room)
        with run.llm:
            assert run.llm.stats()["by_own_forward"]
            answers = run.answer()
            stats = run.llm.stats()
        assert [answer.token_ids for answer in answers] == tokens
        if room == 1.0:
            assert (stats["num_preemptions"] > 0) is (name != "doge")  # a window needs few blocks
        else:
            assert sum(answer.num_cached_tokens for answer in answers) > 0


@pytest.mark.parametrize("name", SOME)
def test_native_paged(name: str) -> None:
    pytest.importorskip("quire._native")
    model, tokens = expected(name)
    run = EngineRun(model, PROMPTS, MAX_TOKENS, backend="native", room=3.0, block_size=7)
    with run.llm:
        assert [answer.token_ids for answer in run.answer()] == tokens


@pytest.mark.skipif(unsupported_reason() is not None, reason="no virtual storage here")
@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.ci) for n in MORE)])
def test_virtual(name: str) -> None:
    model, tokens = expected(name)
    for num_blocks in (6, 60):
        run = VirtualRun(model, PROMPTS, MAX_TOKENS, backend="python", num_blocks=num_blocks)
        try:
            assert [answer.token_ids for answer in run.answer()] == tokens
            run.storage.check()
        finally:
            run.close()


@pytest.mark.parametrize("storage", ["contiguous", "growing"])
@pytest.mark.parametrize("name", SOME)
def test_storages_that_do_not_share(name: str, storage: str) -> None:
    model, tokens = expected(name)
    run = EngineRun(model, PROMPTS, MAX_TOKENS, backend="python", room=3.0, storage=storage)
    with run.llm:
        assert [answer.token_ids for answer in run.answer()] == tokens


@pytest.mark.parametrize("name", SOME)
def test_swapped_out_and_in(name: str) -> None:
    model, _ = expected(name)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    prompts = [[(7 * i + j) % 90 + 5 for j in range(20 + 5 * i)] for i in range(5)]
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "kv_memory": "1MiB", "backend": "python"}
    with LLM((model, None), max_num_seqs=1, **options) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM((model, None), preemption="swap", swap_memory="1MiB", **options) as llm:
        outputs = generate_preempted(llm, prompts, params)
        assert llm.stats()["num_swapped"] > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone


@pytest.mark.parametrize("name", SOME)
def test_found_again_on_disk_after_a_restart(name: str, tmp_path: Path) -> None:
    model, tokens = expected(name)
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "kv_memory": "1MiB", "backend": "python"}
    for is_second in (False, True):
        with LLM((model, None), disk_cache=tmp_path, **options) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            assert (llm.stats()["hit_tokens_by_tier"]["disk"] > 0) is is_second
        assert [output.outputs[0].token_ids for output in outputs] == tokens


def test_a_view_where_the_memory_is_whole_and_a_copy_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _made("gpt_neo")
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    own = SequenceCache.update

    def noted(self: SequenceCache, key: torch.Tensor, value: torch.Tensor, layer: int) -> Any:
        k, v = own(self, key, value, layer)
        given.append((k, self.view(layer).k))
        return k, v

    monkeypatch.setattr(SequenceCache, "update", noted)
    for block_size, is_view in ((4, False), (64, True)):
        with LLM((model, None), block_size=block_size, max_model_len=64, kv_memory="1MiB") as llm:
            given.clear()
            llm.generate([PROMPTS[3]], GREEDY)
            shares = {
                k.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() for k, pool in given
            }
        assert shares == {is_view}


def test_hooks_are_called() -> None:
    model = _made("gpt_neo")
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with LLM((model, None), max_model_len=64, kv_memory="1MiB") as llm:
        calls.clear()
        llm.generate([PROMPTS[1], PROMPTS[3]], GREEDY)
    assert len(calls) == 2 * MAX_TOKENS


def test_the_model_is_as_it_was_afterwards() -> None:
    model = _made("bart")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepared = prepare(load((model, None)), backend="python")
    assert isinstance(prepared, SequentialModel)
    with pytest.raises(ArgumentError, match="that is not in use"):
        prepare(load((model, None)), backend="python")
    prepared.restore()
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_changed_model_is_followed() -> None:
    model = _made("gpt_neo")
    with LLM((model, None), max_model_len=64, kv_memory="1MiB", backend="python") as llm:
        llm.generate([PROMPTS[3]], GREEDY)
        with torch.no_grad():
            model.transformer.wte.weight.neg_()
        [output] = llm.generate([PROMPTS[3]], GREEDY)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == _generated(model, PROMPTS[3])


def test_from_a_folder(tmp_path: Path) -> None:
    """What the refused fast path packed has been unpacked."""
    model, tokens = expected("gpt_neo")
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, max_model_len=64, kv_memory="1MiB", dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == tokens


def test_it_is_said_once_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "quire"),
        LLM((_made("bart"), None), max_model_len=64, kv_memory="1MiB") as llm,
    ):
        llm.generate([PROMPTS[1]], GREEDY)
    said = [record.getMessage() for record in caplog.records if "by its own forward" in record.getMessage()]
    assert len(said) == 1
    assert "one sequence at a time" in said[0]
    assert "BartForCausalLM takes no position_ids" in said[0]


def test_a_model_that_runs_in_batches_does() -> None:
    prepared = prepare(load((build(AutoModelForCausalLM, "gpt2"), None)), backend="python")
    assert not prepared.by_own_forward
    prepared.restore()


# What is refused.


@pytest.mark.parametrize("backend", ["python", "native"])
def test_attention_to_later_tokens_is_refused(backend: str) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    model = build(AutoModelForCausalLM, "gemma", use_bidirectional_attention=True)
    with pytest.raises(
        UnsupportedModelError, match=r"is_causal=False.*; its own forward does not run .*either"
    ):
        prepare(load((model, None)), backend=backend)


def test_layers_that_see_later_tokens_of_a_chunk_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GPTNeoSelfAttention._attn

    def both_ways(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        self.bias = torch.ones_like(self.bias)
        return own(self, query, key, value, None)

    monkeypatch.setattr(GPTNeoSelfAttention, "_attn", both_ways)
    with pytest.raises(
        UnsupportedModelError, match=r"own forward does not run .*expected the logits of its own"
    ):
        prepare(load((_made("gpt_neo"), None)), backend="python")


def test_k_altered_in_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would alter what is stored, where the model is given a view of that."""
    own = GPTNeoSelfAttention._attn

    def scaled(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        key.mul_(1.5)
        return own(self, query, key, value, attention_mask)

    monkeypatch.setattr(GPTNeoSelfAttention, "_attn", scaled)
    with pytest.raises(
        UnsupportedModelError, match=r"own forward does not run .*expected the logits of its own"
    ):
        prepare(load((_made("gpt_neo"), None)), backend="python")


def test_layers_that_store_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GPTNeoSelfAttention.forward

    def without_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **{**kwargs, "cache": None, "layer_past": None} if self.layer_id else kwargs)

    monkeypatch.setattr(GPTNeoSelfAttention, "forward", without_cache)
    with pytest.raises(UnsupportedModelError, match="own forward does not run"):
        prepare(load((_made("gpt_neo"), None)), backend="python")


def test_layers_that_see_chunks_are_refused() -> None:
    """Llama 4's, made not to run otherwise."""
    model = build(AutoModelForCausalLM, "llama4_text")
    with pytest.raises(UnsupportedModelError, match="its config has layers that see chunks"):
        SequentialModel(load((model, None)), backend="python")


@pytest.mark.parametrize("model_type", ["openai-gpt", "xlnet"])
def test_a_forward_without_a_cache_is_refused_as_before(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="takes no cache") as caught:
        prepare(load((build(AutoModelForCausalLM, model_type), None)), backend="python")
    assert "does not run" not in str(caught.value)
