"""Preparation is reversible, and keeps length-dependent rotary embeddings fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.attention import attention_batch
from quire.errors import ArgumentError
from quire.memory.paged import PagedStorage
from quire.model import PreparedModel
from quire.step import ForwardStep
from quire.weights import load

_TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 128,
                         "pad_token_id": 0}  # fmt: skip
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0,
         "original_max_position_embeddings": 32}  # fmt: skip


def _model(model_type: str = "qwen3", **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_TINY, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return model


def _one_prompt(prepared: PreparedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every token of one prompt computed in one step."""
    storage = PagedStorage(prepared.spec, 64, 4, max_blocks=64)
    prepared.attach(storage)
    length = tokens.numel()
    tables = torch.arange(-(-length // 4), dtype=torch.int32)[None]
    plan = attention_batch([0, length], [length], tables, 4)
    positions = torch.arange(length)
    logits = prepared.forward(ForwardStep(tokens, positions, (plan,), (positions,), positions))
    prepared.attach(None)
    storage.close()
    return logits


def _plain(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens[None]).logits[0]


def test_the_model_stays_an_ordinary_one_and_is_restored() -> None:
    model = _model()
    tokens = torch.arange(1, 20)
    before = _plain(model, tokens)
    modules = {name: type(module) for name, module in model.named_modules()}
    implementation, training = model.config._attn_implementation, model.training
    prepared = PreparedModel(load((model, None)), backend="python")
    torch.testing.assert_close(_one_prompt(prepared, tokens), before, atol=1e-4, rtol=0)
    torch.testing.assert_close(_plain(model, tokens), before, atol=1e-4, rtol=0)
    prepared.restore()
    prepared.restore()
    assert torch.equal(_plain(model, tokens), before)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert (model.config._attn_implementation, model.training) == (implementation, training)
    model.train()
    model(tokens[None]).logits.sum().backward()  # nothing of inference mode is left behind


def test_the_attention_is_switched_back_when_a_forward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    prepared = PreparedModel(load((model, None)), backend="python")
    before = model.config._attn_implementation
    monkeypatch.setattr(model.model.norm, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _one_prompt(prepared, torch.arange(1, 5))
    assert model.config._attn_implementation == before


def test_a_step_needs_a_storage_and_its_own_spec() -> None:
    prepared = PreparedModel(load((_model(), None)), backend="python")
    other = PagedStorage(load((_model(head_dim=16), None)).spec, 4, 4, max_blocks=4)
    with pytest.raises(ArgumentError, match="another spec"):
        prepared.attach(other)
    plan = attention_batch([0, 1], [1], [[0]], 4)
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="expected a storage"):
        prepared.forward(ForwardStep(zero, zero, (plan,), (zero,), zero))


def test_longrope_stays_short_within_the_original_length() -> None:
    model = _model("phi3", rope_parameters=_LONG, original_max_position_embeddings=32)
    prepared = PreparedModel(load((model, None)), backend="python")
    assert prepared.max_model_len == 32
    tokens = torch.arange(1, 33)
    torch.testing.assert_close(_one_prompt(prepared, tokens), _plain(model, tokens), atol=1e-3, rtol=0)


def test_longrope_is_held_long_beyond_it_and_let_go_afterwards() -> None:
    model = _model("phi3", rope_parameters=_LONG, original_max_position_embeddings=32)
    short, long = torch.arange(1, 20), torch.arange(1, 60)
    answers = [_plain(model, tokens) for tokens in (short, long)]
    prepared = PreparedModel(load((model, None)), backend="python", max_model_len=128)
    torch.testing.assert_close(_one_prompt(prepared, long), answers[1], atol=1e-3, rtol=0)
    first = _one_prompt(prepared, short)  # the long frequencies, whatever else ran before
    assert (first - answers[0]).abs().max() > 1e-2
    torch.testing.assert_close(first, _one_prompt(prepared, long)[:19], atol=1e-4, rtol=0)
    prepared.restore()
    for tokens, answer in zip((short, long), answers, strict=True):
        assert torch.equal(_plain(model, tokens), answer)


def test_dynamic_rope_is_held_at_the_length_asked_for() -> None:
    model = _model("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    prepared = PreparedModel(load((model, None)), backend="python")
    assert prepared.max_model_len == 128
    prepared.restore()
    prepared = PreparedModel(load((model, None)), backend="python", max_model_len=200)
    tokens = torch.arange(200) % 97
    torch.testing.assert_close(_one_prompt(prepared, tokens), _plain(model, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("asked", "held"), [(None, "short"), (16, "short"), (128, "longer")])
def test_the_start_tells_which_frequencies_of_longrope_hold(
    asked: int | None, held: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model("phi3", rope_parameters=_LONG, original_max_position_embeddings=32)
    with caplog.at_level("INFO", logger="quire"), LLM((model, None), kv_memory="1MiB", max_model_len=asked):
        pass
    (told,) = [record.getMessage() for record in caplog.records if "rotary" in record.getMessage()]
    assert f"max_model_len {asked or 32}, longrope rotary embeddings of 32 tokens" in told
    assert f"the frequencies for {held} sequences hold" in told
    assert ("up to 128 takes those for longer ones" in told) == (held == "short")


def test_yarn_reaches_its_factor_times_the_original_length() -> None:
    """As Qwen's cards have it: max_position_embeddings still says the length before."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    model = _model(rope_parameters=yarn, max_position_embeddings=40)
    prompt = [(7 * number) % 97 for number in range(110)]
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    want = whole[0, len(prompt) :].tolist()
    with LLM((model, None), kv_memory="1MiB") as llm:
        assert llm.max_model_len == 128
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    assert answer.outputs[0].token_ids == want


def test_linear_scaling_may_be_asked_for_its_length() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    model = _model(rope_parameters=linear)
    prepared = PreparedModel(load((model, None)), backend="python")
    assert prepared.max_model_len == 128
    prepared.restore()
    prepared = PreparedModel(load((model, None)), backend="python", max_model_len=256)
    tokens = torch.arange(250) % 97
    torch.testing.assert_close(_one_prompt(prepared, tokens), _plain(model, tokens), atol=1e-3, rtol=0)
    prepared.restore()
    with pytest.raises(ArgumentError, match="of 1 to 256 tokens"):
        PreparedModel(load((model, None)), backend="python", max_model_len=257)


@pytest.mark.parametrize("asked", [0, 129])
def test_max_model_len_out_of_range(asked: int) -> None:
    with pytest.raises(
        ArgumentError, match=f"expected max_model_len of 1 to 128 tokens for this model, got {asked}"
    ):
        PreparedModel(load((_model(), None)), backend="python", max_model_len=asked)
