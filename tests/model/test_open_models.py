"""Models open for what they can do, or name what is missing; none gives another output than `generate`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_type import build
from support.generate_oracle import PROMPTS, generate
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedModel,
)

from quire import LLM, SamplingParams
from quire.errors import LoadError, UnsupportedModelError
from quire.model import PreparedModel
from quire.weights import load

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("model_type", "auto_class", "ignored_inputs"),
    [
        ("mistral3", AutoModelForImageTextToText, ("images",)),
        ("qwen3_vl", AutoModelForImageTextToText, ("images",)),
        ("llava", AutoModelForImageTextToText, ("images",)),
        ("llava_onevision", AutoModelForImageTextToText, ("images",)),
        ("idefics3", AutoModelForImageTextToText, ("images",)),
        ("smolvlm", AutoModelForImageTextToText, ("images",)),
        ("internvl", AutoModelForImageTextToText, ("images",)),
        ("gemma3", AutoModelForImageTextToText, ("images",)),
        ("voxtral", AutoModelForMultimodalLM, ("audio",)),
    ],
)
def test_a_folder_that_takes_more_than_text_opens_for_text(
    model_type: str,
    auto_class: Any,
    ignored_inputs: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build(auto_class, model_type)
    prompts = [PROMPTS[1], PROMPTS[3]]
    want = [generate(model, prompt, GREEDY.max_tokens or 0)[0] for prompt in prompts]
    model.save_pretrained(tmp_path)
    with (
        caplog.at_level(logging.WARNING, "quire"),
        LLM(tmp_path, block_size=8, max_batch_tokens=24, kv_memory="4MiB", max_model_len=128) as llm,
    ):
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert got == want
    assert f"is opened for text: {ignored_inputs[0]}" in caplog.text
    assert "not taken yet" in caplog.text
    assert load((model, None)).ignored_inputs == ignored_inputs


def test_a_layer_that_attends_to_an_image_alone_keeps_nothing() -> None:
    model = build(AutoModelForCausalLM, "mllama")
    prompts = [PROMPTS[1], PROMPTS[3]]
    want = [generate(model, prompt, GREEDY.max_tokens or 0)[0] for prompt in prompts]
    with LLM((model, None), block_size=8, max_batch_tokens=24, kv_memory="4MiB", max_model_len=128) as llm:
        assert [layer.stores_kv for layer in llm.spec.layers] == [True, False]
        for _ in range(2):  # cold, and from the cache
            got = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
            assert got == want


def test_a_folder_without_a_model_of_language_says_so_in_a_line(tmp_path: Path) -> None:
    build(AutoModelForCausalLM, "llama").save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"llama"', '"vit"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        (UnsupportedModelError, LoadError), match="model type vit: expected a model that continues text"
    ):
        load(tmp_path)


def _bidirectional(model_type: str) -> PreTrainedModel:
    if model_type == "paligemma":
        return build(AutoModelForImageTextToText, model_type)
    return build(AutoModelForCausalLM, model_type, use_bidirectional_attention=True)


@pytest.mark.parametrize("model_type", ["paligemma", "gemma", "gemma2"])
@pytest.mark.parametrize("backend", ["python", "native"])
def test_attention_to_later_tokens_is_refused(model_type: str, backend: str) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    with pytest.raises(UnsupportedModelError, match=r"attends to later tokens as well \(is_causal=False\)"):
        PreparedModel(load((_bidirectional(model_type), None)), backend=backend)


def test_an_attention_function_that_differs_from_eager_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick is what `generate` computes by its default, whatever eager attention says."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build(AutoModelForCausalLM, "llama")
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def both_ways(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, "is_causal": False})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", both_ways)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(UnsupportedModelError, match="expected the logits of its own forward"):
        PreparedModel(load((model, None)), backend="python")


@pytest.mark.parametrize(
    "rules", [{}, {"forced_eos_token_id": 5, "suppress_tokens": list(range(6, 131))}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_whose_generate_prepares_other_positions_is_refused(
    dtype: torch.dtype, rules: dict[str, Any]
) -> None:
    """Whatever rules for tokens its generation config has."""
    model: Any = build(AutoModelForCausalLM, "gpt2").to(dtype)
    model.generation_config = GenerationConfig(**rules)
    own = model.prepare_inputs_for_generation

    def later(*args: Any, **kwargs: Any) -> Any:
        inputs = own(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] + 2
        return inputs

    model.prepare_inputs_for_generation = later
    with pytest.raises(UnsupportedModelError, match="expected generate to give the logits"):
        PreparedModel(load((model, None)), backend="python")


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gpt_neo", {}, "GPTNeoSelfAttention computes attention itself"),
        ("falcon", {"alibi": True}, r"biases on attention's scores \(ALiBi\)"),
        ("rwkv", {}, "keeps its past as state"),
        ("xlnet", {}, "keeps its past as mems"),
        ("reformer", {}, "keeps its past as past_buckets_states"),
        ("openai-gpt", {}, "takes no cache: it computes all tokens in every step"),
        ("bart", {}, "takes no position_ids: it counts positions itself"),
        ("bert", {"is_decoder": False}, r"\(is_causal=False\)"),
    ],
)
def test_refusals_say_what_is_missing(model_type: str, fields: dict[str, Any], reason: str) -> None:
    model = build(AutoModelForCausalLM, model_type, **fields)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        PreparedModel(load((model, None)), backend="python")
    assert str(caught.value).startswith("model type ")
    assert "\n" not in str(caught.value)


def test_what_would_run_is_named_where_an_llm_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.generate runs it, .*quire\.hf\.QuireCache"):
        LLM((build(AutoModelForCausalLM, "xlnet"), None))
