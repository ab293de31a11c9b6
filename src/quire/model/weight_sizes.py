"""Bytes of a model's weights in memory once it serves, by kind: planned, and measured on a serving model.

    codes         quantized weights, by their format
    linear        packed panels of linear layers, with their padding. A weight that is the embedding too is here, once
    experts       packed panels of experts, or their codes
    latents       kv_b_proj of latent layers once more, head by head, as it is multiplied into queries and results
    embeddings    dense embeddings that no linear layer shares
    dense         all else: norms, convolutions, routers, layers that stay dense; buffers

`planned_weights` takes a model without memory, on torch's meta device, and calls the functions that choose the packing
(`linear`, `experts`); `measured_weights` takes the packed model. `WEIGHT_FORMS` gives the size of a packed weight; a
new form of weights registers there by its name.

Not here: small copies of a model's own forward (a router packed next to its weight).

Cost: O(modules and parameters); no weight is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from quire.backends import native_module
from quire.devices import PackedWeight
from quire.devices.cpu.packed_weights import DTYPE_NAMES, NativeWeight
from quire.model.latent import LatentHeads, is_latent
from quire.registry import Registry
from quire.spec.weight_formats import Rounding
from quire.weights.codes import CodeForm, QuantizedPanels, rounded_form
from quire.weights.experts import expert_projections, projections_of
from quire.weights.linear import Packing, choose_packing, is_transposed, planned_packing
from quire.weights.packed_parameter import PackedParameter
from quire.weights.quantized_experts import ExpertForms

__all__ = [
    "WEIGHT_FORMS",
    "WeightSize",
    "measured_weights",
    "outputs_per_token",
    "planned_weights",
    "quantized_bytes",
    "register_form",
]

_LAYER = re.compile(r".*?\.\d+(?=\.)")  # "model.layers.3" of "model.layers.3.mlp.up_proj"
_KINDS = ("codes", "linear", "experts", "latents", "embeddings", "dense")

WeightForm = Callable[[int, int, torch.dtype, str], int]
"""(num_outputs, num_inputs, dtype that the model computes in, the part after the colon of its name) -> bytes."""


@dataclass(frozen=True)
class WeightSize:
    """The size of the weights of one kind. kind: see the module's text. label: for codes, their format."""

    kind: str
    num_tensors: int
    num_bytes: int
    label: str = ""


def _native_bytes(num_outputs: int, num_inputs: int, dtype: torch.dtype, _: str) -> int:
    native = cast(Any, native_module())
    return native.packed_num_bytes(num_outputs, num_inputs, DTYPE_NAMES[dtype])


def _rounded_bytes(
    bits: int, num_outputs: int, num_inputs: int, _: torch.dtype, group: str, backend: str | None = None
) -> int:
    rounding = Rounding(bits, int(group) if group else None)
    return rounded_form(num_inputs, rounding).num_bytes(num_outputs, num_inputs, backend)


def _dense_bytes(num_outputs: int, num_inputs: int, dtype: torch.dtype, _: str) -> int:
    return num_outputs * num_inputs * dtype.itemsize


_ROUNDED = {"int8": partial(_rounded_bytes, 8), "int4": partial(_rounded_bytes, 4)}

# By the name of a packing (`linear.Packing`), and of a format of quantized weights, "int4" for "int4:64" too.
WEIGHT_FORMS: Registry[WeightForm] = Registry(
    "a form of weights",
    "weights",
    {
        "native": _native_bytes,
        "onednn": _dense_bytes,
        "device": _dense_bytes,
        "watched": _dense_bytes,
        **_ROUNDED,
    },
)


def register_form(name: str, num_bytes: WeightForm) -> None:
    """Register the size of weights in the form `name`, for plans. *raises:* ArgumentError: another form has the
    name."""
    WEIGHT_FORMS.register(name, num_bytes)


