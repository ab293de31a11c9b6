"""Weights that a model is made without: stand-ins without memory, whose modules then get the codes of a file.

A loader gives transformers a stand-in for each quantized weight that a module can compute from (`quantized`), and for
each projection of experts (`quantized_experts`); the model once made, `read_into` reads one weight, or one expert,
after
the other. So nothing of it is ever widened whole. `quantized_forms` says the same of a model without memory, for a
plan.

Not here: files and formats. Weights that transformers merges or splits as it loads, other than experts by rows
(`expert_layout`), get no stand-in: whoever loads widens them, and has `widen` told.

Invariants
    U1  after `read_into` no stand-in is left in the model.
    U2  what is widened for want of a product or a module is named in one line of the log.

Where codes are kept (`SaveTarget`), those that a file of packed weights has are read from it instead (`saved_codes`).

Cost: one part of a weight unpacked at a time, or one expert, a byte for each value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quire.backends import extension
from quire.errors import ArgumentError, LoadError
from quire.model.expert_layout import CheckpointExpert, projection_shape
from quire.model.file_ranges import FileRange
from quire.model.linear import is_transposed
from quire.model.quantized import hold_coded, require_plain
from quire.model.quantized_experts import ExpertForms, give_back_unproved, install_quantized_experts
from quire.model.saved_codes import CodesToSave, SavedCodes, digest_of_order, rounded_by
from quire.model.saved_weights import SavedWeights
from quire.quantized import CodeForm, QuantizedPanels, QuantizedWeight, require_product, rounded_form
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding

__all__ = ["CheckpointLinear", "MetaWeights", "SaveTarget", "may_hold", "quantized_forms"]

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


@dataclass(frozen=True)
class SaveTarget:
    """Where codes are kept. by: what decides them beside the bytes that they follow from: versions, settings."""

    folder: SavedFolder
    by: str


@dataclass(frozen=True)
class CheckpointLinear:
    """The weight of a linear layer, a head or an embedding as a checkpoint stores it.

    read: gives it in parts as `QuantizedPanels.from_parts` takes them, each time it is called. form: tells what it
    will be,
    by headers. origins: as of `ExpertPart`. order: of its outputs, as its place in the file has them; None: as they
    come.
    """

    read: Callable[[], Iterable[QuantizedWeight]]
    form: Callable[[], CodeForm]
    origins: Callable[[], tuple[FileRange, ...]] = tuple
    order: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Linear:
    name: str
    stored: CheckpointLinear
    modules: list[nn.Module]
    parameter: nn.Parameter

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        first, second = self.parameter.shape
        return (second, first) if is_transposed(self.modules[0]) else (first, second)


@dataclass(frozen=True, eq=False)
class _Experts:
    name: str
    stored: Sequence[CheckpointExpert]
    rounding: Rounding | None
    module: nn.Module
    own: str
    shape: tuple[int, int]  # outputs, inputs
    dtype: torch.dtype


class MetaWeights:
    """See the module's text. backend: whose code computes from codes."""

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._unread: dict[str, tuple[int, CheckpointLinear]] = {}
        self._experts: dict[str, tuple[Sequence[CheckpointExpert], Rounding | None]] = {}
        self._widened: dict[str, str] = {}

    @property
    def takes_parts(self) -> bool:
        """Whether the weight of a linear layer may come in several parts: torch's twin takes one."""
        return extension(self._backend) is not None

    def stand_in(
        self, name: str, shape: torch.Size, dtype: torch.dtype, stored: CheckpointLinear
    ) -> torch.Tensor:
        """For the parameter `name` of the model that is about to be made."""
        self._unread[name] = shape.numel(), stored
        return _stand_in(shape, dtype)

    def experts_stand_in(
        self,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        experts: Sequence[CheckpointExpert],
        rounding: Rounding | None = None,
    ) -> torch.Tensor:
        """The same for a projection of experts. rounding: to what their values are rounded; None: they are codes."""
        self._experts[name] = experts, rounding
        return _stand_in(shape, dtype)

    def widen(self, name: str, reason: str) -> None:
        """Have it told that the weight `name` is widened by whoever loads."""
        self._widened[name] = reason

    def read_into(self, model: nn.Module, keep: SaveTarget | None = None) -> tuple[SavedWeights, ...]:
        """Have the modules of `model` compute from the weights; those that cannot get them dense.

        Returns what codes are read from; nothing where none are kept.

        *raises:* LoadError: a stand-in is not where it should be, or its weight cannot be read.
        """
        experts, linears = self._experts_of(model), self._linears_of(model)
        kept = None
        if keep is not None and (experts or linears):
            kept = _kept(keep, experts, linears)
        with kept or nullcontext():
            for one in experts:
                self._read_experts(one, kept)
            for name in give_back_unproved(model) if experts else ():
                self._widened[name] = "its module computes with them in a way of its own"
            for one in linears:
                self._read_linear(one, kept)
        self._unread.clear()
        self._experts.clear()
        self._tell(model)
        return () if kept is None else (kept,)

    def _experts_of(self, model: nn.Module) -> list[_Experts]:
        """Those that the model has a use for."""
        found = []
        for name, (stored, rounding) in self._experts.items():
            module_name, _, own = name.rpartition(".")
            try:
                module = model.get_submodule(module_name)
            except AttributeError:
                continue  # the model has no use for it
            parameter = module.get_parameter(own)
            _require_stand_in(name, parameter)
            if (shape := projection_shape(model, name)) is None:
                raise LoadError(f"expected {name} to be a projection of experts, as its module was made")
            found.append(_Experts(name, stored, rounding, module, own, shape[1:3], parameter.dtype))
        return found

    def _linears_of(self, model: nn.Module) -> list[_Linear]:
        """Those that the model has a use for, each once, the largest first: while its codes are unpacked there is the
        least beside them."""
        holders, found = _holders(model), []
        for name, (_, stored) in sorted(self._unread.items(), key=lambda entry: -entry[1][0]):
            try:
                parameter = model.get_parameter(name)
            except AttributeError:
                continue  # the model has no use for it
            modules = holders.pop(id(parameter), None)
            if modules is None:
                continue  # tied to one that is read
            _require_stand_in(name, parameter)
            found.append(_Linear(name, stored, modules, parameter))
        return found

    def _read_linear(self, linear: _Linear, kept: SavedCodes | None) -> None:
        parameter, read, dtype = linear.parameter, linear.stored.read, linear.parameter.dtype

        def make() -> QuantizedPanels:
            return QuantizedPanels.from_parts(read(), linear.shape[0], dtype, self._backend)

        try:
            packed = make() if kept is None else kept.pack(linear.name, linear.shape, dtype, make)
            hold_coded(linear.modules, packed)
        except ArgumentError as error:  # no product of this format, or a module that is no plain one
            self._widened[linear.name] = str(error)
            dense = torch.cat([part.dequantize().to(dtype) for part in read()])
            parameter.data = (dense.t() if is_transposed(linear.modules[0]) else dense).contiguous()

    def _read_experts(self, experts: _Experts, kept: SavedCodes | None) -> None:
        rounding, dtype = experts.rounding, experts.dtype

        def weights() -> Iterator[QuantizedPanels]:
            for index, expert in enumerate(experts.stored):
                read = expert.read if rounding is None else partial(expert.rounded, rounding)
                make = partial(_packed, read, dtype, self._backend)
                yield (
                    make() if kept is None else kept.pack((experts.name, index), experts.shape, dtype, make)
                )

        try:
            install_quantized_experts(experts.module, experts.own, weights(), dtype)
        except ArgumentError as error:  # no product, or gate and up that are coded in different ways
            if rounding is not None:
                raise
            self._widened[experts.name] = str(error)
            parameter = experts.module.get_parameter(experts.own)
            dense = torch.empty(parameter.shape, dtype=dtype)
            for into, expert in zip(dense, experts.stored, strict=True):
                values = expert.dense()
                into.copy_(values.t() if experts.module.is_transposed else values)
            parameter.data = dense

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


