"""The fused modules, the refusal of a wrong one by the proof, and a complete restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.architectures import tiny
from torch import nn

from quire.model import PreparedModel
from quire.weights import load

pytest.importorskip("quire._native")
from quire.model.fused import FusedDecoder
from quire.model.fused.mlp import mlp_candidates
from quire.model.fused.norm import norm_candidates
from quire.model.fused.structure import random_rows
from quire.modules.error_bounds import decide
from quire.weights.linear import pack_linears

# Whole layers; with the kinds of norm, rotation, MLP and surroundings there are.
WHOLE = ("llama", "qwen3", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi3", "smollm3", "stablelm",
         "starcoder2", "exaone4", "mistral", "vaultgemma")  # fmt: skip
# name -> what of two layers is fused where the whole is not
PARTS = {
    "cohere2": {"attention": 2, "mlp": 2, "layer": 0},  # parallel halves
    "qwen3_moe": {"attention": 2, "mlp": 0, "layer": 0},  # experts
    "gpt_oss": {"attention": 2, "mlp": 0, "layer": 0},  # experts, sinks
    "gpt2": {"attention": 0, "mlp": 2, "layer": 0},  # an attention of its own kind
    "hunyuan_v1_dense": {"attention": 0, "mlp": 2, "layer": 0},  # norms after the rotary embedding
    "olmo": {"attention": 0, "mlp": 2, "layer": 0},  # may clamp q, k and v
}


# All layers in one call; in WHOLE but not here: factors or caps around the layers (Gemma 2, Granite).
DECODERS = ("llama", "qwen3", "glm4", "olmo2", "phi3", "smollm3", "mistral", "exaone4")


def prepared(name: str, dtype: torch.dtype = torch.float32) -> PreparedModel:
    return PreparedModel(load((tiny(name).to(dtype), None)), backend="native")


def counts(model: PreparedModel) -> dict[str, int]:
    assert model.fused is not None
    return model.fused.counts


@pytest.mark.parametrize("name", WHOLE)
def test_whole_layers(name: str) -> None:
    model = prepared(name)
    assert counts(model)["layer"] == len(model.spec.layers)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "glm4", "granite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_layers_of_16_bits(name: str, dtype: torch.dtype) -> None:
    model = prepared(name, dtype)
    assert counts(model)["layer"] == len(model.spec.layers)


def test_a_residual_factor_that_16_bits_round() -> None:
    source = tiny("granite").to(torch.bfloat16)
    for layer in source.model.layers:
        layer.residual_multiplier = 0.22
    assert counts(PreparedModel(load((source, None)), backend="native"))["layer"] == 2


@pytest.mark.parametrize("name", PARTS)
def test_module_by_module(name: str) -> None:
    found = counts(prepared(name))
    assert {kind: found[kind] for kind in PARTS[name]} == PARTS[name]


@pytest.mark.parametrize("name", DECODERS)
def test_a_whole_decoder(name: str) -> None:
    assert prepared(name).decoder is not None


@pytest.mark.parametrize("name", ["gemma2", "granite", "qwen3_moe", "gpt2"])
def test_what_stands_around_the_layers_is_not_left_out(name: str) -> None:
    assert prepared(name).decoder is None


def test_the_proof_turns_down_a_decoder_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one logit is enough."""
    run = FusedDecoder.__call__

    def wrong(self: FusedDecoder, *arguments: Any) -> torch.Tensor | None:
        logits = run(self, *arguments)
        assert logits is not None
        logits.view(torch.int32)[0, 0] ^= 1
        return logits

    monkeypatch.setattr(FusedDecoder, "__call__", wrong)
    assert prepared("llama").decoder is None


def test_the_python_back_end_fuses_nothing() -> None:
    assert PreparedModel(load((tiny("llama"), None)), backend="python").fused is None


def test_restore_gives_every_forward_back() -> None:
    source = tiny("qwen3")
    classes = [type(module) for module in source.modules()]
    model = PreparedModel(load((source, None)), backend="native")
    assert [type(module) for module in source.modules()] != classes
    model.restore()
    assert [type(module) for module in source.modules()] == classes
    assert not any("forward" in module.__dict__ for module in source.modules())


def test_a_forward_that_somebody_replaced_is_left_alone() -> None:
    source = tiny("llama")
    first = source.model.layers[0]
    hook = first.mlp.__dict__["forward"] = first.mlp.forward
    model = PreparedModel(load((source, None)), backend="native")
    assert counts(model) == {"norm": 5, "mlp": 1, "attention": 2, "mixer": 0, "layer": 1}
    assert first.mlp.forward is hook
    model.restore()
    assert first.mlp.forward is hook


class Gated(nn.Module):
    """An MLP; `twist` is applied where a known one does nothing."""

    def __init__(self, twist: float = 1.0) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(24, 40), nn.Linear(24, 40)
        self.down, self.act = nn.Linear(40, 24), nn.SiLU()
        self.register_buffer("twist", torch.tensor(twist), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Twisted(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.twist


def test_an_mlp_is_known_by_its_structure_in_either_order() -> None:
    model = Gated()
    pack_linears(model)
    x = torch.randn(1, 7, 24)
    with torch.inference_mode():
        answers = {swapped: mlp(x) for swapped, mlp in mlp_candidates(model).items()}
        assert decide(answers, model(x)) is True


@pytest.mark.parametrize("twist", [1.0, 1.5])
def test_an_mlp_whose_forward_names_more_is_left_alone(twist: float) -> None:
    """Even where the unknown part happens to do nothing today."""
    model = Twisted(twist)
    pack_linears(model)
    assert mlp_candidates(model) == {}


def test_norms_are_told_apart() -> None:
    class FromOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(19)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)

    class Clipped(FromOne):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-0.5, 0.5)

    def kind(module: nn.Module) -> str | None:
        x = random_rows(19, 1e-6)
        with torch.inference_mode():
            return decide(
                {k: norm(x) for k, norm in norm_candidates(module, torch.float32).items()}, module(x)
            )

    assert kind(FromOne()) == "rms from 1"
    assert kind(nn.LayerNorm(19)) == kind(nn.LayerNorm(19, bias=False)) == "layer"
    assert kind(nn.RMSNorm(19, eps=1e-5)) == "rms"
    assert kind(Clipped()) is None
    assert norm_candidates(nn.Linear(19, 19), torch.float32) == {}


@pytest.mark.parametrize("num_rows", [1, 7])
def test_a_part_of_wider_rows_is_served_by_the_same_kernel(num_rows: int) -> None:
    """One row of a part is contiguous, several are not (the latents of MLA): bits must not depend on that."""
    norm, mlp = (tiny("qwen3").model.layers[0].get_submodule(name) for name in ("input_layernorm", "mlp"))
    wider = torch.randn(1, num_rows, 96, generator=torch.Generator().manual_seed(2))
    part = wider[..., :64]
    assert part.is_contiguous() == (num_rows == 1)
    undo = pack_linears(mlp)
    kernels: list[Any] = [*norm_candidates(norm, torch.float32).values(), *mlp_candidates(mlp).values()]
    for kernel in kernels:
        assert kernel.serves(part)
        assert torch.equal(kernel(part), kernel(part.clone().contiguous()))
    undo()
