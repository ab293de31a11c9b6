"""Experts of a mixture, given as 3-D parameters, that compute from codes: one coded weight for each expert.

`install_quantized_experts` is to a projection of an experts module what `quantized.hold_quantized` is to a linear
layer: same
parameter name, which reads as the dequantized weights rounded once to the model's dtype; who writes to it makes it
dense. `give_back_unproved` asks one module of all that are alike whether it computes what its own forward does with the
dequantized weights (`experts.is_proved`); where it does not, the weights of those modules become dense ones.

Not here: products (`quire.quantized`), the routed forward and its proof (`experts`), files.

Invariants
    X1  an expert is one coded weight of all outputs of its projection, in the order of the parameter's.
    X2  nothing is changed before the codes of all experts are packed.

Cost: the codes of the experts packed so far, and what the caller makes for one expert.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial

import torch
from torch import nn

from quire.errors import ArgumentError
from quire.memory.heap import give_back_freed
from quire.model.experts import coded_form, compute_from, is_proved, projections_of, unpacked
from quire.model.module_patch import let_go
from quire.model.packed_parameter import LazyDenseWeight, PackedParameter
from quire.model.prove.equal_modules import kind_of
from quire.quantized import CodeForm, QuantizedPanels, QuantizedWeight

__all__ = ["ExpertForms", "QuantizedExperts", "give_back_unproved", "install_quantized_experts"]


class QuantizedExperts(list[QuantizedPanels]):
    """The coded weight of each expert."""

    @property
    def label(self) -> str:
        """The format's name, or those of all formats."""
        return ", ".join(dict.fromkeys(weight.label for weight in self))

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self)

    @property
    def is_saved(self) -> bool:
        """As of `QuantizedPanels`, of all."""
        return all(weight.is_saved for weight in self)


class ExpertForms(tuple[CodeForm, ...]):
    """The form of each expert's codes, for a plan."""

    @property
    def label(self) -> str:
        """As of `QuantizedExperts`."""
        return ", ".join(dict.fromkeys(form.label for form in self))

    def num_bytes(self, num_outputs: int, num_inputs: int, backend: str | None = None) -> int:
        """What `QuantizedExperts.num_bytes` is of experts of that shape."""
        return sum(form.num_bytes(num_outputs, num_inputs, backend) for form in self)


def install_quantized_experts(
    module: nn.Module, name: str, weights: Iterable[QuantizedWeight | QuantizedPanels], dtype: torch.dtype
) -> None:
    """Have an experts module compute its projection `name` from `weights`, one for each expert, in place.

    Its dense parameter, which may be on "meta", is let go of. dtype: what the module takes and gives, and a weight that
    is packed already is packed for.

    *raises:* ArgumentError: it is no such module or projection, the weights have other shapes, or there is no product
    of their format. Nothing is changed then.
    """
    names = projections_of(module)
    if names is None or name not in names:
        raise ArgumentError(
            f"expected a projection of experts that are one 3-D parameter, got {name} of {type(module).__name__}"
        )
    shape, transposed = module._parameters[name].shape, bool(module.is_transposed)  # pyright: ignore
    num_outputs, num_inputs = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    packed = QuantizedExperts()
    for weight in weights:
        if (weight.num_outputs, weight.num_inputs) != (num_outputs, num_inputs):
            raise ArgumentError(
                f"{weight.label}: expected experts of {num_outputs} outputs and {num_inputs} inputs, got "
                f"{weight.num_outputs} and {weight.num_inputs} - in {name}"
            )
        packed.append(weight if isinstance(weight, QuantizedPanels) else QuantizedPanels(weight, dtype))
    if len(packed) != shape[0]:
        raise ArgumentError(f"expected {shape[0]} experts, got {len(packed)} - in {name}")
    held = LazyDenseWeight(packed=packed, unpack=partial(unpacked, packed, transposed))
    module._parameters[name] = packed_parameter(held, shape, dtype)
    compute_from(module, names)
    give_back_freed()  # what they were packed from lay between what stays


def packed_parameter(held: LazyDenseWeight, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """A Parameter without memory that stands for `held`, and asks for no gradient."""
    like = torch.empty((), dtype=dtype).expand(shape)  # no memory
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    if not PackedParameter.take_place(parameter, held, like):
        raise AssertionError("a parameter that nobody else has can be taken the place of")
    return parameter


def give_back_unproved(model: nn.Module) -> list[str]:
    """Names of the projections that were made dense again, as their module computes something else with them."""
    proved: dict[Hashable, bool] = {}
    given_back: list[str] = []
    for module_name, module in model.named_modules():
        names = projections_of(module)
        coded = (
            [] if names is None else [one for one in names if coded_form(module._parameters[one]) is not None]
        )
        if names is None or not coded:
            continue
        kind = kind_of(module, *(_label(module, name) for name in names))
        if kind not in proved:
            proved[kind] = is_proved(module, names)
        if proved[kind]:
            continue
        let_go(module)
        for name in coded:
            parameter = module._parameters[name]
            assert isinstance(parameter, PackedParameter)
            parameter.give_back()
            given_back.append(f"{module_name}.{name}")
    return given_back


def _label(module: nn.Module, name: str) -> str | None:
    codes = coded_form(module._parameters[name])
    return codes.label if isinstance(codes, QuantizedExperts) else None
