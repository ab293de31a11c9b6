"""Modules that compute from quantized weights (`quire.weights.codes`), and the rounding of a whole model.

`install_quantized` is for callers with quantized weights, such as a reader of a checkpoint; `quantize_model` rounds
dense weights, one at a time. Both are applied to a model before it is prepared, and stay: preparation and its undo
leave such modules alone. Such a module is a packed one (`linear`): same object and name, its `.weight` reads as the
dequantized weight rounded once to the model's dtype, and a write to it makes the module dense.

Not here: products (`quire.weights.codes`), files, experts given as 3-D parameters (`quantized_experts`). Fused layers
use codes if one kernel takes all weights that they multiply together, such as q, k and v; otherwise, and if a weight
has an order of inputs of its own, the module runs unfused.

Invariants
    Q3  a weight that several modules share exists once.
    Q4  a quantized weight requires no gradient.

Cost: `quantize_model` needs the codes made so far and the float32 form of one weight, or of one expert.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from quire.errors import ArgumentError
from quire.memory.heap import give_back_freed
from quire.spec.weight_formats import Rounding, WeightFormats
from quire.weights.codes import QuantizedPanels, QuantizedWeight, round_to_codes
from quire.weights.experts import expert_panels, projections_of
from quire.weights.linear import PackedModule, is_transposed, packed_class
from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter
from quire.weights.quantized_experts import (
    QuantizedExperts,
    install_quantized_experts,
    packed_parameter,
    restore_unproved,
)

__all__ = [
    "WeightToRound",
    "bytes_by_format",
    "expert_forms",
    "install_panels",
    "install_quantized",
    "planned_forms",
    "quantize_model",
    "quantized_weights",
    "require_quantizable",
    "round_and_pack",
    "weights_to_round",
]

_log = logging.getLogger("quire")
_MAX_CONVOLUTION_SIDE = 16  # elements along an axis of a convolution's weight


def install_quantized(
    modules: nn.Module | Sequence[nn.Module], weight: QuantizedWeight, dtype: torch.dtype
) -> None:
    """Have `modules` compute from `weight`, in place. Their dense weight is dropped.

    modules: an `nn.Linear`, an `nn.Embedding` or a subclass, or transformers' `Conv1D`; several modules share the
    weight. Their `.weight` may be on "meta". dtype: of their inputs and outputs.

    *raises:* ArgumentError: a module is of another kind or has another shape, or there is no product of this format.
    """
    holders = [modules] if isinstance(modules, nn.Module) else list(modules)
    for module in holders:
        _checked(module, weight)
    install_panels(holders, QuantizedPanels(weight, dtype))


def install_panels(modules: Sequence[nn.Module], packed: QuantizedPanels) -> None:
    """As `install_quantized`, for a weight that is packed, in its dtype."""
    transposed, dtype = [_checked(module, packed) for module in modules], packed.dtype

    def unpack() -> torch.Tensor:
        dense = packed.unpack()
        return dense.t().contiguous() if transposed[0] else dense

    lazy_weight = LazyDenseWeight(packed=packed, unpack=unpack)
    parameter = packed_parameter(lazy_weight, _weight(modules[0]).shape, dtype, packed.device)
    for module, is_module_transposed in zip(modules, transposed, strict=True):
        module._parameters["weight"] = parameter
        module.__class__ = packed_class(type(module))
        cast(PackedModule, module).use_weight(lazy_weight, is_module_transposed)
    give_back_freed()  # the unpacked codes lay between memory that stays


def require_quantizable(module: nn.Module, label: str) -> None:
    """*raises:* ArgumentError: the module cannot compute from a quantized weight. label: the weight's format."""
    is_known = type(module) is nn.Linear or is_transposed(module) or isinstance(module, nn.Embedding)
    if not is_known or (isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse)):
        raise ArgumentError(
            f"{label}: expected an nn.Linear, a plain nn.Embedding or a Conv1D, got {type(module).__name__}"
        )


