"""Stand-ins without memory for quantized weights while a model is made; its modules then get the codes of a file.

A loader gives transformers a stand-in for each quantized weight that a module can compute from (`quantized`), and for
each projection of experts (`quantized_experts`); once the model is made, `read_into` reads one weight, or one expert,
after the other. So no whole model is ever dequantized. `quantized_forms` predicts the same for a model without memory,
for a plan.

Not here: files and formats. Weights that transformers merges or splits as it loads, other than experts by rows
(`expert_layout`), get no stand-in: the loader dequantizes them, and records that by `note_dense`.

Invariants
    U1  after `read_into` the model has no stand-in.
    U2  weights that are dequantized because a product or a module is missing are named in one line of the log.

With a `SaveTarget`, codes that a file of packed weights has are read from it instead (`saved_codes`).

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

from quire.errors import ArgumentError, LoadError
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding
from quire.weights.codes import (
    CodeForm,
    QuantizedPanels,
    QuantizedWeight,
    code_extension,
    require_product,
    rounded_form,
)
from quire.weights.expert_layout import CheckpointExpert, projection_shape
from quire.weights.file_ranges import FileRange
from quire.weights.linear import is_transposed
from quire.weights.quantized_experts import ExpertForms, install_quantized_experts, restore_unproved
from quire.weights.quantized_modules import install_panels, require_quantizable
from quire.weights.saved_codes import CodesToSave, SavedCodes, can_save, digest_of_order, rounded_by
from quire.weights.saved_weights import SavedWeights

__all__ = ["CheckpointLinear", "MetaWeights", "SaveTarget", "can_be_quantized", "quantized_forms"]

_log = logging.getLogger("quire")


def can_be_quantized(model: nn.Module, name: str, num_outputs: int, num_inputs: int) -> bool:
    """Whether the parameter `name` of `model` can be quantized in its module, with this shape."""
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
    """Where codes are saved. by: the versions and settings that decide the codes, in addition to the bytes of their
    file ranges."""

    folder: SavedFolder
    by: str

    @classmethod
    def if_possible(cls, folder: SavedFolder | None, by: str, backend: str | None) -> SaveTarget | None:
        """A target in `folder`; None without one, and if this machine cannot save codes, which is logged."""
        return cls(folder, by) if folder is not None and can_save(folder, backend) else None


@dataclass(frozen=True)
class CheckpointLinear:
    """The weight of a linear layer, a head or an embedding in a checkpoint.

    read: reads it in parts as `QuantizedPanels.from_parts` takes them, at each call. form: its form, from headers.
    origins: as of `ExpertPart`. order: of its outputs, relative to the file; None: as in the file.
    """

    read: Callable[[], Iterable[QuantizedWeight]]
    form: Callable[[], CodeForm]
    origins: Callable[[], tuple[FileRange, ...]] = tuple
    order: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Linear:
    name: str
    weight: CheckpointLinear
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
    weights: Sequence[CheckpointExpert]
    rounding: Rounding | None
    module: nn.Module
    parameter_name: str
    shape: tuple[int, int]  # outputs, inputs
    dtype: torch.dtype


class MetaWeights:
    """See the module's text. backend: the back end that computes from codes."""

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._linears: dict[str, tuple[int, CheckpointLinear]] = {}
        self._experts: dict[str, tuple[Sequence[CheckpointExpert], Rounding | None]] = {}
        self._dense_reasons: dict[str, str] = {}

    @property
    def takes_parts(self) -> bool:
        """Whether the weight of a linear layer may come in several parts: only the extension takes them."""
        return code_extension(self._backend) is not None

    def stand_in(
        self, name: str, shape: torch.Size, dtype: torch.dtype, linear: CheckpointLinear
    ) -> torch.Tensor:
        """A stand-in for the parameter `name` of the model that is about to be made."""
        self._linears[name] = shape.numel(), linear
        return _stand_in(shape, dtype)

    def experts_stand_in(
        self,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        experts: Sequence[CheckpointExpert],
        rounding: Rounding | None = None,
    ) -> torch.Tensor:
        """A stand-in for a projection of experts. rounding: the format to round their values to; None: they are
        quantized."""
        self._experts[name] = experts, rounding
        return _stand_in(shape, dtype)

    def note_dense(self, name: str, reason: str) -> None:
        """Records for the log that the loader dequantizes the weight `name`."""
        self._dense_reasons[name] = reason

    def read_into(self, model: nn.Module, target: SaveTarget | None = None) -> tuple[SavedWeights, ...]:
        """Have the modules of `model` compute from the quantized weights; modules that cannot get dense ones.

        Returns the files of saved codes; empty without a `target`.

        *raises:* LoadError: a stand-in is not where it should be, or its weight cannot be read.
        """
        all_experts, linears = self._experts_of(model), self._linears_of(model)
        saved = None
        if target is not None and (all_experts or linears):
            saved = _saved_codes(target, all_experts, linears)
        with saved or nullcontext():
            for experts in all_experts:
                self._read_experts(experts, saved)
            for name in restore_unproved(model) if all_experts else ():
                self._dense_reasons[name] = "its module computes with them in another way"
            for linear in linears:
                self._read_linear(linear, saved)
        self._linears.clear()
        self._experts.clear()
        self._log_dense(model)
        return () if saved is None else (saved,)

    def _experts_of(self, model: nn.Module) -> list[_Experts]:
        """The projections of experts that the model has."""
        projections = []
        for name, (experts, rounding) in self._experts.items():
            module_name, _, parameter_name = name.rpartition(".")
            try:
                module = model.get_submodule(module_name)
            except AttributeError:
                continue  # the model has no such parameter
            parameter = module.get_parameter(parameter_name)
            _require_stand_in(name, parameter)
            if (shape := projection_shape(model, name)) is None:
                raise LoadError(f"expected {name} to be a projection of experts, as its module was made")
            projections.append(
                _Experts(name, experts, rounding, module, parameter_name, shape[1:3], parameter.dtype)
            )
        return projections

    def _linears_of(self, model: nn.Module) -> list[_Linear]:
        """The linear weights that the model has, each once, the largest first: its codes are unpacked while the least
        other memory is in use."""
        holders, linears = _holders(model), []
        for name, (_, linear) in sorted(self._linears.items(), key=lambda entry: -entry[1][0]):
            try:
                parameter = model.get_parameter(name)
            except AttributeError:
                continue  # the model has no such parameter
            modules = holders.pop(id(parameter), None)
            if modules is None:
                continue  # tied to a weight that is read
            _require_stand_in(name, parameter)
            linears.append(_Linear(name, linear, modules, parameter))
        return linears

    def _read_linear(self, linear: _Linear, saved: SavedCodes | None) -> None:
        parameter, read, dtype = linear.parameter, linear.weight.read, linear.parameter.dtype

        def make() -> QuantizedPanels:
            return QuantizedPanels.from_parts(read(), linear.shape[0], dtype, self._backend)

        try:
            packed = make() if saved is None else saved.pack(linear.name, linear.shape, dtype, make)
            install_panels(linear.modules, packed)
        except ArgumentError as error:  # no product of this format, or a module that cannot be quantized
            self._dense_reasons[linear.name] = str(error)
            dense = torch.cat([part.dequantize().to(dtype) for part in read()])
            parameter.data = (dense.t() if is_transposed(linear.modules[0]) else dense).contiguous()

    def _read_experts(self, experts: _Experts, saved: SavedCodes | None) -> None:
        rounding, dtype = experts.rounding, experts.dtype

        def weights() -> Iterator[QuantizedPanels]:
            for index, expert in enumerate(experts.weights):
                read = expert.read if rounding is None else partial(expert.quantize, rounding)
                make = partial(_packed, read, dtype, self._backend)
                yield (
                    make() if saved is None else saved.pack((experts.name, index), experts.shape, dtype, make)
                )

        try:
            install_quantized_experts(experts.module, experts.parameter_name, weights(), dtype)
        except ArgumentError as error:  # no product, or gate and up that are quantized in different ways
            if rounding is not None:
                raise
            self._dense_reasons[experts.name] = str(error)
            parameter = experts.module.get_parameter(experts.parameter_name)
            dense = torch.empty(parameter.shape, dtype=dtype)
            for target, expert in zip(dense, experts.weights, strict=True):
                values = expert.dense()
                target.copy_(values.t() if experts.module.is_transposed else values)
            parameter.data = dense

    def _log_dense(self, model: nn.Module) -> None:
        if self._dense_reasons:
            name, reason = next(iter(self._dense_reasons.items()))
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            _log.warning(
                "%d quantized weights are dequantized to %s, the first %s: %s",
                len(self._dense_reasons),
                dtype,
                name,
                reason,
            )
            self._dense_reasons.clear()


