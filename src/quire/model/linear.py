"""Linear layers whose weight is packed once for the processor, and held once.

`pack_linears(model)` turns every `nn.Linear` and every `Conv1D` (GPT-2's) of a model into a packed one, in place, and
returns what undoes it. A weight that is also the model's token embedding stays one: the embedding gathers its rows from
the packed form. Not here: experts given as 3-D parameters, and subclasses of `nn.Linear`, which stay
as they are.

What computes, in this order (`choose_packing`):
    native   the extension's kernels, for float32, bfloat16 and float16 on any processor: the order of every sum
             belongs to the layer, so a row's result has the same bits whatever the other rows and the threads
             (native/kernels/linear.hpp).
    onednn   torch's private packed operators, where the extension is missing and they serve this dtype on this
             processor: as fast, but without that promise.
    device   what a back end of another device packs with (`Device.pack`), where one is asked for.
    none     the layer stays as it is: no extension and no such operator, a dtype beyond those three, no CPU tensor.

Invariants
    P1  the module stays the object it was, with its name, hooks and `isinstance`: only its class changes, to a
        subclass of its own.
    P2  `.weight` stays the Parameter object it was, and reads and writes as one (`packed_parameter`). A layer whose
    weight
        was written, or is looked at, computes from dense memory, as torch does; so does one that is asked for a
        gradient, another dtype or autocast. One that is given another weight is packed no more.
    P3  a weight held by several packed modules is packed once; one that anything else holds too is left alone. The
        weight of an embedding that no linear layer shares is not packed, but watched for being written.
    P4  after the undoing: the same Parameter objects, with the bits they have by then, the same order of state_dict().

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

from quire.attention.devices import Device, PackedWeight
from quire.backends import native_module
from quire.errors import BackendError
from quire.memory.heap import give_back_freed
from quire.model.module_patch import Changed, let_go, own_class
from quire.model.packed_parameter import LazyDenseWeight, PackedParameter

__all__ = [
    "DTYPE_NAMES",
    "DenseWeight",
    "PackedEmbedding",
    "PackedLinear",
    "PackedModule",
    "PackedWeight",
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

# The dtypes the kernels compute in, as they call them.
_MOST_DIMENSIONS = 4  # of what a packed weight multiplies
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class NativeWeight:
    """Packed by the extension, as `native`. `isa` names a variant of its kernels; None is the one in use."""

    def __init__(self, weight: torch.Tensor, isa: str | None = None) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        module = native_module()
        if module is None:
            raise BackendError('expected quire._native for packing "native", and it is not built here')
        self.native = module.PackedWeight(weight, isa)
        self._multiply = self.native.multiply

    @classmethod
    def at(cls, weight: torch.Tensor, packed: Any) -> NativeWeight:
        """`weight`, of which only shape and dtype are read, packed before by the variant in use.

        packed: its packed bytes, uint8, at a multiple of 64; they are kept.
        """
        self = cls.__new__(cls)
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self.move(packed)
        return self

    @property
    def metadata(self) -> list[str]:
        """What is needed beside its bytes, shape and dtype to read them again (`saved_weights`): nothing."""
        return []

    def move(self, packed: Any) -> None:
        """Read these packed bytes from now on. Before anybody has taken `native`."""
        module = cast(Any, native_module())
        self.native = module.PackedWeight.at(
            packed, self.num_outputs, self.num_inputs, DTYPE_NAMES[self.dtype], None
        )
        self._multiply = self.native.multiply

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self._multiply(x, bias, out)
        return out

    def unpack(self) -> torch.Tensor:
        out = torch.empty(self.num_outputs, self.num_inputs, dtype=self.dtype)
        self.native.unpack(out)
        return out

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.num_inputs), dtype=self.dtype)
        self.native.gather_rows(ids, out)
        return out


class DenseWeight:
    """A weight as torch multiplies by it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.num_outputs, self.num_inputs = weight.shape

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def unpack(self) -> torch.Tensor:
        return self.weight

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class OneDnnWeight:
    """Packed by oneDNN through operators that torch keeps to itself."""

    _BATCH_HINT = 32

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._BATCH_HINT)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def unpack(self) -> torch.Tensor:
        return self._packed.to_dense()

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("oneDNN's packed form gives no rows; a tied weight stays dense")


