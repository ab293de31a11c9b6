"""Quantized checkpoints: decoded weights equal those of the tool that wrote them; unknown formats are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support import packing

from quire.errors import LoadError
from quire.weights.codes import QuantizedWeight, form_of
from quire.weights.codes.readers import CheckpointModule, CheckpointWeights, checkpoint_weights


@dataclass
class Header:
    shape: tuple[int, ...]
    saved_type: torch.dtype


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CheckpointWeights:
    headers = {name: Header(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return checkpoint_weights(config, headers, tensors.__getitem__)


def one(config: dict[str, Any], module: dict[str, torch.Tensor], prefix: str = "mlp.up.") -> QuantizedWeight:
    """The only weight of a checkpoint with one module and a plain norm."""
    tensors = {prefix + name: tensor for name, tensor in module.items()} | {"norm.weight": torch.ones(4)}
    found = read(config, tensors)
    assert found.names == tensors.keys() - {"norm.weight"}
    (weight,) = found.weights
    assert weight.name == prefix + "weight"
    (read_weight,) = weight.read(tensors.__getitem__)
    assert weight.shape == read_weight.codes.shape
    said, found = weight.form(tensors.__getitem__), form_of(read_weight)
    assert replace(said, scales=found.scales) == found  # told by the headers alone
    assert said.num_bytes(*weight.shape) == found.num_bytes(*weight.shape)
    for dtype in (torch.bfloat16, torch.float32):
        widened = weight.dequantize(tensors.__getitem__, dtype)
        assert torch.equal(widened, read_weight.dequantize().to(dtype))
    return read_weight


def same_bits(weight: QuantizedWeight, expected: np.ndarray) -> None:
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))


def random(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(bits: int, symmetric: bool) -> None:
    weight = packing.round_weight(random(32, 128), bits, 32, symmetric=symmetric, half=True)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric}
    v1, v2 = (packing.gptq(weight, minus_one=minus_one) for minus_one in (True, False))
    got = one(config | {"checkpoint_format": "gptq"}, v1)
    same_bits(got, weight.values)
    assert (got.bits, got.group, got.order, got.label) == (bits, 32, None, f"gptq int{bits}:32")
    assert isinstance(got.zeros, float) == symmetric
    same_bits(one(config | {"checkpoint_format": "gptq_v2"}, v2), weight.values)
    if symmetric:  # the label lies
        same_bits(one(config | {"checkpoint_format": "gptq"}, v2), weight.values)
        same_bits(one(config | {"checkpoint_format": "gptq_v2"}, v1), weight.values)
    v1.pop("g_idx")
    same_bits(one(config, v1), weight.values)
    same_bits(one(config | AUTO_ROUND, v1), weight.values)
    same_bits(one(config | AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"}, v2), weight.values)


def test_gptq_by_activation_order() -> None:
    shuffled = np.random.default_rng(1)
    weight = packing.round_weight(random(32, 128), 4, 32, symmetric=False, half=True, shuffled=shuffled)
    got = one({"quant_method": "gptq", "sym": False, "desc_act": True}, packing.gptq(weight, minus_one=True))
    same_bits(got, weight.values)
    assert got.order is not None
    assert got.group == 32


@pytest.mark.parametrize(("inputs", "group", "held"), [(96, 64, 32), (96, 96, 96), (96, 128, 96)])
def test_groups_that_do_not_divide_the_inputs_become_smaller_ones(inputs: int, group: int, held: int) -> None:
    weight = packing.round_weight(random(32, inputs), 4, group, symmetric=False, half=True)
    for config, tensors in (
        ({"quant_method": "gptq", "sym": False, "group_size": group}, packing.gptq(weight, minus_one=True)),
        ({"quant_method": "awq", "group_size": group}, packing.awq(weight)),
    ):
        got = one(config, tensors)
        same_bits(got, weight.values)
        assert got.group == held


def test_gptq_settings_of_single_modules() -> None:
    weight = packing.round_weight(random(32, 64), 4, 32, half=True)
    tensors = packing.gptq(weight, minus_one=False)
    tensors.pop("g_idx")
    config = {"quant_method": "gptq", "sym": True, "group_size": 16, "dynamic": {r"-:.*down": {}}}
    with pytest.raises(LoadError, match=r"mlp.up.weight: .*group_size = 16, got scales of 2 groups"):
        one(config, tensors)
    config["dynamic"] = {r"+:mlp\.u": {"group_size": 32}}
    same_bits(one(config, tensors), weight.values)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool) -> None:
    weight = packing.round_weight(random(32, 256), 4, 128, symmetric=symmetric, half=True)
    got = one({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, packing.awq(weight))
    same_bits(got, weight.values)
    assert (got.bits, got.group, got.label) == (4, 128, "awq int4:128")


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}


def scheme(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 96])
def test_compressed_tensors_packed(bits: int, symmetric: bool, group: int) -> None:
    weight = packing.round_weight(random(24, 96), bits, group, symmetric=symmetric)
    config = scheme(num_bits=bits, type="int", symmetric=symmetric, group_size=group)
    tensors = packing.compressed_packed(weight, symmetric=symmetric)
    got = one(config | {"format": "pack-quantized"}, tensors)
    same_bits(got, weight.values)
    assert (got.bits, got.group) == (bits, group)


def test_compressed_tensors_by_activation_order() -> None:
    weight = packing.round_weight(random(24, 96), 4, 32, shuffled=np.random.default_rng(1))
    tensors = packing.compressed_packed(weight, symmetric=True)
    tensors["weight_g_idx"] = torch.from_numpy(weight.group_of.astype(np.int32))
    same_bits(one(scheme(num_bits=4, actorder="group"), tensors), weight.values)


def test_compressed_tensors_in_bytes() -> None:
    weight = packing.round_weight(random(24, 96), 8, 96)
    tensors = packing.compressed_int8(weight) | {"input_scale": torch.ones(1)}
    same_bits(one(scheme(num_bits=8, type="int") | {"format": "int-quantized"}, tensors), weight.values)
    tensors, values = packing.fp8_channels(random(24, 96))
    same_bits(one(scheme(num_bits=8, type="float") | {"format": "float-quantized"}, tensors), values)
    tensors, values = packing.fp8_blocks(random(160, 200), 128)
    tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    for block in ([128, 128], "128x128", "128X128"):
        same_bits(
            one(scheme(num_bits=8, type="float", strategy="block", block_structure=block), tensors), values
        )
    for block in ([128], "128", "128x", "128x-1", [128.0, 128], [True, 128], [0, 128], {"rows": 128}, 128):
        with pytest.raises(LoadError, match=r"weights\.block_structure: expected two whole numbers above 0"):
            read(scheme(num_bits=8, type="float", block_structure=block), tensors)
    with pytest.raises(LoadError, match=r"block_structure = \[64, 64\], got scales of \[2, 2\]"):
        one(scheme(num_bits=8, type="float", block_structure="64x64"), tensors)


def test_compressed_tensors_schemes_by_module() -> None:
    """By its name, else by a pattern, else by a class."""
    fine, coarse = (packing.round_weight(random(32, 96), bits, 32) for bits in (4, 8))
    config = scheme(num_bits=8)
    config["config_groups"]["group_1"] = {"targets": [r"re:.*\.up$"], "weights": {"num_bits": 4}}
    tensors = {
        f"mlp.up.{name}": tensor for name, tensor in packing.compressed_packed(fine, symmetric=True).items()
    }
    tensors |= {
        f"mlp.down.{name}": tensor
        for name, tensor in packing.compressed_packed(coarse, symmetric=True).items()
    }
    down, up = read(config, tensors).weights
    same_bits(*(up.read(tensors.__getitem__)), fine.values)  # pyright: ignore
    same_bits(*(down.read(tensors.__getitem__)), coarse.values)  # pyright: ignore
    for group in config["config_groups"].values():
        group["targets"] = ["mlp.gate"]
    with pytest.raises(LoadError, match=r"mlp.down.weight: expected a scheme .* got targets \['mlp.gate'\]"):
        read(config, tensors)


@pytest.mark.parametrize(
    ("targets", "fits"),
    [
        (["Linear", "Module", "re:.*up", "mlp.up"], "mlp.up"),
        (["Linear", "re:mlp.*", "re:.*up"], "re:.*up"),
        (["Module", "Linear"], "Linear"),
        (["Module", "re:up"], "Module"),
        (["re:model.mlp.*"], "re:model.mlp.*"),
    ],
)
def test_the_target_that_fits_best_has_the_scheme(targets: list[str], fits: str) -> None:
    """Whatever the order of the groups. Patterns begin at the name's begin; two fit by the order of their text."""
    weight = packing.round_weight(random(32, 96), 4, 32)
    tensors = {
        f"mlp.up.{name}": part for name, part in packing.compressed_packed(weight, symmetric=True).items()
    }
    groups = {
        str(number): {"targets": [target], "weights": {"num_bits": 4 if target == fits else 5}}
        for number, target in enumerate(targets)
    }
    headers = {name: Header(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def module_of(name: str) -> CheckpointModule:
        return CheckpointModule("model." + name, ("Linear", "Module"))

    def read_it(config: dict[str, Any]) -> CheckpointWeights:
        config = {"quant_method": "compressed-tensors", **config}
        return checkpoint_weights(config, headers, tensors.__getitem__, module_of)

    (found,) = read_it({"config_groups": groups}).weights
    same_bits(*found.read(tensors.__getitem__), weight.values)  # pyright: ignore
    same = {"config_groups": {"W4A16": [fits]}}  # a preset
    (found,) = read_it(same).weights
    same_bits(*found.read(tensors.__getitem__), weight.values)  # pyright: ignore
    for ignored in (["Linear"], [r"re:.*\.up"], ["model.mlp.up"], ["mlp.up"]):
        with pytest.raises(LoadError, match=r"weight mlp\.up\.weight: .*quantization_config\.ignore"):
            read_it({**same, "ignore": ignored})
    with pytest.raises(
        LoadError, match=r"expected a scheme of config_groups that fits the module, got targets"
    ):
        read_it({"config_groups": {"W4A16": ["Embedding", "re:up"]}})


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="the package compressed-tensors is not installed",
)
@pytest.mark.parametrize(
    "preset", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "MXFP8A16"]
)
def test_the_package_itself_reads_the_same(preset: str) -> None:
    from compressed_tensors.compressors import BaseCompressor  # pyright: ignore
    from compressed_tensors.compressors.format import infer_module_format  # pyright: ignore
    from compressed_tensors.quantization import preset_name_to_scheme  # pyright: ignore

    made = preset_name_to_scheme(preset, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, made).value)
    weights = made.weights
    outputs, inputs = 256, 384
    if preset == "FP8_BLOCK":
        shape = (outputs // 128, inputs // 128)
    else:
        shape = (outputs, inputs // (weights.group_size or inputs))
    state = {"weight": torch.randn(outputs, inputs), "weight_scale": torch.rand(shape) / 8 + 0.01}
    if preset.startswith("MXFP"):
        state["weight_scale"] = torch.exp2(torch.randint(-6, 2, shape).float())
    if not weights.symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
    stored = compressor.compress(state, made)
    expected = compressor.decompress(stored, made)["weight"]
    got = one({"quant_method": "compressed-tensors", "config_groups": {"0": made.model_dump()}}, stored)
    assert torch.equal(got.dequantize().to(expected.dtype), expected)


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 256), (200, 320)])
def test_fp8_in_blocks(outputs: int, inputs: int) -> None:
    tensors, values = packing.fp8_blocks(random(outputs, inputs), 128)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    got = one(config, tensors)
    same_bits(got, values)
    same_bits(one({**config, "weight_block_size": "128x128"}, tensors), values)
    same_bits(one({"quant_method": "fp8"}, tensors), values)  # transformers' default
    with pytest.raises(LoadError, match=r"weight_block_size: expected two whole numbers above 0"):
        one({**config, "weight_block_size": "128 by 128"}, tensors)
    with pytest.raises(LoadError, match=r"weight_block_size = \[64, 128\], got scales of"):
        one({**config, "weight_block_size": [64, 128]}, tensors)
    assert got.group == (128 if inputs % 128 == 0 else 64)


