"""Folders whose weights depend on a file next to config.json: settings of early tools, and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import quantized_checkpoints
from transformers import PreTrainedModel

from quire.errors import LoadError
from quire.weights import load
from quire.weights.load import config_of, without_weights
from quire.weights.quantized_modules import quantized_weights

EARLY = {
    "gptq": {"bits": 4, "group_size": 64, "desc_act": False, "sym": False, "damp_percent": 0.01},
    "awq": {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
}


def early(folder: Path, name: str, file: str, weights: str, **more: Any) -> PreTrainedModel:
    """As early tools left it: settings in `file`, config.json without any, all weights in `weights`."""
    expected = quantized_checkpoints.save(
        folder, quantized_checkpoints.tiny(), *quantized_checkpoints.FORMATS[name]
    )
    tensors: dict[str, torch.Tensor] = {}
    for part in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(part)
        part.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps({**EARLY[name], **more}))
    return expected


@pytest.mark.parametrize(
    ("name", "file", "weights", "more"),
    [
        ("gptq", "quantize_config.json", "gptq_model-4bit-64g.safetensors", {}),
        ("gptq", "quantize_config.json", "model.safetensors", {"model_name_or_path": None}),
        ("gptq", "quantize_config.json", "named-by-hand.safetensors", {}),
        ("gptq", "quantize_config.json", "base.safetensors", {"model_file_base_name": "base"}),
        ("awq", "quant_config.json", "model.safetensors", {}),
        ("awq", "quantize_config.json", "model.safetensors", {}),
    ],
)
def test_settings_of_early_tools(
    name: str, file: str, weights: str, more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = early(tmp_path, name, file, weights, **more)
    if "model_file_base_name" in more:
        save_file({"x": torch.ones(1)}, tmp_path / "another.safetensors")
    loaded = load(tmp_path)
    assert len(quantized_weights(loaded.model)) == 14
    for key, weight in expected.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], weight), key
    assert [path.name for path in loaded.source.files] == [weights]
    assert f"its quantization_config is read from {file}" in caplog.text
    assert len(without_weights(tmp_path).codes) == 14


def test_settings_that_config_has_itself_go_first(tmp_path: Path) -> None:
    quantized_checkpoints.save(tmp_path, quantized_checkpoints.tiny(), *quantized_checkpoints.FORMATS["gptq"])
    (tmp_path / "quantize_config.json").write_text("{")
    assert len(quantized_weights(load(tmp_path).model)) == 14


def test_plain_weights_need_no_settings(tmp_path: Path) -> None:
    quantized_checkpoints.tiny().save_pretrained(tmp_path)
    (tmp_path / "quantize_config.json").write_text("{")
    assert not quantized_weights(load(tmp_path).model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            None,
            r"expected a quantization_config in config\.json of .*, which has .*qweight of a quantized weight",
        ),
        ("{", r"cannot read .*quantize_config\.json"),
        ("[4]", r"quantize_config\.json: expected an object of fields, got list"),
        ('{"bits": "4"}', r"quantization_config\.bits: expected a whole number: 2 or 3 or 4 or 8, got '4'"),
        ('{"bits": 4, "is_marlin_format": true}', r"is_marlin_format: expected false, got True"),
        ('{"quant_method": "marlin"}', r"got quant_method 'marlin'"),
    ],
)
def test_codes_that_nothing_explains_are_refused(settings: str | None, message: str, tmp_path: Path) -> None:
    early(tmp_path, "gptq", "quantize_config.json", "model.safetensors")
    if settings is None:
        (tmp_path / "quantize_config.json").unlink()
    else:
        (tmp_path / "quantize_config.json").write_text(settings)
    for opened in (load, without_weights):
        with pytest.raises(LoadError, match=message):
            opened(tmp_path)


def test_modelopt_is_named(tmp_path: Path) -> None:
    early(tmp_path, "gptq", "hf_quant_config.json", "model.safetensors")
    with pytest.raises(LoadError, match=r"hf_quant_config\.json describes it in ModelOpt's format"):
        load(tmp_path)


def test_weights_that_settings_are_of_are_missing(tmp_path: Path) -> None:
    early(tmp_path, "gptq", "quantize_config.json", "a.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(
        LoadError, match=r"model\.safetensors or gptq_model-4bit-64g\.safetensors, .* none of them"
    ):
        load(tmp_path)


@pytest.mark.parametrize("base", ["someone/base", "/no/such/base", "../no_such_base", None])
def test_an_adapter_names_itself_and_its_base(base: str | None, tmp_path: Path) -> None:
    model = quantized_checkpoints.tiny()
    lora: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
    named = "that its adapter_config.json does not name" if base is None else f"'{base}'"
    for opened in (load, without_weights, config_of):
        with pytest.raises(LoadError, match=r"has a LORA adapter over .*merge_and_unload") as caught:
            opened(tmp_path)
        assert named in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        assert ("no such folder" in str(caught.value)) == (base is not None and base[0] in "/.")
        assert "remove adapter_config.json" not in str(caught.value)


def test_an_adapter_beside_a_model_is_not_a_matter_of_what_is_installed(tmp_path: Path) -> None:
    """transformers applies it where peft is installed, and drops it where it is not."""
    quantized_checkpoints.tiny().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(LoadError, match=r"or remove adapter_config\.json to serve the model"):
        load(tmp_path)