def _packed(read: Callable[[], QuantizedWeight], dtype: torch.dtype, backend: str | None) -> QuantizedPanels:
    return QuantizedPanels(read(), dtype, backend=backend)


def _saved_codes(
    target: SaveTarget, all_experts: Sequence[_Experts], linears: Sequence[_Linear]
) -> SavedCodes:
    """The saved codes of the weights that will be quantized."""
    to_save: list[CodesToSave] = []

    def add(
        key: object,
        name: str,
        weight: CheckpointLinear | CheckpointExpert,
        shape: tuple[int, int],
        dtype: torch.dtype,
        rounding: Rounding | None = None,
    ) -> None:
        settings = (digest_of_order(weight.order), str(rounding or ""))
        try:
            if rounding is None:
                form = weight.form()
                require_product(form.label, form.group, shape[1], dtype)
                num_bytes = form.panel_bytes(*shape)
            else:
                num_bytes = rounded_form(shape[1], rounding).panel_bytes(*shape)
        except ArgumentError:
            return  # it will be dequantized
        to_save.append(CodesToSave(key, name, weight.origins(), *shape, num_bytes, settings))

    for experts in all_experts:
        for index, expert in enumerate(experts.weights):
            add((experts.name, index), experts.name, expert, experts.shape, experts.dtype, experts.rounding)
    for linear in linears:
        add(linear.name, linear.name, linear.weight, linear.shape, linear.parameter.dtype)
    has_rounding = any(experts.rounding is not None for experts in all_experts)
    return SavedCodes(target.folder, to_save, f"{target.by}, {rounded_by()}" if has_rounding else target.by)