def test_fp8_of_channels_and_of_all() -> None:
    tensors, values = packing.fp8_channels(random(24, 96))
    same_bits(one({"quant_method": "fbgemm_fp8"}, tensors | {"input_scale_ub": torch.ones(1)}), values)
    tensors["weight_scale"] = torch.tensor(0.25)
    got = one(
        {"quant_method": "fp8", "activation_scheme": "static"}, tensors | {"input_scale": torch.ones(1)}
    )
    assert torch.equal(got.dequantize(), tensors["weight"].float() * 0.25)


def test_mxfp4_experts() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = packing.mxfp4(random(3 * 40, 96).reshape(3, 40, 96))
    name = "mlp.experts.gate_up_proj"
    tensors = {name + end: tensor for end, tensor in tensors.items()}
    (weight,) = read({"quant_method": "mxfp4"}, tensors).weights
    assert (weight.name, weight.shape) == (name, (3, 40, 96))
    experts = weight.read(tensors.__getitem__)
    assert len(experts) == 3
    for expert, expected in zip(experts, values, strict=True):
        same_bits(expert, expected)
    theirs = convert_moe_packed_tensors(tensors[name + "_blocks"], tensors[name + "_scales"])
    assert torch.equal(weight.dequantize(tensors.__getitem__, torch.bfloat16), theirs)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inputs", [128, 96])
