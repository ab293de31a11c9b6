"""Models from quantized checkpoints: the weights that their codes stand for, and one-line errors for unknown
formats."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import packing, quantized_checkpoints
from transformers import GenerationConfig, PreTrainedModel

from quire import LLM, SamplingParams
from quire.errors import LoadError
from quire.model.fingerprint import engine_fingerprint
from quire.spec.weight_formats import parse_weights
from quire.weights import load
from quire.weights.codes import readers
from quire.weights.load import without_weights
from quire.weights.quantized_modules import quantize_model, quantized_weights

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 17, 80, 3], [44, 9, 1, 60, 61, 62, 12]]


def saved(folder: Path, name: str, kind: str = "qwen3") -> PreTrainedModel:
    return quantized_checkpoints.save(
        folder, quantized_checkpoints.tiny(kind), *quantized_checkpoints.FORMATS[name]
    )


def same_weights(model: PreTrainedModel, expected: PreTrainedModel, dtype: torch.dtype) -> None:
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(state[name], weight.to(dtype)), name


@pytest.mark.parametrize("name", quantized_checkpoints.FORMATS)
def test_weights_are_what_the_codes_stand_for(name: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, name)
    loaded = load(tmp_path)
    same_weights(loaded.model, expected, torch.float32)
    assert not hasattr(loaded.model.config, "quantization_config")
    assert len(loaded.source.files) == 2


def test_codes_outlive_loading_unless_they_are_to_be_widened(tmp_path: Path) -> None:
    expected = saved(tmp_path, "w4a16")
    linears = {name for name, module in expected.named_modules() if name.endswith("_proj")}
    loaded = load(tmp_path, dtype="bfloat16")
    assert {name: packed.label for name, packed in quantized_weights(loaded.model).items()} == dict.fromkeys(
        linears, "int4:32"
    )
    same_weights(loaded.model, expected, torch.bfloat16)
    loaded = load(tmp_path, dtype="bfloat16", is_dense=True)
    assert not quantized_weights(loaded.model)
    same_weights(loaded.model, expected, torch.bfloat16)


@pytest.mark.ci
def test_options_that_widen(tmp_path: Path) -> None:
    saved(tmp_path, "w4a16")
    asked: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {"int4:32", "float32"}),
        ({"weights": "bf16"}, {"float32"}),
        ({"weights": "bf16", "packed_weights": tmp_path / "packed"}, {"float32"}),
        ({"packed_weights": tmp_path / "packed"}, {"int4:32", "float32"}),
        ({"weights": "int8"}, {"int8", "float32"}),
    ]
    for options, formats in asked:
        with LLM(tmp_path, kv_memory="1MiB", **options) as llm:
            assert llm.stats()["weight_bytes"].keys() == formats, options


def schemes(**groups: dict[str, Any]) -> dict[str, Any]:
    """A scheme for each list of targets."""
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def group(bits: int, size: int, *targets: str) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    return {"targets": list(targets), "weights": args, "format": "pack-quantized"}


def packed(bits: int, size: int) -> Any:
    return quantized_checkpoints.packed(
        lambda made: packing.compressed_packed(made, symmetric=True), bits, size
    )


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "targets",
    [
        ["Embedding", f"re:{QUERY[:-1]}.*$"],
        [r"re:.*embed_.*", QUERY],
        ["model.embed_tokens", r"re:.*layers\.0\..*q_proj"],
    ],
)
def test_schemes_of_classes_patterns_and_names(targets: list[str], tmp_path: Path) -> None:
    config = schemes(a=group(4, 32, "Linear"), b=group(8, 64, *targets))
    expected = quantized_checkpoints.save(
        tmp_path,
        quantized_checkpoints.tiny(),
        config,
        packed(4, 32),
        {"model.embed_tokens.weight": packed(8, 64), f"{QUERY}.weight": packed(8, 64)},
    )
    loaded = load(tmp_path)
    labels = {name: coded.label for name, coded in quantized_weights(loaded.model).items()}
    assert (labels[QUERY], labels["model.embed_tokens"]) == ("int8:64", "int8:64")
    assert labels["model.layers.1.self_attn.q_proj"] == "int4:32"
    same_weights(loaded.model, expected, torch.float32)
    planned = without_weights(tmp_path).codes
    assert {name.removesuffix(".weight"): form.label for name, form in planned.items()} == labels  # pyright: ignore


@pytest.mark.parametrize("widened", [False, True])
def test_other_readers_are_another_world(
    widened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values kept by an older reading are never taken for those of a newer one."""
    saved(tmp_path, "w4a16")
    first = engine_fingerprint(load(tmp_path, is_dense=widened))
    assert engine_fingerprint(load(tmp_path, is_dense=widened)) == first
    monkeypatch.setattr(readers, "VERSION", readers.VERSION + 1)
    assert engine_fingerprint(load(tmp_path, is_dense=widened)) != first


