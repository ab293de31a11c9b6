"""Modules of a model that compute from a weight held as codes (`quire.quantized`), and the rounding of a whole model.

`hold_quantized` is for whoever has the codes, a reader of a checkpoint; `quantize_model` makes them of dense weights,
one at a time. Either is done to a model before it is prepared, and stays: preparation leaves such modules as they are,
and so does its undoing. A module so held is a packed one (`linear`): same object and name, its `.weight` reads as the
dequantized weight rounded once to the model's dtype, and whoever writes to that makes the module dense.

Not here: products (`quire.quantized`), files, how experts given as 3-D parameters are held (`quantized_experts`). Fused
layers take codes where one kernel takes all that they multiply together, such as q, k and v; else, and where a weight
has an order of inputs of its own, the module runs unfused.

Invariants
    Q3  a weight that several modules share is held once.
    Q4  a held weight asks for no gradient.

Cost: `quantize_model` holds the codes made so far and the float32 form of one weight, or of one expert.
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
from quire.model.experts import coded_form, projections_of
from quire.model.linear import PackedModule, is_transposed, packed_class
from quire.model.packed_parameter import LazyDenseWeight, PackedParameter
from quire.model.quantized_experts import (
    QuantizedExperts,
    give_back_unproved,
    install_quantized_experts,
    packed_parameter,
)
from quire.quantized import QuantizedPanels, QuantizedWeight, round_to_codes
from quire.spec.weight_formats import Rounding, WeightFormats

__all__ = [
    "WeightToRound",
    "coded_weights",
    "expert_forms",
    "hold_coded",
    "hold_quantized",
    "planned_forms",
    "quantize_model",
    "require_plain",
    "round_and_pack",
    "tell_weights",
    "weights_to_round",
]

_log = logging.getLogger("quire")
_MOST_OF_A_CONVOLUTION = 16  # elements along an axis of a weight that is one


def hold_quantized(
    modules: nn.Module | Sequence[nn.Module], weight: QuantizedWeight, dtype: torch.dtype
) -> None:
    """Have `modules` compute from `weight`, in place. Their dense weight is let go of.

    modules: an `nn.Linear`, an `nn.Embedding` or a subclass, or transformers' `Conv1D`; several that are to share the
    weight. Their `.weight` may be on "meta": it is never made. dtype: what they take and give.

    *raises:* ArgumentError: one of them is something else, has another shape, or there is no product of this format.
    """
    together = [modules] if isinstance(modules, nn.Module) else list(modules)
    for module in together:
        _checked(module, weight)
    hold_coded(together, QuantizedPanels(weight, dtype))


def hold_coded(together: Sequence[nn.Module], packed: QuantizedPanels) -> None:
    """As `hold_quantized`, of a weight that is packed, in its dtype."""
    transposed, dtype = [_checked(module, packed) for module in together], packed.dtype

    def unpack() -> torch.Tensor:
        dense = packed.unpack()
        return dense.t().contiguous() if transposed[0] else dense

    held = LazyDenseWeight(packed=packed, unpack=unpack)
    parameter = packed_parameter(held, _weight(together[0]).shape, dtype)
    for module, lies_transposed in zip(together, transposed, strict=True):
        module._parameters["weight"] = parameter
        module.__class__ = packed_class(type(module))
        cast(PackedModule, module).hold(held, lies_transposed)
    give_back_freed()  # what it was packed from lay between what stays


def require_plain(module: nn.Module, label: str) -> None:
    """*raises:* ArgumentError: the module is none that computes from a weight held as codes (`label`: whose)."""
    plain = type(module) is nn.Linear or is_transposed(module) or isinstance(module, nn.Embedding)
    if not plain or (isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse)):
        raise ArgumentError(
            f"{label}: expected an nn.Linear, a plain nn.Embedding or a Conv1D, got {type(module).__name__}"
        )


def _checked(module: nn.Module, weight: QuantizedWeight | QuantizedPanels) -> bool:
    """Whether the module's weight is [num_inputs, num_outputs]; an error where it is none that can be held."""
    require_plain(module, weight.label)
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


