"""Tiny random models whose weights have the statistics of real checkpoints, on which wrong kernels look right.

Their statistics were measured on real models of the Gemma and Qwen families. Norm weights are far from 1: counting from
0 or from 1 then differs by less than a 16-bit type shows. Two channels of the residual are a hundred times as large as
the others and hide what a layer adds. Some channels of the keys are all but constant. Values grow a hundredfold with
depth.
"""

from __future__ import annotations

import copy

import torch
from support.architectures import tiny
from torch import nn
from transformers import PreTrainedModel

_NORM_ATTRIBUTES = ("variance_epsilon", "eps")


def realistic(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The tiny model of architecture `name` (`architectures`) with such weights, from a fixed seed."""
    model = tiny(name)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        layers = [part for part in model.modules() if hasattr(part, "self_attn")]
        for name_of, module in model.named_modules():
            if is_norm(module):
                of_heads = name_of.endswith(("q_norm", "k_norm", "q_layernorm", "k_layernorm"))
                _as_measured(module, generator, of_heads=of_heads)
        for name_of, parameter in model.named_parameters():
            if name_of.endswith("bias") and parameter.dim() == 1:
                parameter.normal_(0.0, 0.5, generator=generator)
        for depth, layer in enumerate(layers):
            _keys_and_values(layer.self_attn, depth / max(1, len(layers) - 1), generator)
        table = model.get_input_embeddings().weight
        table[:, torch.tensor([3, 41]) % table.shape[1]] *= 300.0
    return model.to(dtype)


def is_norm(module: nn.Module) -> bool:
    """A norm over rows with weights of its own."""
    weight = module._parameters.get("weight")
    return (
        weight is not None and weight.dim() == 1 and any(hasattr(module, name) for name in _NORM_ATTRIBUTES)
    )


def counts_from_one(module: nn.Module) -> bool:
    """Whether rows are multiplied by 1 + weight."""
    assert isinstance(module.weight, torch.Tensor)
    before = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.zero_()
        x = torch.randn(2, before.numel())
        one = bool(module(x).abs().sum() > 0) and getattr(module, "bias", None) is None
        module.weight.copy_(before)
    return one


def takes_mean_off(module: nn.Module) -> bool:
    """Whether a constant added to a row changes nothing."""
    norm = copy.deepcopy(module).float()
    x = torch.randn(2, norm._parameters["weight"].numel())  # type: ignore[union-attr]
    with torch.no_grad():
        return torch.allclose(norm(x), norm(x + 3.0), atol=1e-3, rtol=1e-3)


def _as_measured(module: nn.Module, generator: torch.Generator, *, of_heads: bool) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    one = counts_from_one(module)
    if of_heads:  # of queries and keys: small, a few large
        weight.copy_(0.8 * torch.exp(0.5 * torch.randn(weight.shape, generator=generator)))
        weight[torch.randperm(weight.numel(), generator=generator)[:1]] *= 8.0
        return
    weight.copy_((12.0 if one else 2.0) * torch.exp(0.6 * torch.randn(weight.shape, generator=generator)))
    few = torch.randperm(weight.numel(), generator=generator)[:4]
    weight[few[:2]] *= 700 / 12 if one else 8.0
    if one:
        weight[few[2:]] = -weight[few[2:]]


def _keys_and_values(attention: nn.Module, depth: float, generator: torch.Generator) -> None:
    """depth: 0 for the first layer, 1 for the last."""
    for name, size in (("k_proj", None), ("v_proj", 0.03 * (10 / 0.03) ** depth)):
        linear = getattr(attention, name, None)
        if not isinstance(linear, nn.Linear):
            continue
        if size is not None:
            linear.weight.mul_(size)
        elif linear.bias is not None:
            offsets = torch.tensor([15.0, -40.0, 90.0, 150.0])
            linear.bias[torch.randperm(linear.bias.numel(), generator=generator)[:4]] = offsets