def test_groups_that_have_no_product_are_widened(tmp_path: Path) -> None:
    plain = quantized_checkpoints.tiny()
    config, _ = quantized_checkpoints.FORMATS["awq"]

    def pack(weight: np.ndarray) -> quantized_checkpoints.Module:
        rounded = packing.round_weight(weight, 4, 8, half=True)
        return packing.awq(rounded), rounded.values

    expected = quantized_checkpoints.save(tmp_path, plain, {**config, "group_size": 8}, pack)
    loaded = load(tmp_path)
    assert not quantized_weights(loaded.model)
    same_weights(loaded.model, expected, torch.float32)


@pytest.mark.parametrize("widened", [False, True])
def test_weights_that_lie_transposed(widened: bool, tmp_path: Path) -> None:
    """GPT-2's: a plain checkpoint has them as [num_inputs, num_outputs], GPTQ's codes are those of its own kind."""
    plain = quantized_checkpoints.tiny("gpt2", n_embd=128, n_head=4)
    plain.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    config, pack = quantized_checkpoints.FORMATS["gptq"]
    for name in [name for name in state if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))]:
        tensors, values = pack(state.pop(name).T.numpy())
        state |= {name.removesuffix("weight") + key: tensor.clone() for key, tensor in tensors.items()}
        plain.get_parameter(name).data.copy_(torch.from_numpy(values.T))
    quantized_checkpoints.write(tmp_path, [state], config)
    loaded = load(tmp_path, is_dense=widened)
    assert len(quantized_weights(loaded.model)) == (0 if widened else 8)
    same_weights(loaded.model, plain, torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "gptq" else pytest.param(name, marks=pytest.mark.ci)
        for name in quantized_checkpoints.FORMATS
    ],
)
def test_tokens_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    same_tokens(saved(tmp_path, name), tmp_path)


def same_tokens(expected: PreTrainedModel, checkpoint: Path) -> None:
    with LLM((expected, None), kv_memory="4MiB") as plain, LLM(checkpoint, kv_memory="4MiB") as quantized:
        tokens = [output.outputs[0].token_ids for output in quantized.generate(PROMPTS, GREEDY)]
        assert tokens == [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]
        assert len({tuple(each) for each in tokens}) > 1


def expert_labels(model: PreTrainedModel) -> dict[str, str]:
    return {name: coded.label for name, coded in quantized_weights(model).items() if "experts" in name}


PROJECTIONS = [
    f"model.layers.{layer}.mlp.experts.{one}_proj" for layer in (0, 1) for one in ("gate_up", "down")
]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fp8", "fp8 e4m3:128x128"),
        ("w4a16", "int4:32"),
        *(
            pytest.param(name, label, marks=pytest.mark.ci)
            for name, label in (("gptq", "gptq int4:64"), ("w8a8", "int8"))
        ),
    ],
)
def test_experts_saved_one_by_one_keep_their_codes(name: str, label: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, name, "qwen3_moe")
    assert any("experts.3.up_proj" in key for key in load_file(next(tmp_path.glob("*1-of*"))))
    loaded = load(tmp_path)
    assert expert_labels(loaded.model) == dict.fromkeys(PROJECTIONS, label)
    same_weights(loaded.model, expected, torch.float32)
    widened = load(tmp_path, is_dense=True)
    assert not quantized_weights(widened.model)
    same_weights(widened.model, expected, torch.float32)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["fp8", "w4a16", "gptq"])