def planned_weights(
    model: nn.Module,
    *,
    packing: Packing | None = None,
    form_of: Callable[[str], str | None] = lambda name: None,
    codes: Mapping[str, CodeForm | ExpertForms] | None = None,
    backend: str | None = None,
) -> tuple[WeightSize, ...]:
    """The sizes of `model`, all of it on the meta device, once it serves; kinds without weights are left out.

    packing: as of `pack_linears`. form_of: the form of a packed parameter, by its name; None: as the packing has it.
    codes: the form of quantized parameters, by their names. backend: the back end that computes from codes.
    """
    rows = _SizeTable()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    packed: set[int] = set()
    for name, form in (codes or {}).items():
        parameter = model.get_parameter(name)
        packed.add(id(parameter))
        num_bytes = form.num_bytes(*_outputs_and_inputs(model, name), backend)
        if isinstance(form, ExpertForms):
            rows.add("experts", num_bytes)
        else:
            rows.add("codes", num_bytes, form.label)

    def form_bytes(parameter: nn.Parameter, shape: tuple[int, int], kind: str) -> int:
        form, _, rest = (form_of(names[id(parameter)]) or kind).partition(":")
        if (rounded := _ROUNDED.get(form)) is not None:
            return rounded(*shape, parameter.dtype, rest, backend)
        return WEIGHT_FORMS[form](*shape, parameter.dtype, rest)

    for parameter, shape, kind, is_embedding in planned_packing(model, packing):
        if id(parameter) in packed:
            continue
        packed.add(id(parameter))
        row = "embeddings" if is_embedding else "dense" if kind == "watched" else "linear"
        rows.add(row, form_bytes(parameter, shape, kind))
    packs_experts = packing is None and native_module() is not None
    for module in model.modules():
        for name in projections_of(module) or ():
            parameter = cast(nn.Parameter, module._parameters[name])
            if id(parameter) in packed:
                continue
            is_packed = packs_experts and expert_projections(module, "meta") is not None
            if is_packed or form_of(names[id(parameter)]) is not None:
                packed.add(id(parameter))
                num_experts, *shape = parameter.shape
                shape = shape[::-1] if getattr(module, "is_transposed", False) else shape
                rows.add("experts", num_experts * form_bytes(parameter, (shape[0], shape[1]), "native"))
        if is_latent(module):
            _add_latent(rows, cast(Any, module), packing)
    dense = [parameter for parameter in model.parameters() if id(parameter) not in packed]
    for tensor in (*dense, *model.buffers()):
        rows.add("dense", tensor.numel() * tensor.itemsize)
    return rows.all()


def quantized_bytes(
    model: nn.Module,
    forms: Mapping[str, str],
    codes: Mapping[str, CodeForm | ExpertForms],
    backend: str | None = None,
) -> dict[str, int]:
    """Bytes of the parameters of `model` that will be quantized, by name. forms: of those that are rounded ("int4:64");
    codes and backend: as of `planned_weights`."""
    sizes = {name: form.num_bytes(*_outputs_and_inputs(model, name), backend) for name, form in codes.items()}
    for name, form in forms.items():
        parameter, (kind, _, group) = model.get_parameter(name), form.partition(":")
        if (num_bytes := _ROUNDED.get(kind)) is not None:
            num_experts = parameter.shape[0] if parameter.dim() == 3 else 1
            shape = _outputs_and_inputs(model, name)
            sizes[name] = num_experts * num_bytes(*shape, parameter.dtype, group, backend)
    return sizes


