"""Weights that a model is made without: stand-ins without memory, whose modules then get the codes of a file.

A loader gives transformers a stand-in for each quantized weight that a module can compute from (`quantized`), and for
each projection of experts (`coded_experts`); the model once made, `read_into` reads one weight, or one expert, after
the other. So nothing of it is ever widened whole. `held_forms` says the same of a model without memory, for a plan.

Not here: files and formats. Weights that transformers merges or splits as it loads, other than experts by rows
(`stored_experts`), get no stand-in: whoever loads widens them, and has `widen` told.

Invariants
    U1  after `read_into` no stand-in is left in the model.
    U2  what is widened for want of a product or a module is named in one line of the log.

Cost: one part of a weight unpacked at a time, or one expert, a byte for each value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from quire.errors import ArgumentError, LoadError
from quire.model.coded_experts import ExpertForms, give_back_unproved, hold_experts
from quire.model.linear import is_transposed
from quire.model.quantized import hold_coded, require_plain
from quire.model.stored_experts import StoredExpert, projection_shape
from quire.quantized import CodedWeight, CodeForm, QuantizedWeight, require_product
from quire.spec.weight_formats import Rounding

__all__ = ["UnreadWeights", "held_forms", "may_hold"]

_log = logging.getLogger("quire")


def may_hold(model: nn.Module, name: str, num_outputs: int, num_inputs: int) -> bool:
    """Whether the parameter `name` of `model` is one that its module can have as codes, of this shape."""
    module_name, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        return False
    if last != "weight" or not (type(module) in (nn.Linear, nn.Embedding) or is_transposed(module)):
        return isinstance(module, nn.Embedding) and module.weight.shape == (num_outputs, num_inputs)
    shape = (num_inputs, num_outputs) if is_transposed(module) else (num_outputs, num_inputs)
    return module.weight.shape == shape


class UnreadWeights:
    """See the module's text."""

    def __init__(self) -> None:
        self._unread: dict[str, tuple[int, Callable[[], Iterable[QuantizedWeight]]]] = {}
        self._experts: dict[str, tuple[Sequence[StoredExpert], Rounding | None]] = {}
        self._widened: dict[str, str] = {}

    def stand_in(
        self, name: str, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Iterable[QuantizedWeight]]
    ) -> torch.Tensor:
        """For the parameter `name` of the model that is about to be made. read: gives its weight, later, in parts as
        `CodedWeight.of_parts` takes them, each time it is called."""
        self._unread[name] = shape.numel(), read
        return _stand_in(shape, dtype)

    def experts_stand_in(
        self,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        experts: Sequence[StoredExpert],
        rounding: Rounding | None = None,
    ) -> torch.Tensor:
        """The same for a projection of experts. rounding: to what their values are rounded; None: they are codes."""
        self._experts[name] = experts, rounding
        return _stand_in(shape, dtype)

    def widen(self, name: str, reason: str) -> None:
        """Have it told that the weight `name` is widened by whoever loads."""
        self._widened[name] = reason

    def read_into(self, model: nn.Module) -> None:
        """Have the modules of `model` compute from the weights; those that cannot get them dense.

        *raises:* LoadError: a stand-in is not where it should be, or its weight cannot be read.
        """
        self._read_experts(model)
        holders = _holders(model)
        # The largest first: while its codes are unpacked there is the least beside them.
        for name, (_, read) in sorted(self._unread.items(), key=lambda entry: -entry[1][0]):
            try:
                parameter = model.get_parameter(name)
            except AttributeError:
                continue  # the model has no use for it
            modules = holders.pop(id(parameter), None)
            if modules is None:
                continue  # tied to one that has been read
            _require_stand_in(name, parameter)
            dtype = parameter.dtype
            num_outputs = parameter.shape[1 if is_transposed(modules[0]) else 0]
            try:
                hold_coded(modules, CodedWeight.of_parts(read(), num_outputs, dtype))
            except ArgumentError as error:  # no product of this format, or a module that is no plain one
                self._widened[name] = str(error)
                dense = torch.cat([part.dequantize().to(dtype) for part in read()])
                parameter.data = (dense.t() if is_transposed(modules[0]) else dense).contiguous()
        self._unread.clear()
        self._tell(model)

    def _read_experts(self, model: nn.Module) -> None:
        for name, (experts, rounding) in self._experts.items():
            module_name, _, own = name.rpartition(".")
            try:
                module = model.get_submodule(module_name)
            except AttributeError:
                continue  # the model has no use for it
            parameter = module.get_parameter(own)
            _require_stand_in(name, parameter)
            dtype = parameter.dtype
            weights = (expert.read() if rounding is None else expert.rounded(rounding) for expert in experts)
            try:
                hold_experts(module, own, weights, dtype)
            except ArgumentError as error:  # no product, or gate and up that are coded in different ways
                if rounding is not None:
                    raise
                self._widened[name] = str(error)
                dense = torch.empty(parameter.shape, dtype=dtype)
                for into, expert in zip(dense, experts, strict=True):
                    values = expert.dense()
                    into.copy_(values.t() if module.is_transposed else values)
                parameter.data = dense
        self._experts.clear()
        for name in give_back_unproved(model):
            self._widened[name] = "its module computes with them in a way of its own"

    def _tell(self, model: nn.Module) -> None:
        if self._widened:
            name, reason = next(iter(self._widened.items()))
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            _log.warning(
                "%d quantized weights are widened to %s, the first %s: %s",
                len(self._widened),
                dtype,
                name,
                reason,
            )
            self._widened.clear()


def held_forms(
    model: nn.Module, forms: Mapping[str, CodeForm], experts: Mapping[str, Sequence[StoredExpert]]
) -> dict[str, CodeForm | ExpertForms]:
    """Of the weights of those forms, and of those experts, by the names of parameters of `model`, which `read_into`
    would leave as codes.

    Each once. The model may lie on "meta", so modules of experts are not asked whether they compute with them in a way
    of their own.
    """
    holders = _holders(model)
    found: dict[str, CodeForm | ExpertForms] = {}
    for name, form in forms.items():
        try:
            parameter = model.get_parameter(name)
        except AttributeError:
            continue
        modules = holders.pop(id(parameter), [])
        try:
            for module in modules:
                require_plain(module, form.label)
                num_inputs = parameter.shape[0 if is_transposed(module) else 1]
                require_product(form.label, form.group, num_inputs, parameter.dtype)
        except ArgumentError:
            continue  # it will be widened
        if modules:
            found[name] = form
    for name, of_name in experts.items():
        if (shape := projection_shape(model, name)) is None:
            continue
        try:
            told = ExpertForms(expert.form() for expert in of_name)
            for form in set(told):
                require_product(form.label, form.group, shape[2], model.get_parameter(name).dtype)
        except ArgumentError:
            continue
        found[name] = told
    return found


def _holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that have each parameter as their weight, by its id."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None:
            found.setdefault(id(weight), []).append(module)
    return found


def _stand_in(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype).expand(shape)


def _require_stand_in(name: str, parameter: nn.Parameter) -> None:
    """*raises:* LoadError: it is something else by now."""
    if not bool(parameter.detach().flatten()[0].isnan()):
        raise LoadError(f"expected to read {name} from its codes, transformers has made another weight of it")