def _packed(read: Callable[[], QuantizedWeight], dtype: torch.dtype, backend: str | None) -> QuantizedPanels:
    return QuantizedPanels(read(), dtype, backend=backend)


def _kept(keep: SaveTarget, experts: Sequence[_Experts], linears: Sequence[_Linear]) -> SavedCodes:
    """Of those that will be held as codes."""
    found: list[CodesToSave] = []

    def add(
        key: object,
        name: str,
        stored: CheckpointLinear | CheckpointExpert,
        shape: tuple[int, int],
        dtype: torch.dtype,
        rounding: Rounding | None = None,
    ) -> None:
        how = (digest_of_order(stored.order), str(rounding or ""))
        try:
            if rounding is None:
                form = stored.form()
                require_product(form.label, form.group, shape[1], dtype)
                num_bytes = form.panel_bytes(*shape)
            else:
                num_bytes = rounded_form(shape[1], rounding).panel_bytes(*shape)
        except ArgumentError:
            return  # it will be widened
        found.append(CodesToSave(key, name, stored.origins(), *shape, num_bytes, how))

    for one in experts:
        for index, expert in enumerate(one.stored):
            add((one.name, index), one.name, expert, one.shape, one.dtype, one.rounding)
    for linear in linears:
        add(linear.name, linear.name, linear.stored, linear.shape, linear.parameter.dtype)
    rounds = any(one.rounding is not None for one in experts)
    return SavedCodes(keep.folder, found, f"{keep.by}, {rounded_by()}" if rounds else keep.by)


def quantized_forms(
    model: nn.Module, forms: Mapping[str, CodeForm], experts: Mapping[str, Sequence[CheckpointExpert]]
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