def measured_weights(model: nn.Module, latents: Iterable[LatentHeads] = ()) -> tuple[WeightSize, ...]:
    """The sizes of `model`, prepared to serve, at present. latents: of its latent modules, once they have attended."""
    rows = _SizeTable()
    shared = {id(weight) for module in model.modules() if (weight := _linear_weight(module)) is not None}
    for name, parameter in model.named_parameters():
        lazy_weight = parameter.lazy_weight if isinstance(parameter, PackedParameter) else None
        packed = None if lazy_weight is None else lazy_weight.packed
        if isinstance(packed, list):
            rows.add("experts", sum(map(_packed_bytes, packed)))
        elif isinstance(packed, QuantizedPanels):
            rows.add("codes", packed.num_bytes, packed.label)
        elif packed is not None:
            rows.add("linear", _packed_bytes(packed))
        if packed is None or (lazy_weight is not None and lazy_weight.dense is not None):  # lent: both
            is_embedding = isinstance(_holder(model, name), nn.Embedding) and id(parameter) not in shared
            rows.add("embeddings" if is_embedding else "dense", parameter.numel() * parameter.itemsize)
    for heads in latents:
        rows.add("latents", sum(map(_packed_bytes, (*heads.into_latent, *heads.out_of_latent))))
    for buffer in model.buffers():
        rows.add("dense", buffer.numel() * buffer.itemsize)
    return rows.all()


def outputs_per_token(model: nn.Module) -> int:
    """Outputs per token of the linear layers and experts of the widest decoder layer: a step's activations scale with
    it. `model` may be on the meta device."""
    widths: Counter[str] = Counter()
    top_k = getattr(cast(Any, model).config.get_text_config(decoder=True), "num_experts_per_tok", None) or 1
    for name, module in model.named_modules():
        if (layer := _LAYER.match(name)) is None:
            continue
        if (projections := expert_projections(module, "meta")) is not None:
            axis = -1 if getattr(module, "is_transposed", False) else -2
            outputs = top_k * sum(cast(Any, module._parameters[key]).shape[axis] for key in projections)
        else:
            outputs = getattr(module, "out_features", None) or getattr(module, "nf", None) or 0
        widths[layer[0]] += outputs
    return max(widths.values(), default=0)


def _linear_weight(module: nn.Module) -> nn.Parameter | None:
    """The module's weight, unless it is an embedding."""
    return None if isinstance(module, nn.Embedding) else module._parameters.get("weight")


def _outputs_and_inputs(model: nn.Module, name: str) -> tuple[int, int]:
    """Of the weight `name`, or of one of its experts."""
    holder, shape = _holder(model, name), model.get_parameter(name).shape[-2:]
    if is_transposed(holder) or getattr(holder, "is_transposed", False):
        shape = shape[::-1]
    return shape[0], shape[1]


def _holder(model: nn.Module, name: str) -> nn.Module:
    """The module whose parameter has that name."""
    return model.get_submodule(name.rpartition(".")[0])


class _SizeTable:
    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, num_bytes: int, label: str = "") -> None:
        self._counts[kind, label] += 1
        self._bytes[kind, label] += num_bytes

    def all(self) -> tuple[WeightSize, ...]:
        keys = sorted(self._counts, key=lambda key: (_KINDS.index(key[0]), -self._bytes[key]))
        return tuple(
            WeightSize(kind, self._counts[kind, label], self._bytes[kind, label], label)
            for kind, label in keys
        )


def _add_latent(rows: _SizeTable, module: Any, packing: Packing | None) -> None:
    """The heads that `LatentHeads` will pack of this module."""
    weight = module.kv_b_proj.weight
    nope_dim, v_dim, rank = module.qk_nope_head_dim, module.v_head_dim, weight.shape[1]
    form = WEIGHT_FORMS[
        "native" if packing is None and choose_packing(weight.dtype) == "native" else "watched"
    ]
    head_bytes = form(rank, nope_dim, weight.dtype, "") + form(v_dim, rank, weight.dtype, "")
    rows.add("latents", weight.shape[0] // (nope_dim + v_dim) * head_bytes)


def _packed_bytes(packed: PackedWeight) -> int:
    if isinstance(packed, NativeWeight):
        return packed.native.num_bytes
    if (num_bytes := getattr(packed, "num_bytes", None)) is not None:
        return num_bytes
    return packed.num_outputs * packed.num_inputs * packed.dtype.itemsize