@functools.cache
def _onednn_serves(dtype: torch.dtype) -> bool:
    """Whether the private operators exist, run `dtype` here, and give the weight back."""
    weight = torch.linspace(-1.0, 1.0, 24 * 16).reshape(24, 16).to(dtype)
    x = torch.linspace(1.0, -1.0, 3 * 16).reshape(3, 16).to(dtype)
    try:
        packed = OneDnnWeight(weight)
        close = torch.allclose(packed.multiply(x, None).float(), x.float() @ weight.float().T, atol=0.1)
        return close and torch.equal(packed.unpack(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def choose_packing(dtype: torch.dtype) -> Packing | None:
    """What packs and computes layers of `dtype` here; None leaves them alone. The rule stands in the file's head."""
    if dtype not in DTYPE_NAMES:
        return None
    if native_module() is not None:
        return "native"
    return "onednn" if _onednn_serves(dtype) else None


def packing_on(backend: Device) -> Packing | None:
    """As what `pack_linears` packs a model that `backend` runs; None: by dtype, as `choose_packing` says.

    Torch computes where the extension is built and is not to be called.
    """
    if backend.pack is not None:
        return "device"
    return "watched" if not backend.is_native and native_module() is not None else None


class PackedModule(Changed):
    """What packed modules share: where the weight went, and what is done where the packed form does not serve."""

    _packed: PackedWeight | None  # None while dense memory is the weight (`packed_parameter`)
    _held: LazyDenseWeight
    _transposed: bool

    def hold(self, held: LazyDenseWeight, transposed: bool) -> None:
        """Compute from `held` from now on. transposed: the Parameter is [num_inputs, num_outputs]."""
        # Past nn.Module, so that nothing of it is registered.
        self.__dict__.update(_packed=held.packed, _held=held, _transposed=transposed)
        held.users.add(self)

    def _weight(self) -> torch.Tensor:
        """The weight as torch's operators take it: the Parameter where a gradient is asked for, else dense memory."""
        weight = self._parameters.get("weight")
        if weight is None:  # parametrized
            return cast(torch.Tensor, self.weight)
        if not isinstance(weight, PackedParameter) or (torch.is_grad_enabled() and weight.requires_grad):
            return weight
        return weight.held.read()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        if not isinstance(self._parameters.get("weight"), PackedParameter):  # torch has put another one there
            let_go(self)
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            let_go(self)
        own_class(self).__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            let_go(self)
        own_class(self).__delattr__(self, name)


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
            or not input.is_cpu
            or input.dim() == 0
            or input.shape[-1] != packed.num_inputs
            or _wants_gradient(input, self._parameters["weight"])
            or torch.is_autocast_enabled("cpu")
        ):
            # Torch's own answer or error; with a gradient asked for, its own graph.
            weight = self._weight()
            return F.linear(input, weight.t() if self._transposed else weight, self.bias)
        if input.dim() > _MOST_DIMENSIONS:
            rows = packed.multiply(input.flatten(0, -2), self.bias)
            return rows.view(*input.shape[:-1], rows.shape[-1])
        return packed.multiply(input, self.bias)


class PackedEmbedding(PackedModule, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`nn.Embedding` whose rows are gathered from the packed weight it shares with a linear layer, or from a dense one
    that is watched for being written."""

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
        model: any module on the CPU; its Parameters give their memory up layer by layer while they are packed.
        packing: forces one, "device" with what `pack` makes; None chooses per dtype by the rule of `choose_packing`.
            "watched" packs nothing: torch computes, and who writes to a weight is noticed.
        release: called with each dense weight once it is packed, before it is let go of.
        pack: makes the packed form of each weight [num_outputs, num_inputs] that the extension or the device serves;
            None packs it in memory, by the extension.

    Returns:
        A function that gives every weight back, with what was written to it meanwhile; called again, it does nothing.
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
            give_back_freed()  # the dense weight, between what stays
    except BaseException:
        restore()
        raise
    return restore


def weights_to_pack(model: nn.Module) -> list[torch.Tensor]:
    """What `pack_linears(model, pack=...)` would call `pack` with, in that order."""
    groups = _packable(model, None)
    dense = [(p.detach(), is_transposed(modules[0])) for p, modules, kind in groups if kind == "native"]
    return [weight.t() if transposed else weight for weight, transposed in dense]


def planned_packing(
    model: nn.Module, packing: Packing | None = None
) -> list[tuple[nn.Parameter, tuple[int, int], Packing, bool]]:
    """What `pack_linears` would pack if `model`, on torch's meta device, had memory: each weight, its (num_outputs,
    num_inputs), what packs it ("watched": nothing), and whether it is an embedding's alone."""
    found = []
    for parameter, modules, kind in _packable(model, packing, "meta"):
        num_outputs, num_inputs = parameter.shape[::-1] if is_transposed(modules[0]) else parameter.shape
        is_embedding = not any(_is_linear(module) for module in modules)
        found.append((parameter, (num_outputs, num_inputs), kind, is_embedding))
    return found


def _packable(
    model: nn.Module, packing: Packing | None, device: str = "cpu"
) -> list[tuple[nn.Parameter, list[nn.Module], Packing]]:
    """The weights to pack, with the modules that hold each and what packs it."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    groups: list[tuple[nn.Parameter, list[nn.Module], Packing]] = []
    for parameter, held in holders.items():
        modules = [module for module, _ in held]
        linears = [module for module in modules if _is_linear(module)]
        embeddings = [
            module for module in modules if isinstance(module, nn.Embedding) and _gathers_rows(module)
        ]
        if not (
            len(linears) + len(embeddings) == len(held)
            and all(name == "weight" for _, name in held)
            and parameter.device.type == device
            and type(parameter) is nn.Parameter
            and parameter.dim() == 2
            and parameter.numel() > 0
        ):
            continue
        kind = packing or choose_packing(parameter.dtype)
        serves = (
            kind is not None
            and kind != "watched"
            and bool(linears)
            and not (embeddings and kind == "onednn")
            and len({is_transposed(module) for module in modules}) == 1
            and parameter.dtype in DTYPE_NAMES
            and all(_has_plain_bias(module, parameter.dtype, device) for module in linears)
        )
        if serves and kind is not None:
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
    """Pack one weight for all modules that hold it; returns what undoes that.

    None where torch does not let the Parameter's place be taken (a graph holds it): it stays as it is.
    """
    transposed = is_transposed(modules[0])
    dense = parameter.detach()
    if kind == "watched":
        held = LazyDenseWeight(dense=dense)
    else:
        oriented = dense.t() if transposed else dense
        packed: PackedWeight = OneDnnWeight(oriented) if kind == "onednn" else pack(oriented)
        held = LazyDenseWeight(packed=packed, unpack=functools.partial(_unpacked, packed, transposed))
    if not PackedParameter.take_place(parameter, held, dense):
        return None
    for module in modules:
        lies_transposed = is_transposed(module)
        module.__class__ = packed_class(type(module))
        cast(PackedModule, module).hold(held, lies_transposed)
    if release is not None and kind != "watched":
        release(dense)

    def undo() -> None:
        for module in modules:
            let_go(module)
        if isinstance(parameter, PackedParameter):
            parameter.give_back()

    return undo


def _unpacked(packed: PackedWeight, transposed: bool) -> torch.Tensor:
    weight = packed.unpack()
    return weight.t().contiguous() if transposed else weight


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, whose weight is [num_inputs, num_outputs]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _gathers_rows(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse


def _has_plain_bias(module: nn.Module, dtype: torch.dtype, device: str) -> bool:
    bias = module._parameters.get("bias")
    return bias is None or (bias.dtype == dtype and bias.is_contiguous() and bias.device.type == device)