def coded_weights(model: nn.Module) -> dict[str, QuantizedPanels | QuantizedExperts]:
    """Each weight held as codes, once, by the name of the first module that has it; of experts by their parameter's."""
    found: dict[int, tuple[str, QuantizedPanels | QuantizedExperts]] = {}
    for name, module in model.named_modules():
        packed = module.__dict__.get("_packed")
        if isinstance(packed, QuantizedPanels):
            found.setdefault(id(packed), (name, packed))
        for own, parameter in module._parameters.items():
            if isinstance(experts := coded_form(parameter), QuantizedExperts):
                found.setdefault(id(experts), (f"{name}.{own}", experts))
    return dict(found.values())


def tell_weights(model: nn.Module) -> dict[str, int]:
    """Bytes of the weights by format: those held as codes by their labels, the others by their dtypes."""
    found: dict[str, int] = {}
    for packed in coded_weights(model).values():
        found[packed.label] = found.get(packed.label, 0) + packed.num_bytes
    for parameter in model.parameters():
        packed = parameter.held.packed if isinstance(parameter, PackedParameter) else None
        if not isinstance(packed, QuantizedPanels | QuantizedExperts):
            name = str(parameter.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + parameter.numel() * parameter.element_size()
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


# -- rounding a model ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeightToRound:
    """A weight [num_outputs, num_inputs], on the model's own memory; name: of its module, or of all experts."""

    name: str
    weight: torch.Tensor
    rounding: Rounding


def weights_to_round(model: PreTrainedModel, formats: WeightFormats) -> list[WeightToRound]:
    """What `quantize_model(model, formats, pack=...)` would call `pack` with.

    *raises:* as `quantize_model`, of patterns.
    """
    found = [
        WeightToRound(name, _oriented(weight.detach(), is_transposed(modules[0])), rounding)
        for name, weight, modules, rounding in _chosen(model, formats)
    ]
    for name, rounding in _experts_to_round(model, formats).items():
        module, own = _place(model, name)
        experts = cast(torch.Tensor, module._parameters[own]).detach()
        found += [
            WeightToRound(name, _oriented(one, bool(module.is_transposed)), rounding) for one in experts
        ]
    return found


def round_and_pack(
    weight: torch.Tensor, rounding: Rounding, dtype: torch.dtype, backend: str | None = None
) -> QuantizedPanels:
    """`weight` [num_outputs, num_inputs] as codes, for activations of `dtype`."""
    return QuantizedPanels(round_to_codes(weight, rounding), dtype, backend=backend)


def quantize_model(
    model: PreTrainedModel,
    formats: WeightFormats,
    release: Callable[[torch.Tensor], None] | None = None,
    pack: Callable[[torch.Tensor, Rounding], QuantizedPanels] | None = None,
) -> None:
    """Round the weights of the model's linear layers, experts, head and embeddings to codes, in place, one at a time.

    What a loader has rounded before stays. Weights of experts in a form that is not known stay too, and a line says so.
    release: called with each dense weight before it is let go of. pack: gives the codes of each weight [num_outputs,
    num_inputs], for activations of the model's dtype; None rounds it.

    *raises:* ArgumentError: a pattern fits no layer's name, with the pattern and some names; a weight is not finite.
    """
    chosen, pack = _chosen(model, formats), pack or partial(round_and_pack, dtype=model.dtype)
    while chosen:
        _, weight, modules, rounding = chosen.pop()
        dense = weight.detach()
        packed = pack(_oriented(dense, is_transposed(modules[0])), rounding)
        if release is not None:
            release(dense)
        del weight, dense
        hold_coded(modules, packed)
    to_round = _experts_to_round(model, formats)
    for name, rounding in to_round.items():
        module, own = _place(model, name)
        dense = cast(torch.Tensor, module._parameters[own]).detach()
        oriented = [_oriented(one, bool(module.is_transposed)) for one in dense]
        install_quantized_experts(module, own, (pack(one, rounding) for one in oriented), model.dtype)
        if release is not None:
            release(dense)
        del dense, oriented
    computes_otherwise = give_back_unproved(model) if to_round else []
    if left := [*computes_otherwise, *_of_unknown_form(model, formats)]:
        _log.warning(
            "%d weights of experts stay in %s, the first %s: their module computes with them in a way of its own",
            len(left),
            str(model.dtype).removeprefix("torch."),
            left[0],
        )


def _oriented(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.t() if transposed else weight


def _experts_to_round(model: nn.Module, formats: WeightFormats) -> dict[str, Rounding]:
    """Those of `expert_forms` that are no codes yet."""
    forms = expert_forms(model, formats)
    return {name: forms[name] for name in forms if coded_form(model.get_parameter(name)) is None}


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter `name`, and what it calls it."""
    module_name, _, own = name.rpartition(".")
    return model.get_submodule(module_name), own


def expert_forms(model: nn.Module, formats: WeightFormats) -> dict[str, Rounding]:
    """How the projections of experts are rounded, by their parameters' names; those that are coded too."""
    return {name: rounding for name in _experts(model) if (rounding := formats.rounding_of(name)) is not None}


def _experts(model: nn.Module) -> list[str]:
    found = ((name, projections_of(module)) for name, module in model.named_modules())
    return [f"{name}.{own}" for name, names in found for own in names or ()]


def _of_unknown_form(model: nn.Module, formats: WeightFormats) -> list[str]:
    """Parameters that look like weights of all experts, in modules that are not known as experts."""
    known = set(_experts(model))
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3
        and min(parameter.shape[1:]) > _MOST_OF_A_CONVOLUTION
        and name not in known
        and formats.rounding_of(name) is not None
    ]


def planned_forms(model: PreTrainedModel, formats: WeightFormats) -> dict[str, str]:
    """Which of the model's parameters `quantize_model` would round, by name, and to what ("int4:64").

    The model may lie on "meta".

    *raises:* as `quantize_model`.
    """
    linears = {f"{name}.weight": rounding for name, _, _, rounding in _chosen(model, formats)}
    return {name: str(rounding) for name, rounding in (linears | expert_forms(model, formats)).items()}


def _chosen(
    model: PreTrainedModel, formats: WeightFormats
) -> list[tuple[str, nn.Parameter, list[nn.Module], Rounding]]:
    """Each weight to round, the name of the first module that holds it, all of those, and how."""
    by_weight: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        plain = type(module) is nn.Linear or is_transposed(module) or isinstance(module, nn.Embedding)
        weight = module._parameters.get("weight") if plain else None
        if type(weight) is nn.Parameter:
            by_weight.setdefault(weight, []).append((name, module))
    ends = {id(end) for end in (model.get_output_embeddings(), model.get_input_embeddings())}
    linears = [holders[0][0] for holders in by_weight.values() if id(holders[0][1]) not in ends]
    experts = _experts(model)
    for pattern, _ in formats.by_pattern:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in (*linears, *experts)):
            shown = ", ".join([*linears[:3], *experts[:2]]) or "none"
            raise ArgumentError(
                f"expected a pattern of linear layers' names ({shown} ...), got {pattern!r} - in `weights`"
            )
    found: list[tuple[str, nn.Parameter, list[nn.Module], Rounding]] = []
    for weight, holders in by_weight.items():
        modules = [module for _, module in holders]
        is_end = any(id(module) in ends for module in modules)
        if not is_end and any(isinstance(module, nn.Embedding) for module in modules):
            continue  # positions, kinds of tokens: small, and not asked for
        rounding = formats.head if is_end else formats.rounding_of(holders[0][0])
        if rounding is not None:
            found.append((holders[0][0], weight, modules, rounding))
    return found
