"""Experts of a mixture, given as 3-D parameters: each expert's two weights held like a linear layer's, once.

Matched by structure: what transformers' `use_experts_implementation` leaves on a module (which way its weights lie,
whether it has a gate, biases, a norm behind), with one 3-D parameter a projection. One of those that are alike is
proved first (F1, F2, the routing given, experts widened one by one and only those that have rows); else they stay.
A projection may be held as codes already (`quantized_experts`), both or one of the two: it computes from them, and
is not packed. Not a router: who goes to which expert, and with what weight, comes from the model.

    rows sorted by expert -> one packed product for each expert that has rows -> the module's own gate -> one packed
    product again -> weighted -> added per token in float32, in the order in which the router names its experts

Invariants
    E1  the bits of a token depend on its row, its experts and their weights, never on the other tokens: a packed
        product keeps the order of its sum for any number of rows, the sum over experts runs in the token's own order.
    E2  the parameters read and write as ones (`packed_parameter`): where one was written, or is looked at, or a
    gradient is
        asked for, the module's own forward computes. After the undoing the same Parameter objects hold the bits they
        have by then.

Cost of a call: two products for each expert hit, plus about 5 us for each; an expert without rows is not touched.
Packing holds one parameter twice for a moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import nn

from quire.load_progress import observer
from quire.memory.heap import give_back_freed
from quire.model.dense_weights import plain
from quire.model.linear import DenseWeight, NativeWeight, PackedWeight, choose_packing
from quire.model.module_patch import Changed, let_go, own_class
from quire.model.packed_parameter import LazyDenseWeight, PackedParameter
from quire.model.prove.equal_modules import kind_of
from quire.model.prove.error_bounds import decide, within_bounds
from quire.quantized import QuantizedPanels

__all__ = [
    "DenseExperts",
    "PackedExperts",
    "coded_form",
    "compute_from",
    "expert_projections",
    "is_experts",
    "is_proved",
    "loop_of",
    "pack_experts",
    "projections_of",
    "unpacked",
]

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts", "_apply_gate")


def pack_experts(model: nn.Module) -> Callable[[], None]:
    """Pack every experts module of `model` that has the structure above, in place.

    Returns a function that gives every weight back, bit for bit; called again, it does nothing.
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
                proved[kind] = is_proved(module, names)
            if proved[kind] and (undone := _pack(module, names)) is not None:
                undo.append(undone)
            give_back_freed()  # the dense weights, between what stays
    except BaseException:
        restore()
        raise
    return restore


class PackedExperts(Changed):
    """What packed experts share. `_names`: of the projections; each one's Parameter leads to its packed form."""

    _names: tuple[str, str]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        module = cast(Any, self)
        packed = [self._packed_form(name) for name in self._names]
        if (
            None in packed
            or _wants_gradient(self, hidden_states)
            or hidden_states.dtype is not packed[0][0].dtype
            or torch.is_autocast_enabled("cpu")
        ):
            forward = cast(Any, own_class(self)).forward
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

    def _packed_form(self, name: str) -> Any:
        """One weight that multiplies for each expert; None where the module's own forward is to compute."""
        weight = self._parameters.get(name)
        if isinstance(weight, PackedParameter):
            return None if weight.held.dense is not None else weight.held.packed
        if weight is None or all(coded_form(self._parameters.get(other)) is None for other in self._names):
            return None
        return _OneByOne(DenseWeight, weight, weight.dtype, cast(Any, self).is_transposed)