def test_bitsandbytes_in_4_bits(nested: bool, inputs: int) -> None:
    tensors, values = packing.nf4(random(40, inputs), nested=nested)
    got = one({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)
    same_bits(got, values)
    assert got.group == (64 if inputs % 64 == 0 else 32)


def test_bitsandbytes_in_8_bits() -> None:
    tensors, values = packing.int8_of_bitsandbytes(random(24, 96))
    got = one({"load_in_8bit": True}, tensors).dequantize()
    torch.testing.assert_close(got, torch.from_numpy(values), rtol=3e-7, atol=0)


PLAIN = {"a.weight": torch.ones(8, 8)}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            {"quant_method": "hqq"},
            PLAIN,
            r"or quantized by gptq, awq, .*got quant_method 'hqq'; take the model as one",
        ),
        (
            {"quant_method": "awq", "version": "gemv"},
            PLAIN,
            r"quantization_config.version: expected gemm, got 'gemv'; take the checkpoint in the version",
        ),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, PLAIN, "gptq or gptq_v2, got 'marlin'"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            PLAIN,
            "got 'nvfp4-pack-quantized'; take a checkpoint of the model in W8A16",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            PLAIN,
            r"sparsity_config.format: expected dense, got 'sparse-24-bitmask'",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
            PLAIN,
            r"transform_config.config_groups: expected no transforms",
        ),
        (
            {"quant_method": "fp8"},
            {"a.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn)},
            "the checkpoint lacks a.weight_scale_inv",
        ),
        (
            {"quant_method": "mxfp4"},
            {"a.weight": torch.zeros(8, 8, dtype=torch.int8)},
            r"tensors that mxfp4 is known to have, got a.weight of int8 \[8, 8\]",
        ),
        (
            {"quant_method": "gptq"},
            {"a.qweight": torch.zeros(8, 8, dtype=torch.int32)},
            r"a.weight: the checkpoint lacks a.qzeros",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        read(config, tensors)


BROKEN: list[tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], Any], str]] = [
    ({}, lambda tensors: tensors.update(g_idx=torch.full((64,), 9)), "g_idx of 64 groups below 2, got"),
    ({}, lambda tensors: tensors.update(scales=torch.ones(3, 32)), r"scales \[2, 32\], got \[3, 32\]"),
    ({}, lambda tensors: tensors.update(qzeros=torch.ones(2, 5, dtype=torch.int32)), "2, 3, 4 or 8 bits as"),
]


@pytest.mark.parametrize(("config", "change", "message"), BROKEN)
def test_tensors_that_do_not_fit_are_named(
    config: dict[str, Any], change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    tensors = packing.gptq(packing.round_weight(random(32, 64), 4, 32, half=True), minus_one=True)
    change(tensors)
    with pytest.raises(LoadError, match=r"cannot read the weight mlp.up.weight: expected " + message):
        one({"quant_method": "gptq", **config}, tensors)