def quantized_forms(
    model: nn.Module, forms: Mapping[str, CodeForm], experts: Mapping[str, Sequence[CheckpointExpert]]
) -> dict[str, CodeForm | ExpertForms]:
    """The parameters of `model` that `read_into` would leave quantized, with their forms. forms: of weights by
    parameter name; experts: of projections by parameter name.

    A shared weight appears once. The model may lie on "meta", so modules of experts are not run to prove that they
    compute as expected.
    """
    holders = _holders(model)
    planned: dict[str, CodeForm | ExpertForms] = {}
    for name, form in forms.items():
        try:
            parameter = model.get_parameter(name)
        except AttributeError:
            continue
        modules = holders.pop(id(parameter), [])
        try:
            for module in modules:
                require_quantizable(module, form.label)
                num_inputs = parameter.shape[0 if is_transposed(module) else 1]
                require_product(form.label, form.group, num_inputs, parameter.dtype)
        except ArgumentError:
            continue  # it will be dequantized
        if modules:
            planned[name] = form
    for name, projection in experts.items():
        if (shape := projection_shape(model, name)) is None:
            continue
        try:
            expert_forms = ExpertForms(expert.form() for expert in projection)
            for form in set(expert_forms):
                require_product(form.label, form.group, shape[2], model.get_parameter(name).dtype)
        except ArgumentError:
            continue
        planned[name] = expert_forms
    return planned


def _holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules of each weight, by the parameter's id."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None:
            holders.setdefault(id(weight), []).append(module)
    return holders


def _stand_in(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype).expand(shape)


def _require_stand_in(name: str, parameter: nn.Parameter) -> None:
    """*raises:* LoadError: the parameter is no longer a stand-in."""
    if not bool(parameter.detach().flatten()[0].isnan()):
        raise LoadError(f"expected a stand-in for the codes of {name}, got another weight from transformers")
