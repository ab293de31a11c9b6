"""Linear layers whose weight is packed once for the processor, in place of the dense weight.

`pack_linears(model)` turns every `nn.Linear` and every `Conv1D` (GPT-2's) of a model into a packed one, in place, and
returns the undo. A weight that is also the model's token embedding stays shared: the embedding gathers its rows from
the packed form. Not here: experts given as 3-D parameters, and subclasses of `nn.Linear`, which stay as they are.

`choose_packing` takes the first of these that applies:
    native   the extension's kernels, for float32, bfloat16 and float16 on any processor: the order of every sum
             belongs to the layer, so a row's result has the same bits for any other rows and any number of threads
             (native/kernels/linear.hpp).
    onednn   torch's private packed operators, if the extension is missing and they support this dtype on this
             processor: as fast, but without that promise.
    device   the packing of another device's back end (`Device.pack`), if one is given.
    none     the layer stays dense: no extension and no such operator, a dtype beyond those three, or no CPU tensor.

Invariants
    P1  the module stays the same object, with its name, hooks and `isinstance`: only its class changes, to a
        subclass of its own.
    P2  `.weight` stays the same Parameter object, and reads and writes as an ordinary one (`packed_parameter`). A
        layer whose weight was written, or is being viewed, computes from dense memory, as torch does; so does a layer
        under a gradient, another dtype or autocast. A layer that gets another weight is no longer packed.
    P3  a weight shared by several packed modules is packed once; a weight that any other module shares stays dense.
        The weight of an embedding that no linear layer shares is not packed, but watched for writes.
    P4  after the undo: the same Parameter objects, with the bits they have by then, the same order of state_dict().

Cost of a call: that of the product plus about 3 us. Packing reads and writes each weight once; at most one layer's
weight exists twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional as F

from quire.backends import native_module
from quire.devices import Device, PackedWeight
from quire.devices.cpu.packed_weights import DTYPE_NAMES, NativeWeight, OneDnnWeight, onednn_serves
from quire.memory.heap import give_back_freed
from quire.modules.module_patch import SwitchedModule, original_class, restore_class
from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter

__all__ = [
    "DenseWeight",
    "PackedEmbedding",
    "PackedLinear",
    "PackedModule",
    "Packing",
    "choose_packing",
    "is_transposed",
    "pack_linears",
    "packed_class",
    "packing_on",
    "planned_packing",
    "weights_to_pack",
]

Packing = Literal["native", "onednn", "device", "watched"]

_MAX_DIMENSIONS = 4  # of the input of a packed weight


class DenseWeight:
    """A dense weight, multiplied by torch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.num_outputs, self.num_inputs = weight.shape

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def unpack(self) -> torch.Tensor:
        return self.weight

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


def choose_packing(dtype: torch.dtype) -> Packing | None:
    """The packing for layers of `dtype` on this machine, by the rule in the file's head; None: they stay dense."""
    if dtype not in DTYPE_NAMES:
        return None
    if native_module() is not None:
        return "native"
    return "onednn" if onednn_serves(dtype) else None


def packing_on(backend: Device) -> Packing | None:
    """The packing that `pack_linears` has to use for a model on `backend`; None: by dtype, as `choose_packing` says.

    Torch computes on another device than the host, and if the extension is built but the back end does not use it.
    """
    if backend.pack is not None:
        return "device"
    if not backend.is_host:
        return "watched"
    return "watched" if not backend.is_native and native_module() is not None else None


class PackedModule(SwitchedModule):
    """Base of packed modules: the link to the weight, and the fallback to dense memory."""

    _packed: PackedWeight | None  # None while dense memory is the weight (`packed_parameter`)
    _lazy_weight: LazyDenseWeight
    _transposed: bool
    _is_on_host: bool

    def use_weight(self, lazy_weight: LazyDenseWeight, transposed: bool) -> None:
        """Compute from `lazy_weight` from now on. transposed: the Parameter is [num_inputs, num_outputs]."""
        # Bypasses nn.Module.__setattr__, so that nothing is registered.
        is_on_host = cast(torch.Tensor, self._parameters["weight"]).is_cpu
        self.__dict__.update(
            _packed=lazy_weight.packed,
            _lazy_weight=lazy_weight,
            _transposed=transposed,
            _is_on_host=is_on_host,
        )
        lazy_weight.users.add(self)

    def _weight(self) -> torch.Tensor:
        """The weight for torch's operators: the Parameter under a gradient, else dense memory."""
        weight = self._parameters.get("weight")
        if weight is None:  # parametrized
            return cast(torch.Tensor, self.weight)
        if not isinstance(weight, PackedParameter) or (torch.is_grad_enabled() and weight.requires_grad):
            return weight
        return weight.lazy_weight.read()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        if not isinstance(self._parameters.get("weight"), PackedParameter):  # torch has put another one there
            restore_class(self)
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            restore_class(self)
        original_class(self).__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            restore_class(self)
        original_class(self).__delattr__(self, name)


