"""Experts of a mixture, given as 3-D parameters: each expert's two weights packed like a linear layer's, held once.

Matched by structure: what transformers' `use_experts_implementation` leaves on a module (which way its weights lie,
whether it has a gate, biases, a norm behind), with one 3-D parameter a projection. Each use is proved first: the packed
module must answer random tokens as the original does, or the original stays.
Not a router: who goes to which expert, and with what weight, comes from the model.

    rows sorted by expert -> one packed product for each expert that has rows -> the module's own gate -> one packed
    product again -> weighted -> added per token in float32, in the order in which the router names its experts

Invariants
    E1  the bits of a token depend on its row, its experts and their weights, never on the other tokens: a packed
        product keeps the order of its sum for any number of rows, the sum over experts runs in the token's own order.
    E2  the parameters read as they were, unpacked on demand; after the undoing the same Parameter objects hold the
        same bits.

Cost of a call: two products for each expert hit, plus about 5 us for each; packing holds one parameter twice for a
moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from quire.model.linear import NativeWeight, choose_packing

__all__ = ["pack_experts"]

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts", "_apply_gate")
# Relative distance that another order of the same sums explains.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def pack_experts(model: nn.Module) -> Callable[[], None]:
    """Pack every experts module of `model` that has the structure above, in place.

    Returns a function that gives every weight back, bit for bit; called again, it does nothing.
    """
    undo: list[Callable[[], None]] = []

    def restore() -> None:
        while undo:
            undo.pop()()

    try:
        for module in model.modules():
            if (names := _projections(module)) is not None and (undone := _pack(module, names)) is not None:
                undo.append(undone)
    except BaseException:
        restore()
        raise
    return restore


class _PackedExperts(nn.Module):
    """What packed experts share. `_packed`: the experts' weights by parameter name."""

    _packed: dict[str, list[NativeWeight]]
    _names: tuple[str, str]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        module = cast(Any, self)
        num_tokens, top_k = top_k_index.shape
        experts = top_k_index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=module.num_experts).tolist()
        rows = self._products(self._names[0], hidden_states[order // top_k], counts)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._products(self._names[1], rows, counts)
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        weighted = torch.empty_like(rows)
        weighted[order] = rows
        parts = weighted.view(num_tokens, top_k, -1).float() * top_k_weights.float()[..., None]
        total = parts[:, 0]
        for index in range(1, top_k):
            total = total + parts[:, index]
        return total.to(hidden_states.dtype)

    def _products(self, name: str, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """rows [S, num_inputs], sorted by expert -> [S, num_outputs]."""
        biases = getattr(self, name + "_bias") if cast(Any, self).has_bias else None
        pieces, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                bias = None if biases is None else biases[expert]
                pieces.append(self._packed[name][expert].multiply(rows[start : start + count], bias))
                start += count
        return torch.cat(pieces)

    def _unpacked(self, name: str) -> torch.Tensor:
        transposed = cast(Any, self).is_transposed
        experts = [weight.unpack() for weight in self._packed[name]]
        return torch.stack([weight.t() if transposed else weight for weight in experts])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, parameter in self._parameters.items():  # each in its place, which it keeps when set again
            if name in self._packed:
                destination[prefix + name] = self._unpacked(name)
            elif parameter is not None:
                destination[prefix + name] = parameter
        super()._save_to_state_dict(destination, prefix, keep_vars)


@functools.cache
def _packed_class(cls: type[nn.Module], names: tuple[str, str]) -> type[_PackedExperts]:
    """The packed subclass for experts of exactly `cls`, whose projections are called `names`."""
    weights: dict[str, Any] = {name: property(lambda self, name=name: self._unpacked(name)) for name in names}
    return cast(type[_PackedExperts], type(f"Packed{cls.__name__}", (_PackedExperts, cls), weights))


def _projections(module: nn.Module) -> tuple[str, str] | None:
    """The names of the two projections of an experts module that can be packed; None for any other module."""
    if not all(hasattr(module, flag) for flag in _FLAGS) or getattr(module, "_is_expert_parallel", False):
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    for name in names:
        weight = module._parameters.get(name)
        serves = (
            type(weight) is nn.Parameter
            and weight.dim() == 3
            and len(weight) == module.num_experts
            and weight.numel() > 0
            and weight.device.type == "cpu"
            and choose_packing(weight.dtype) == "native"
        )
        if weight is None or not serves:
            return None
        bias = module._parameters.get(name + "_bias")
        if module.has_bias and (bias is None or not bias.is_contiguous() or bias.dtype is not weight.dtype):
            return None
    return names


def _pack(module: Any, names: tuple[str, str]) -> Callable[[], None] | None:
    """Pack one module; returns what undoes that, or None where the packed one would answer otherwise."""
    parameters = {name: cast(nn.Parameter, module._parameters[name]) for name in names}
    cls = type(module)
    example = _example(module, parameters[names[0]])
    # Its own loop over experts: torch's grouped product refuses widths that are no multiple of 16 bytes.
    forward = getattr(cls.forward, "__wrapped__", cls.forward)
    with torch.inference_mode():
        expected = forward(module, *example)
    packed = {}
    for name, parameter in parameters.items():
        dense = parameter.detach()
        packed[name] = [NativeWeight(weight.t() if module.is_transposed else weight) for weight in dense]
        module._parameters[name] = None  # the entry stays: state_dict() keeps its order
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    module.__class__ = _packed_class(cls, names)
    module.__dict__.update(_packed=packed, _names=names)

    def undo() -> None:
        for name, parameter in parameters.items():
            parameter.data = cast(_PackedExperts, module)._unpacked(name)
            packed[name].clear()
        del module.__dict__["_packed"], module.__dict__["_names"]
        module.__class__ = cls
        module._parameters.update(parameters)

    try:
        with torch.inference_mode():
            answer = module(*example)
    except BaseException:
        undo()
        raise
    distance = float((answer.float() - expected.float()).norm() / expected.float().norm())
    if not distance <= _TOLERANCE[expected.dtype]:  # NaN included
        undo()
        return None
    return undo


def _example(module: Any, weight: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens, each with experts of its own choice and the weights they count with."""
    num_experts, hidden_size = len(weight), weight.shape[1 if module.is_transposed else 2]
    num_tokens, top_k = 5, min(2, num_experts)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(weight.dtype)
    experts = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices
    return hidden, experts, torch.rand(num_tokens, top_k, generator=generator).to(weight.dtype)
