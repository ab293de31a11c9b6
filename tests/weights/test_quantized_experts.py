"""Experts that compute from codes: the twin's bits in any batch, only the requested experts, and a complete restore."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.cache_case import BACKENDS
from support.generate_oracle import generate
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import MergeModulelist

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.hf import accelerate
from quire.model.weight_sizes import measured_weights, planned_weights
from quire.spec.weight_formats import Rounding, parse_weights
from quire.weights.codes import round_to_codes
from quire.weights.experts import expert_panels, pack_experts, projections_of
from quire.weights.load import load
from quire.weights.quantized_experts import QuantizedExperts, install_quantized_experts
from quire.weights.quantized_modules import (
    bytes_by_format,
    planned_forms,
    quantize_model,
    quantized_weights,
    round_and_pack,
)

NAMES = ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"]
EXPERTS = parse_weights({"*.experts.*": "int4:32"}, head="bf16")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [[7, 81, 3, 44, 9, 100, 23], [5, 6], [9] * 12]
needs_kernels = pytest.mark.skipif("native" not in BACKENDS, reason="the kernels are not built here")


def experts_of(model: nn.Module) -> Any:
    return next(module for module in model.modules() if projections_of(module) is not None)


def routed(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_tokens, 64, generator=make).to(dtype),
        torch.rand(num_tokens, 3, generator=make).topk(2).indices,  # the fourth has no rows
        torch.rand(num_tokens, 2, generator=make).to(dtype),
    )


def codes_of(experts: nn.Module) -> list[QuantizedExperts]:
    found = [expert_panels(experts._parameters[name]) for name in projections_of(experts) or ()]
    return [codes for codes in found if isinstance(codes, QuantizedExperts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES[:3])
def test_bits_are_the_twins_in_any_company(name: str, dtype: torch.dtype) -> None:
    arguments = routed(33, dtype)
    model = tiny(name)
    model.to(dtype=dtype)
    quantize_model(model, EXPERTS)
    experts = experts_of(model)
    for codes in codes_of(experts):
        list.__setitem__(codes, 3, None)  # nobody is to touch it
    with torch.inference_mode():
        got = experts(*arguments)
        for index in range(33):
            alone = experts(*(tensor[index : index + 1] for tensor in arguments))
            assert torch.equal(alone[0], got[index])
        twin = tiny(name)
        twin.to(dtype=dtype)
        quantize_model(twin, EXPERTS, pack=partial(round_and_pack, dtype=dtype, backend="python"))
        assert torch.equal(experts_of(twin)(*arguments), got)


def test_the_parameter_reads_as_the_codes_and_writing_makes_it_dense() -> None:
    model = tiny("gpt_oss")
    dense = experts_of(model).down_proj.detach().clone()
    quantize_model(model, EXPERTS)
    experts = experts_of(model)
    rounded = torch.stack([round_to_codes(one.t(), Rounding(4, 32)).dequantize().t() for one in dense])
    assert torch.equal(experts.down_proj, rounded)
    assert model.state_dict()["model.layers.0.mlp.experts.down_proj"].shape == dense.shape
    arguments = routed(5, torch.float32)
    with torch.inference_mode():
        before = experts(*arguments)
        experts.down_proj.mul_(2)
        experts.down_proj_bias.mul_(2)
        torch.testing.assert_close(experts(*arguments), 2 * before)
    assert "model.layers.0.mlp.experts.down_proj" not in quantized_weights(model)


@needs_kernels
def test_one_projection_may_be_dense() -> None:
    model = tiny("mixtral")
    quantize_model(model, parse_weights({"*.gate_up_proj": "int8"}, head="bf16"))
    experts, arguments = experts_of(model), routed(9, torch.float32)
    with torch.inference_mode():
        by_torch = experts(*arguments)
        undo = pack_experts(model)
        torch.testing.assert_close(experts(*arguments), by_torch)
        undo()
        assert torch.equal(experts(*arguments), by_torch)
    assert len(codes_of(experts)) == 1


def test_patterns_name_projections_of_experts() -> None:
    model = tiny("mixtral")
    formats = parse_weights({"*.experts.down_proj": "int8", "*.layers.1.*experts*": "int4", "*": "bf16"})
    quantize_model(model, formats)
    labels = {name: codes.label for name, codes in quantized_weights(model).items() if "experts" in name}
    assert labels == {
        "model.layers.0.mlp.experts.down_proj": "int8",
        "model.layers.1.mlp.experts.down_proj": "int8",
        "model.layers.1.mlp.experts.gate_up_proj": "int4",  # one group is all of 64 inputs
    }
    assert set(bytes_by_format(model)) == {"int8", "int4", "float32"}
    with pytest.raises(
        ArgumentError, match=r"model.layers.0.mlp.experts.gate_up_proj.*got 'expert' - in `weights`"
    ):
        quantize_model(tiny("mixtral"), parse_weights({"expert": "int8"}))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    experts = experts_of(tiny("mixtral"))
    before = experts.down_proj
    weight = round_to_codes(torch.randn(64, 96), Rounding(8, None))
    for name, weights, said in (
        ("down_proj", [weight] * 3, "expected 4 experts, got 3"),
        ("gate_up_proj", [weight] * 4, "expected experts of 192 outputs and 64 inputs, got 64 and 96"),
        ("act_fn", [weight] * 4, "expected a projection of experts"),
    ):
        with pytest.raises(ArgumentError, match=said):
            install_quantized_experts(experts, name, weights, torch.float32)
    assert experts.down_proj is before


def test_experts_that_compute_otherwise_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("mixtral")
    for module in model.modules():
        if projections_of(module) is not None:
            cls = type(module)

            class Odd(cls):  # type: ignore[misc, valid-type]
                def forward(self, hidden_states: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
                    return super().forward(hidden_states, *args) + 1.0

            module.__class__ = Odd
    quantize_model(model, EXPERTS)
    assert not quantized_weights(model)
    assert type(experts_of(model)).__name__ == "Odd"
    assert (
        "4 weights of experts stay in float32, the first model.layers.0.mlp.experts.gate_up_proj"
        in caplog.text
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_knows_what_they_weigh(name: str) -> None:
    model, formats = tiny(name), parse_weights({"*.down_proj": "int4:32", "*": "int8"})
    with torch.device("meta"):
        unloaded = AutoModelForCausalLM.from_config(model.config)
    planned = planned_weights(unloaded, packing="watched", form_of=planned_forms(unloaded, formats).get)
    quantize_model(model, formats)
    rows = {row.kind: row.num_bytes for row in measured_weights(model)}
    assert rows["experts"] == next(row.num_bytes for row in planned if row.kind == "experts")
    assert bytes_by_format(model)["int8"] > 0


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("qwen3_moe", BACKENDS[-1]),
        *(pytest.param(name, backend, marks=pytest.mark.ci) for name in NAMES for backend in BACKENDS),
    ],
)
def test_tokens_are_transformers_with_the_dequantized_weights(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are rounded one by one as they are read: transformers merges nothing but numbers of rows."""
    plain = tiny(name)
    plain.save_pretrained(tmp_path)
    merge, merged = MergeModulelist.convert, []

    def watched(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        merged.extend(one.dtype for several in tensors.values() for one in several)
        return merge(self, tensors, *args, **kwargs)

    monkeypatch.setattr(MergeModulelist, "convert", watched)
    with LLM(tmp_path, weights="int4:32", head="bf16", kv_memory="1MiB", backend=backend) as llm:
        together, alone = tokens_of(llm, PROMPTS), [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]
        assert llm.stats()["weight_bytes"]["int4:32"] > 0
    assert set(merged) <= {torch.int32}
    rounded = load(tmp_path, weights=parse_weights("int4:32", head="bf16")).model
    plain.load_state_dict(rounded.state_dict())
    assert together == alone == [generate(plain, prompt, 8)[0] for prompt in PROMPTS]


def test_accelerate_computes_from_them() -> None:
    model = tiny("qwen3_moe")
    quantize_model(model, EXPERTS)
    plain = tiny("qwen3_moe")
    plain.load_state_dict(model.state_dict())
    want = [generate(plain, prompt, 8)[0] for prompt in PROMPTS]
    accelerate(model)
    assert len(codes_of(experts_of(model))) == 2
    assert [generate(model, prompt, 8)[0] for prompt in PROMPTS] == want


def test_llama4_experts_stay_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama4_text")
    with caplog.at_level(logging.WARNING, logger="quire"):
        quantize_model(model, parse_weights("int8"))
    assert (
        "4 weights of experts stay in float32, the first model.layers.1.feed_forward.experts" in caplog.text
    )