def _checked(module: nn.Module, weight: QuantizedWeight | QuantizedPanels) -> bool:
    """Whether the module's weight is [num_inputs, num_outputs]. *raises:* ArgumentError: it cannot be replaced by
    `weight`."""
    require_quantizable(module, weight.label)
    transposed = is_transposed(module)
    shape = tuple(_weight(module).shape[::-1] if transposed else _weight(module).shape)
    if shape != (weight.num_outputs, weight.num_inputs):
        raise ArgumentError(
            f"{weight.label}: expected a weight of {shape[0]} outputs and {shape[1]} inputs, got {weight.num_outputs} "
            f"and {weight.num_inputs}"
        )
    return transposed


def _weight(module: nn.Module) -> nn.Parameter:
    return cast(nn.Parameter, module._parameters["weight"])


def quantized_weights(model: nn.Module) -> dict[str, QuantizedPanels | QuantizedExperts]:
    """Each quantized weight, once, by the name of its first module; experts by the name of their parameter."""
    by_id: dict[int, tuple[str, QuantizedPanels | QuantizedExperts]] = {}
    for name, module in model.named_modules():
        packed = module.__dict__.get("_packed")
        if isinstance(packed, QuantizedPanels):
            by_id.setdefault(id(packed), (name, packed))
        for parameter_name, parameter in module._parameters.items():
            if isinstance(experts := expert_panels(parameter), QuantizedExperts):
                by_id.setdefault(id(experts), (f"{name}.{parameter_name}", experts))
    return dict(by_id.values())


def bytes_by_format(model: nn.Module) -> dict[str, int]:
    """Bytes of the weights by format: a quantized weight's label, another weight's dtype."""
    totals: dict[str, int] = {}
    for packed in quantized_weights(model).values():
        totals[packed.label] = totals.get(packed.label, 0) + packed.num_bytes
    for parameter in model.parameters():
        packed = parameter.lazy_weight.packed if isinstance(parameter, PackedParameter) else None
        if not isinstance(packed, QuantizedPanels | QuantizedExperts):
            name = str(parameter.dtype).removeprefix("torch.")
            totals[name] = totals.get(name, 0) + parameter.numel() * parameter.element_size()
    return dict(sorted(totals.items(), key=lambda entry: -entry[1]))


# -- rounding a model ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeightToRound:
    """A weight [num_outputs, num_inputs], a view of the model's memory; name: of its module, or of all experts."""

    name: str
    weight: torch.Tensor
    rounding: Rounding


def weights_to_round(model: PreTrainedModel, formats: WeightFormats) -> list[WeightToRound]:
    """The weights for which `quantize_model(model, formats, pack=...)` would call `pack`.

    *raises:* as `quantize_model`, for patterns.
    """
    to_round = [
        WeightToRound(name, _oriented(weight.detach(), is_transposed(modules[0])), rounding)
        for name, weight, modules, rounding in _chosen(model, formats)
    ]
    for name, rounding in _experts_to_round(model, formats).items():
        module, parameter_name = _place(model, name)
        experts = cast(torch.Tensor, module._parameters[parameter_name]).detach()
        to_round += [
            WeightToRound(name, _oriented(expert, bool(module.is_transposed)), rounding) for expert in experts
        ]
    return to_round


def round_and_pack(
    weight: torch.Tensor, rounding: Rounding, dtype: torch.dtype, backend: str | None = None
) -> QuantizedPanels:
    """`weight` [num_outputs, num_inputs] quantized, for activations of `dtype`."""
    return QuantizedPanels(round_to_codes(weight, rounding), dtype, backend=backend)


def quantize_model(
    model: PreTrainedModel,
    formats: WeightFormats,
    release: Callable[[torch.Tensor], None] | None = None,
    pack: Callable[[torch.Tensor, Rounding], QuantizedPanels] | None = None,
) -> None:
    """Round the weights of the model's linear layers, experts, head and embeddings to codes, in place, one at a time.

    Weights that a loader has rounded stay. Weights of experts in an unknown form stay too, with a line in the log.
    release: called with each dense weight before it is dropped. pack: returns the quantized form of each weight
    [num_outputs, num_inputs], for activations of the model's dtype; None rounds it.

    *raises:* ArgumentError: a pattern matches no layer's name, with the pattern and some names; a weight is not finite.
    """
    chosen, pack = _chosen(model, formats), pack or partial(round_and_pack, dtype=model.dtype)
    while chosen:
        _, weight, modules, rounding = chosen.pop()
        dense = weight.detach()
        packed = pack(_oriented(dense, is_transposed(modules[0])), rounding)
        if release is not None:
            release(dense)
        del weight, dense
        install_panels(modules, packed)
    to_round = _experts_to_round(model, formats)
    for name, rounding in to_round.items():
        module, parameter_name = _place(model, name)
        dense = cast(torch.Tensor, module._parameters[parameter_name]).detach()
        oriented = [_oriented(expert, bool(module.is_transposed)) for expert in dense]
        packed = (pack(expert, rounding) for expert in oriented)
        install_quantized_experts(module, parameter_name, packed, model.dtype)
        if release is not None:
            release(dense)
        del dense, oriented
    computes_otherwise = restore_unproved(model) if to_round else []
    if left := [*computes_otherwise, *_of_unknown_form(model, formats)]:
        _log.warning(
            "%d weights of experts stay in %s, the first %s: their module computes with them in another way",
            len(left),
            str(model.dtype).removeprefix("torch."),
            left[0],
        )