def _wants_gradient(module: nn.Module, hidden_states: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (
        hidden_states.requires_grad or any(p.requires_grad for p in module.parameters())
    )


@functools.cache
def _packed_class(cls: type[nn.Module]) -> type[PackedExperts]:
    """The packed subclass for experts of exactly `cls`."""
    namespace = {"_quire_switched": True}
    return cast(type[PackedExperts], type(f"Packed{cls.__name__}", (PackedExperts, cls), namespace))


def loop_of(cls: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """Its own loop over experts: torch's grouped product takes no float64, and no width that is odd."""
    return getattr(cls.forward, "__wrapped__", cls.forward)


def is_experts(module: nn.Module) -> bool:
    """Whether it has the structure of experts given as 3-D parameters."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def projections_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of the two projections of an experts module, wherever and however they are held; None for any other
    module."""
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
    """The names of the two projections of an experts module on `device` of which at least one can be packed, and the
    other is held as codes where it cannot; None for any other module."""
    if (names := projections_of(module)) is None:
        return None
    plain = [weight for weight in map(module._parameters.__getitem__, names) if coded_form(weight) is None]
    serve = all(
        type(weight) is nn.Parameter
        and weight.device.type == device
        and choose_packing(weight.dtype) == "native"
        for weight in plain
    )
    return names if plain and serve else None


def coded_form(parameter: torch.Tensor | None) -> list[QuantizedPanels] | None:
    """The codes of each expert, where these are the parameter's weight; None for any other."""
    held = parameter.held if isinstance(parameter, PackedParameter) else None
    if held is None or held.dense is not None or not isinstance(held.packed, list):
        return None
    return held.packed if isinstance(held.packed[0], QuantizedPanels) else None


def compute_from(module: nn.Module, names: tuple[str, str]) -> None:
    """Have `module` compute from what its projections `names` are held as."""
    module.__class__ = _packed_class(own_class(module))
    module.__dict__.update(_names=names)


def _pack(module: Any, names: tuple[str, str]) -> Callable[[], None] | None:
    """Pack what is dense of one module; returns what undoes that, or None where torch does not let a Parameter's place
    be taken."""
    parameters = [cast(nn.Parameter, module._parameters[name]) for name in names]
    taken: list[nn.Parameter] = []

    def undo() -> None:
        if not is_coded:
            let_go(module)
        for parameter in taken:
            if isinstance(parameter, PackedParameter):
                parameter.give_back()

    is_coded = any(coded_form(parameter) is not None for parameter in parameters)
    for parameter in parameters:
        if coded_form(parameter) is not None:
            continue
        dense = parameter.detach()
        packed = [NativeWeight(weight.t() if module.is_transposed else weight) for weight in dense]
        held = LazyDenseWeight(
            packed=packed, unpack=functools.partial(unpacked, packed, module.is_transposed)
        )
        if not PackedParameter.take_place(parameter, held, dense):
            undo()
            return None
        observer().has_read(dense.numel() * dense.element_size())
        taken.append(parameter)
    compute_from(module, names)

    return undo


def unpacked(packed: Sequence[PackedWeight], transposed: bool) -> torch.Tensor:
    """The weights of all experts as their parameter has them."""
    experts = [weight.unpack() for weight in packed]
    return torch.stack([weight.t() if transposed else weight for weight in experts])


class DenseExperts:
    """A parameter of all experts, read one by one: what of an expert is asked for, in another type."""

    def __init__(self, parameter: torch.Tensor, dtype: torch.dtype, transposed: bool) -> None:
        self._dtype, self._transposed = dtype, transposed
        self._packed = self._dense = None
        if isinstance(parameter, PackedParameter) and parameter.held.dense is None:
            self._packed = parameter.held.packed
        else:
            self._dense = plain(parameter)

    def __getitem__(self, expert: Any) -> torch.Tensor:
        if self._dense is not None:
            return self._dense[expert].to(self._dtype)
        packed = cast(Any, self._packed)[int(expert)]
        is_coded = isinstance(packed, QuantizedPanels)  # whose numbers need not be the rounded ones
        weight = packed.unpack(self._dtype) if is_coded else packed.unpack().to(self._dtype)
        return weight.t() if self._transposed else weight


class _OneByOne(DenseExperts):
    """The same as weights that multiply. make: makes one of [num_outputs, num_inputs]."""

    def __init__(self, make: Callable[[torch.Tensor], PackedWeight], *widened: Any) -> None:
        super().__init__(*widened)
        self._make = make

    def __getitem__(self, expert: Any) -> PackedWeight:  # type: ignore[override]
        weight = super().__getitem__(expert)
        return self._make(weight.t() if self._transposed else weight)


def is_proved(module: Any, names: tuple[str, str]) -> bool:
    """Whether a packed module answers as `module` does, some of its experts, with routing given.

    Of what is held as codes F1 takes the dequantized weight, in float32; F2 the product with the codes.
    """
    dtype = module._parameters[names[0]].dtype
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    coded = [codes[0] for name in names if (codes := coded_form(module._parameters[name])) is not None]
    make = DenseWeight if any(codes.native is None for codes in coded) else NativeWeight  # as codes compute

    def own(dtype: torch.dtype) -> torch.Tensor:
        twin = _twin(module, dtype)
        for name in names:
            twin._parameters[name] = DenseExperts(module._parameters[name], dtype, module.is_transposed)
        forward = loop_of(own_class(module))
        return torch.cat([forward(twin, *example) for example in _examples(module, names, dtype)])

    def packed(working: torch.dtype) -> torch.Tensor:
        twin = _twin(module, working)
        compute_from(twin, names)
        forms: dict[str, Any] = {}
        for name in names:
            codes = coded_form(module._parameters[name])
            if codes is not None and working is dtype:
                forms[name] = codes
            else:
                forms[name] = _OneByOne(make, module._parameters[name], working, module.is_transposed)
        twin.__dict__.update(_packed_form=forms.__getitem__)
        return torch.cat([twin.forward(*example) for example in _examples(module, names, working)])

    try:
        with torch.inference_mode():
            if decide({True: packed(torch.float32)}, own(torch.float32), lambda: own(torch.float64)) is None:
                return False
            return within_bounds(packed(dtype), own(dtype), own(wide), dtype)
    except Exception:  # a forward that takes something else
        return False


def _twin(module: Any, dtype: torch.dtype) -> Any:
    """A second module over the same parts, with its own small parameters in `dtype`."""
    twin = object.__new__(own_class(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: parameter if parameter is None or parameter.dim() > 2 else parameter.detach().to(dtype)
        for name, parameter in module._parameters.items()
    }
    return twin


def _examples(
    module: Any, names: tuple[str, str], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Random tokens with their experts and what those count: of one expert, 65, 8 and 1; of two experts each."""
    weight = module._parameters[names[0]]
    hidden_size, last = weight.shape[1 if module.is_transposed else 2], len(weight) - 1
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([0, last // 2, last])
    one = torch.repeat_interleave(chosen, torch.tensor([65, 8, 1]))[:, None]
    two = chosen[torch.rand(8, 3, generator=generator).topk(2, dim=-1).indices] if last > 1 else one[:8]
    return [
        (
            torch.randn(len(experts), hidden_size, generator=generator).to(weight.dtype).to(dtype),
            experts,
            torch.rand(experts.shape, generator=generator).to(weight.dtype).to(dtype),
        )
        for experts in (one, two)
    ]