def test_tokens_of_experts_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    same_tokens(saved(tmp_path, name, "qwen3_moe"), tmp_path)


def test_experts_whose_gate_and_up_differ_are_widened_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = quantized_checkpoints.FORMATS["w4a16"]

    def pack_each(weight: np.ndarray) -> quantized_checkpoints.Module:
        nonlocal count
        count += 1
        rounded = packing.round_weight(weight, 4, 32 if count % 2 else 64, symmetric=False)
        return packing.compressed_packed(rounded, symmetric=False), rounded.values

    count, config = 0, copy.deepcopy(config)
    del config["config_groups"]["group_0"]["weights"]["group_size"]
    expected = quantized_checkpoints.save(
        tmp_path, quantized_checkpoints.tiny("qwen3_moe"), config, pack_each
    )
    loaded = load(tmp_path)
    same_weights(loaded.model, expected, torch.float32)
    labels = expert_labels(loaded.model)
    assert 0 < len(labels) < 4
    assert (
        "quantized weights are dequantized to float32, the first model.layers.0.mlp.experts.gate_up_proj"
        in caplog.text
    )
    assert "quantized in one way" in caplog.text


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_experts_are_rounded_anew(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name, "qwen3_moe")
    widened = load(tmp_path, is_dense=True).model
    quantize_model(widened, parse_weights("int4:32"))
    anew = load(tmp_path, weights=parse_weights("int4:32")).model
    assert expert_labels(anew) == dict.fromkeys(PROJECTIONS, "int4:32")
    same_weights(anew, widened, torch.float32)
    assert not quantized_weights(load(tmp_path, weights=parse_weights("bf16")).model)


def test_gpt_oss(tmp_path: Path) -> None:
    plain = quantized_checkpoints.save_gpt_oss(tmp_path)
    loaded = load(tmp_path)
    assert expert_labels(loaded.model) == dict.fromkeys(PROJECTIONS, "mxfp4")
    same_weights(loaded.model, plain, torch.float32)
    same_tokens(plain, tmp_path)


def test_tied_embeddings_and_the_files_beside_the_weights(tmp_path: Path) -> None:
    plain = quantized_checkpoints.tiny(tie_word_embeddings=True)
    plain.generation_config = GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.25)
    quantized_checkpoints.save(tmp_path, plain, *quantized_checkpoints.FORMATS["w8a8"])
    loaded = load(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert (loaded.eos_token_ids, loaded.sampling_defaults["temperature"]) == ((2, 5), 0.25)


def test_old_generation_fields_of_config_json_are_obeyed(tmp_path: Path) -> None:
    plain = quantized_checkpoints.tiny()
    quantized_checkpoints.save(tmp_path, plain, *quantized_checkpoints.FORMATS["w8a8"])
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 3}))
    assert load(tmp_path).sampling_defaults["no_repeat_ngram_size"] == 3


def test_refusals_name_what_they_met(tmp_path: Path) -> None:
    saved(tmp_path, "w8a8")
    path = next(tmp_path.glob("*1-of*"))
    tensors = load_file(path)
    scale = next(name for name in tensors if name.endswith("weight_scale"))
    whole = dict(tensors)
    tensors.pop(scale)
    save_file(tensors, path, {"format": "pt"})
    name = scale.removesuffix("_scale")
    with pytest.raises(
        LoadError, match=rf"tensors that compressed-tensors is known to have, got {name} of int8"
    ):
        load(tmp_path)
    whole.pop("model.norm.weight", None)
    save_file(whole, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LoadError, match=r"quantized by gptq, awq, .*got quant_method 'aqlm'; take the model as"
    ):
        load(tmp_path)