def _oriented(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.t() if transposed else weight


def _experts_to_round(model: nn.Module, formats: WeightFormats) -> dict[str, Rounding]:
    """`expert_forms` without experts that are quantized already."""
    forms = expert_forms(model, formats)
    return {name: forms[name] for name in forms if expert_panels(model.get_parameter(name)) is None}


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of the parameter `name`, and the parameter's name within it."""
    module_name, _, parameter_name = name.rpartition(".")
    return model.get_submodule(module_name), parameter_name


def expert_forms(model: nn.Module, formats: WeightFormats) -> dict[str, Rounding]:
    """The rounding of each projection of experts, by parameter name, quantized ones included."""
    return {name: rounding for name in _experts(model) if (rounding := formats.rounding_of(name)) is not None}


def _experts(model: nn.Module) -> list[str]:
    projections = ((name, projections_of(module)) for name, module in model.named_modules())
    return [f"{name}.{projection}" for name, names in projections for projection in names or ()]


def _of_unknown_form(model: nn.Module, formats: WeightFormats) -> list[str]:
    """Parameters that look like weights of all experts, in modules that are not known as experts."""
    known = set(_experts(model))
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3
        and min(parameter.shape[1:]) > _MAX_CONVOLUTION_SIDE
        and name not in known
        and formats.rounding_of(name) is not None
    ]


def planned_forms(model: PreTrainedModel, formats: WeightFormats) -> dict[str, str]:
    """The parameters that `quantize_model` would round, with their format ("int4:64"), by name.

    The model may lie on "meta".

    *raises:* as `quantize_model`.
    """
    linears = {f"{name}.weight": rounding for name, _, _, rounding in _chosen(model, formats)}
    return {name: str(rounding) for name, rounding in (linears | expert_forms(model, formats)).items()}


def _chosen(
    model: PreTrainedModel, formats: WeightFormats
) -> list[tuple[str, nn.Parameter, list[nn.Module], Rounding]]:
    """For each weight to round: the name of its first module, the weight, all its modules, and its rounding."""
    by_weight: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        is_known = type(module) is nn.Linear or is_transposed(module) or isinstance(module, nn.Embedding)
        weight = module._parameters.get("weight") if is_known else None
        if type(weight) is nn.Parameter:
            by_weight.setdefault(weight, []).append((name, module))
    ends = {id(end) for end in (model.get_output_embeddings(), model.get_input_embeddings())}
    linears = [holders[0][0] for holders in by_weight.values() if id(holders[0][1]) not in ends]
    experts = _experts(model)
    for pattern, _ in formats.by_pattern:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in (*linears, *experts)):
            examples = ", ".join([*linears[:3], *experts[:2]]) or "none"
            raise ArgumentError(
                f"expected a pattern of linear layers' names ({examples} ...), got {pattern!r} - in `weights`"
            )
    to_round: list[tuple[str, nn.Parameter, list[nn.Module], Rounding]] = []
    for weight, holders in by_weight.items():
        modules = [module for _, module in holders]
        is_end = any(id(module) in ends for module in modules)
        if not is_end and any(isinstance(module, nn.Embedding) for module in modules):
            continue  # positions, token types: small, and never requested
        rounding = formats.head if is_end else formats.rounding_of(holders[0][0])
        if rounding is not None:
            to_round.append((holders[0][0], weight, modules, rounding))
    return to_round