def _wants_gradient(input: torch.Tensor, weight: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (input.requires_grad or (weight is not None and weight.requires_grad))


class PackedLinear(PackedModule, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`nn.Linear` on a packed weight. Made by `pack_linears`, in place of the class of a layer."""

    _quire_switched = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed = self._packed
        if (
            packed is None
            or input.dtype is not packed.dtype
            or input.is_cpu is not self._is_on_host
            or input.dim() == 0
            or input.shape[-1] != packed.num_inputs
            or _wants_gradient(input, self._parameters["weight"])
            or torch.is_autocast_enabled("cpu")
        ):
            # Torch's own result or error; under a gradient, its own graph.
            weight = self._weight()
            return F.linear(input, weight.t() if self._transposed else weight, self.bias)
        if input.dim() > _MAX_DIMENSIONS:
            rows = packed.multiply(input.flatten(0, -2), self.bias)
            return rows.view(*input.shape[:-1], rows.shape[-1])
        return packed.multiply(input, self.bias)


class PackedEmbedding(PackedModule, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`nn.Embedding` whose rows are gathered from the packed weight it shares with a linear layer, or from a dense
    weight that is watched for writes."""

    _quire_switched = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed, weight = self._packed, self._parameters.get("weight")
        if packed is None or (torch.is_grad_enabled() and weight is not None and weight.requires_grad):
            return F.embedding(
                input,
                self._weight(),
                self.padding_idx,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.sparse,
            )
        return packed.gather_rows(input)


@functools.cache
def packed_class(cls: type[nn.Module]) -> type[PackedModule]:
    """The packed subclass for modules of exactly `cls`.

    An embedding may be a subclass of `nn.Embedding` (Gemma's scales the rows): its `super().forward` then leads to
    `PackedEmbedding.forward`.
    """
    if cls is nn.Linear:
        return PackedLinear
    if cls is nn.Embedding:
        return PackedEmbedding
    bases: tuple[type, ...] = (PackedModule, cls)
    namespace: dict[str, Any] = {"forward": PackedLinear.forward, "_quire_switched": True}
    if issubclass(cls, nn.Embedding):
        bases, namespace = (cls, PackedEmbedding), {"_quire_switched": True}
    return type(f"Packed{cls.__name__}", bases, namespace)


def pack_linears(
    model: nn.Module,
    packing: Packing | None = None,
    *,
    release: Callable[[torch.Tensor], None] | None = None,
    pack: Callable[[torch.Tensor], PackedWeight] | None = None,
) -> Callable[[], None]:
    """Pack the linear layers of `model` in place.

    Args:
        model: any module on the CPU; its Parameters release their memory layer by layer while they are packed.
        packing: forces a packing, "device" with the weights that `pack` makes; None: per dtype by `choose_packing`.
            "watched" packs nothing: torch computes, and writes to a weight are noticed.
        release: called with each dense weight once it is packed, before its reference is dropped.
        pack: makes the packed form of each weight [num_outputs, num_inputs] that the extension or the device supports;
            None packs it in memory, by the extension.

    Returns:
        A function that restores every weight, with the writes since then; a second call does nothing.
    """
    groups = _packable(model, packing)
    undo: list[Callable[[], None]] = []

    def restore() -> None:
        while undo:
            undo.pop()()

    try:
        for parameter, modules, kind in groups:
            undone = _pack(parameter, modules, kind, release, pack or NativeWeight)
            if undone is not None:
                undo.append(undone)
            give_back_freed()  # the dense weight lay between memory that stays
    except BaseException:
        restore()
        raise
    return restore


def weights_to_pack(model: nn.Module) -> list[torch.Tensor]:
    """The arguments of the `pack` calls of `pack_linears(model, pack=...)`, in their order."""
    groups = _packable(model, None)
    dense = [(p.detach(), is_transposed(modules[0])) for p, modules, kind in groups if kind == "native"]
    return [weight.t() if transposed else weight for weight, transposed in dense]


def planned_packing(
    model: nn.Module, packing: Packing | None = None
) -> list[tuple[nn.Parameter, tuple[int, int], Packing, bool]]:
    """The weights that `pack_linears` would pack if `model`, on torch's meta device, had memory: each weight, its
    (num_outputs, num_inputs), its packing ("watched": none), and whether only an embedding has it."""
    planned = []
    for parameter, modules, kind in _packable(model, packing, "meta"):
        num_outputs, num_inputs = parameter.shape[::-1] if is_transposed(modules[0]) else parameter.shape
        is_embedding = not any(_is_linear(module) for module in modules)
        planned.append((parameter, (num_outputs, num_inputs), kind, is_embedding))
    return planned


def _packable(
    model: nn.Module, packing: Packing | None, device: str = "cpu"
) -> list[tuple[nn.Parameter, list[nn.Module], Packing]]:
    """The weights to pack, each with its modules and its packing."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    groups: list[tuple[nn.Parameter, list[nn.Module], Packing]] = []
    for parameter, named_modules in holders.items():
        modules = [module for module, _ in named_modules]
        linears = [module for module in modules if _is_linear(module)]
        embeddings = [
            module for module in modules if isinstance(module, nn.Embedding) and _gathers_rows(module)
        ]
        if not (
            len(linears) + len(embeddings) == len(named_modules)
            and all(name == "weight" for _, name in named_modules)
            and parameter.device.type == device
            and type(parameter) is nn.Parameter
            and parameter.dim() == 2
            and parameter.numel() > 0
        ):
            continue
        kind = packing or choose_packing(parameter.dtype)
        can_pack = (
            kind is not None
            and kind != "watched"
            and bool(linears)
            and not (embeddings and kind == "onednn")
            and len({is_transposed(module) for module in modules}) == 1
            and parameter.dtype in DTYPE_NAMES
            and all(_has_plain_bias(module, parameter.dtype, device) for module in linears)
        )
        if can_pack and kind is not None:
            groups.append((parameter, modules, kind))
        elif embeddings or kind == "watched":
            groups.append((parameter, modules, "watched"))
    return groups


def _pack(
    parameter: nn.Parameter,
    modules: list[nn.Module],
    kind: Packing,
    release: Callable[[torch.Tensor], None] | None,
    pack: Callable[[torch.Tensor], PackedWeight],
) -> Callable[[], None] | None:
    """Pack one weight for all its modules; returns the undo.

    None if torch does not let the Parameter be replaced (a graph references it): the weight stays dense.
    """
    transposed = is_transposed(modules[0])
    dense = parameter.detach()
    if kind == "watched":
        lazy_weight = LazyDenseWeight(dense=dense)
    else:
        oriented = dense.t() if transposed else dense
        packed: PackedWeight = OneDnnWeight(oriented) if kind == "onednn" else pack(oriented)
        lazy_weight = LazyDenseWeight(packed=packed, unpack=functools.partial(_unpacked, packed, transposed))
    if not PackedParameter.replace_parameter(parameter, lazy_weight, dense):
        return None
    for module in modules:
        is_module_transposed = is_transposed(module)
        module.__class__ = packed_class(type(module))
        cast(PackedModule, module).use_weight(lazy_weight, is_module_transposed)
    if release is not None and kind != "watched":
        release(dense)

    def undo() -> None:
        for module in modules:
            restore_class(module)
        if isinstance(parameter, PackedParameter):
            parameter.restore()

    return undo


def _unpacked(packed: PackedWeight, transposed: bool) -> torch.Tensor:
    weight = packed.unpack()
    return weight.t().contiguous() if transposed else weight


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' `Conv1D`, whose weight is [num_inputs, num_outputs]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _gathers_rows(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse


def _has_plain_bias(module: nn.Module, dtype: torch.dtype, device: str) -> bool:
    bias = module._parameters.get("bias")
    return bias is None or (bias.dtype == dtype and bias.is_contiguous() and bias.device.type == device)
