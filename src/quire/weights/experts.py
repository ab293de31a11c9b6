"""Experts of a mixture, given as 3-D parameters: each expert's two weights packed like a linear layer's, once.

Modules are matched by structure: the flags that transformers' `use_experts_implementation` leaves on a module
(orientation of its weights, gate, biases, a norm at the end), with one 3-D parameter per projection. One module of each
group of equal modules is proved first (F1, F2, with the routing given, experts cast one by one and only those that have
rows); if the proof fails, the group stays dense. One or both projections may be quantized already
(`quantized_experts`): the module computes from them, and they are not packed. Not a router: the model decides which
token goes to which expert, and with what weight.

    rows sorted by expert -> one packed product for each expert that has rows -> the module's own gate -> one packed
    product again -> weighted -> added per token in float32, in the order in which the router names its experts

Invariants
    E1  the bits of a token depend on its row, its experts and their weights, never on the other tokens: a packed
        product keeps the order of its sum for any number of rows, the sum over experts runs in the token's own order.
    E2  the parameters read and write as ordinary ones (`packed_parameter`): if one was written, is being viewed, or a
        gradient is requested, the module's own forward computes. After the undo the same Parameter objects hold the
        bits they have by then.

Cost of a call: two products for each expert hit, plus about 5 us for each; an expert without rows is not touched.
Packing holds one parameter twice for a moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import nn

from quire.devices import PackedWeight
from quire.devices.cpu.packed_weights import NativeWeight
from quire.load_progress import observer
from quire.memory.heap import give_back_freed
from quire.modules.equal_modules import kind_of
from quire.modules.error_bounds import decide, within_bounds
from quire.modules.module_patch import SwitchedModule, original_class, restore_class
from quire.weights.codes import QuantizedPanels
from quire.weights.dense_weights import dense_weight
from quire.weights.linear import DenseWeight, choose_packing
from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter

__all__ = [
    "DenseExperts",
    "PackedExperts",
    "expert_loop",
    "expert_panels",
    "expert_projections",
    "has_equal_outputs",
    "is_experts",
    "pack_experts",
    "projections_of",
    "switch_to_packed",
    "unpack_experts",
]

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts", "_apply_gate")


def pack_experts(model: nn.Module) -> Callable[[], None]:
    """Pack every experts module of `model` that has the structure above, in place.

    Returns a function that restores every weight, bit for bit; a second call does nothing.
    """
    undo: list[Callable[[], None]] = []

    def restore() -> None:
        while undo:
            undo.pop()()

    proved: dict[Hashable, bool] = {}
    try:
        for module in model.modules():
            if (names := expert_projections(module)) is None:
                continue
            kind = kind_of(module)
            if kind not in proved:
                proved[kind] = has_equal_outputs(module, names)
            if proved[kind] and (undone := _pack(module, names)) is not None:
                undo.append(undone)
            give_back_freed()  # the dense weights lay between memory that stays
    except BaseException:
        restore()
        raise
    return restore


class PackedExperts(SwitchedModule):
    """Base of packed experts. `_names`: of the projections; each one's Parameter leads to its packed weights."""

    _names: tuple[str, str]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        module = cast(Any, self)
        packed = [self._packed_weights(name) for name in self._names]
        if (
            None in packed
            or _wants_gradient(self, hidden_states)
            or hidden_states.dtype is not packed[0][0].dtype
            or torch.is_autocast_enabled("cpu")
        ):
            forward = cast(Any, original_class(self)).forward
            return forward(self, hidden_states, top_k_index, top_k_weights)
        num_tokens, top_k = top_k_index.shape
        experts = top_k_index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=module.num_experts).tolist()
        rows = self._products(self._names[0], packed[0], hidden_states[order // top_k], counts)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._products(self._names[1], packed[1], rows, counts)
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        weighted = torch.empty_like(rows)
        weighted[order] = rows
        parts = weighted.view(num_tokens, top_k, -1).float() * top_k_weights.float()[..., None]
        total = parts[:, 0]
        for index in range(1, top_k):
            total = total + parts[:, index]
        return total.to(hidden_states.dtype)

    def _products(
        self, name: str, packed: list[NativeWeight], rows: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """rows [S, num_inputs], sorted by expert -> [S, num_outputs]."""
        biases = getattr(self, name + "_bias") if cast(Any, self).has_bias else None
        pieces, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                bias = None if biases is None else biases[expert]
                pieces.append(packed[expert].multiply(rows[start : start + count], bias))
                start += count
        return torch.cat(pieces)

    def _packed_weights(self, name: str) -> Any:
        """One weight per expert that multiplies; None if the module's own forward has to compute."""
        weight = self._parameters.get(name)
        if isinstance(weight, PackedParameter):
            return None if weight.lazy_weight.dense is not None else weight.lazy_weight.packed
        if weight is None or all(expert_panels(self._parameters.get(other)) is None for other in self._names):
            return None
        return _ExpertWeights(DenseWeight, weight, weight.dtype, cast(Any, self).is_transposed)


def _wants_gradient(module: nn.Module, hidden_states: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (
        hidden_states.requires_grad or any(p.requires_grad for p in module.parameters())
    )


@functools.cache
def _packed_class(cls: type[nn.Module]) -> type[PackedExperts]:
    """The packed subclass for experts of exactly `cls`."""
    namespace = {"_quire_switched": True}
    return cast(type[PackedExperts], type(f"Packed{cls.__name__}", (PackedExperts, cls), namespace))


def expert_loop(cls: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """The class's own loop over experts: torch's grouped product takes neither float64 nor an odd width."""
    return getattr(cls.forward, "__wrapped__", cls.forward)


def is_experts(module: nn.Module) -> bool:
    """Whether the module has the structure of experts given as 3-D parameters."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def projections_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of the two projections of an experts module, dense, packed or quantized, on any device; None for any
    other module."""
    if not is_experts(module) or getattr(module, "_is_expert_parallel", False):
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    for name in names:
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3 or len(weight) != module.num_experts or not weight.numel():
            return None
        bias = module._parameters.get(name + "_bias")
        if module.has_bias and (bias is None or not bias.is_contiguous() or bias.dtype is not weight.dtype):
            return None
    return names


def expert_projections(module: nn.Module, device: str = "cpu") -> tuple[str, str] | None:
    """The names of the two projections of an experts module on `device`, if at least one can be packed and the other
    can be packed or is quantized; else None."""
    if (names := projections_of(module)) is None:
        return None
    dense = [weight for weight in map(module._parameters.__getitem__, names) if expert_panels(weight) is None]
    can_pack = all(
        type(weight) is nn.Parameter
        and weight.device.type == device
        and choose_packing(weight.dtype) == "native"
        for weight in dense
    )
    return names if dense and can_pack else None


def expert_panels(parameter: torch.Tensor | None) -> list[QuantizedPanels] | None:
    """The panels of each expert, if the parameter's weight is quantized; else None."""
    lazy_weight = parameter.lazy_weight if isinstance(parameter, PackedParameter) else None
    if lazy_weight is None or lazy_weight.dense is not None or not isinstance(lazy_weight.packed, list):
        return None
    return lazy_weight.packed if isinstance(lazy_weight.packed[0], QuantizedPanels) else None


def switch_to_packed(module: nn.Module, names: tuple[str, str]) -> None:
    """Have `module` compute from the packed or quantized weights of its projections `names`."""
    module.__class__ = _packed_class(original_class(module))
    module.__dict__.update(_names=names)


def _pack(module: Any, names: tuple[str, str]) -> Callable[[], None] | None:
    """Pack the dense projections of one module; returns the undo, or None if torch does not let a Parameter be
    replaced."""
    parameters = [cast(nn.Parameter, module._parameters[name]) for name in names]
    replaced: list[nn.Parameter] = []

    def undo() -> None:
        if not is_quantized:
            restore_class(module)
        for parameter in replaced:
            if isinstance(parameter, PackedParameter):
                parameter.restore()

    is_quantized = any(expert_panels(parameter) is not None for parameter in parameters)
    for parameter in parameters:
        if expert_panels(parameter) is not None:
            continue
        dense = parameter.detach()
        packed = [NativeWeight(weight.t() if module.is_transposed else weight) for weight in dense]
        lazy_weight = LazyDenseWeight(
            packed=packed, unpack=functools.partial(unpack_experts, packed, module.is_transposed)
        )
        if not PackedParameter.replace_parameter(parameter, lazy_weight, dense):
            undo()
            return None
        observer().add_read(dense.numel() * dense.element_size())
        replaced.append(parameter)
    switch_to_packed(module, names)

    return undo


def unpack_experts(packed: Sequence[PackedWeight], transposed: bool) -> torch.Tensor:
    """The weights of all experts in the layout of their parameter."""
    experts = [weight.unpack() for weight in packed]
    return torch.stack([weight.t() if transposed else weight for weight in experts])


class DenseExperts:
    """A parameter of all experts, read one expert at a time, in another dtype."""

    def __init__(self, parameter: torch.Tensor, dtype: torch.dtype, transposed: bool) -> None:
        self._dtype, self._transposed = dtype, transposed
        self._packed = self._dense = None
        if isinstance(parameter, PackedParameter) and parameter.lazy_weight.dense is None:
            self._packed = parameter.lazy_weight.packed
        else:
            self._dense = dense_weight(parameter)

    def __getitem__(self, expert: Any) -> torch.Tensor:
        if self._dense is not None:
            return self._dense[expert].to(self._dtype)
        packed = cast(Any, self._packed)[int(expert)]
        # Panels unpack without rounding to the model's dtype first.
        is_quantized = isinstance(packed, QuantizedPanels)
        weight = packed.unpack(self._dtype) if is_quantized else packed.unpack().to(self._dtype)
        return weight.t() if self._transposed else weight


class _ExpertWeights(DenseExperts):
    """`DenseExperts` as weights that multiply. make: makes a weight of [num_outputs, num_inputs]."""

    def __init__(
        self,
        make: Callable[[torch.Tensor], PackedWeight],
        parameter: torch.Tensor,
        dtype: torch.dtype,
        transposed: bool,
    ) -> None:
        super().__init__(parameter, dtype, transposed)
        self._make = make

    def __getitem__(self, expert: Any) -> PackedWeight:  # type: ignore[override]
        weight = super().__getitem__(expert)
        return self._make(weight.t() if self._transposed else weight)


def has_equal_outputs(module: Any, names: tuple[str, str]) -> bool:
    """Whether a packed module gives the outputs of `module`, for some of its experts, with the routing given.

    For quantized projections F1 uses the dequantized weight, in float32; F2 the product with the codes.
    """
    dtype = module._parameters[names[0]].dtype
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    firsts = [panels[0] for name in names if (panels := expert_panels(module._parameters[name])) is not None]
    # Torch multiplies where it multiplies the codes.
    make = DenseWeight if any(panels.native is None for panels in firsts) else NativeWeight

    def module_output(dtype: torch.dtype) -> torch.Tensor:
        twin = _twin(module, dtype)
        for name in names:
            twin._parameters[name] = DenseExperts(module._parameters[name], dtype, module.is_transposed)
        forward = expert_loop(original_class(module))
        return torch.cat([forward(twin, *example) for example in _examples(module, names, dtype)])

    def packed_output(working: torch.dtype) -> torch.Tensor:
        twin = _twin(module, working)
        switch_to_packed(twin, names)
        forms: dict[str, Any] = {}
        for name in names:
            panels = expert_panels(module._parameters[name])
            if panels is not None and working is dtype:
                forms[name] = panels
            else:
                forms[name] = _ExpertWeights(make, module._parameters[name], working, module.is_transposed)
        twin.__dict__.update(_packed_weights=forms.__getitem__)
        return torch.cat([twin.forward(*example) for example in _examples(module, names, working)])

    try:
        with torch.inference_mode():
            candidates = {True: packed_output(torch.float32)}
            if decide(candidates, module_output(torch.float32), lambda: module_output(torch.float64)) is None:
                return False
            return within_bounds(packed_output(dtype), module_output(dtype), module_output(wide), dtype)
    except Exception:  # a forward with other arguments
        return False


def _twin(module: Any, dtype: torch.dtype) -> Any:
    """A second module over the same submodules, with its own small parameters in `dtype`."""
    twin = object.__new__(original_class(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: parameter if parameter is None or parameter.dim() > 2 else parameter.detach().to(dtype)
        for name, parameter in module._parameters.items()
    }
    return twin


def _examples(
    module: Any, names: tuple[str, str], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Random tokens with their experts and weights: 65, 8 and 1 tokens with one expert each; 8 with two each."""
    weight = module._parameters[names[0]]
    place = weight.device
    hidden_size, last = weight.shape[1 if module.is_transposed else 2], len(weight) - 1
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([0, last // 2, last])
    singles = torch.repeat_interleave(chosen, torch.tensor([65, 8, 1]))[:, None]
    pairs = singles[:8]
    if last > 1:
        pairs = chosen[torch.rand(8, 3, generator=generator).topk(2, dim=-1).indices]
    return [
        (
            torch.randn(len(experts), hidden_size, generator=generator).to(weight.dtype).to(place, dtype),
            experts.to(place),
            torch.rand(experts.shape, generator=generator).to(weight.dtype).to(place, dtype),
        )
        for experts in (singles, pairs)
    ]
