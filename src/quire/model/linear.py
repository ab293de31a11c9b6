"""Linear layers whose weight is packed once for the processor, and held once.

`pack_linears(model)` turns every `nn.Linear` and every `Conv1D` (GPT-2's) of a model into a packed one, in place, and
returns what undoes it. A weight that is also the model's token embedding stays one: the embedding gathers its rows from
the packed form. Inference only. Not here: experts given as 3-D parameters, and subclasses of `nn.Linear`, which stay
as they are.

What computes, in this order (`choose_packing`):
    native   the extension's kernels, for float32, bfloat16 and float16 on any processor: the order of every sum
             belongs to the layer, so a row's result has the same bits whatever the other rows and the threads
             (native/kernels/linear.hpp).
    onednn   torch's private packed operators, where the extension is missing and they serve this dtype on this
             processor: as fast, but without that promise.
    none     the layer stays as it is: no extension and no such operator, a dtype beyond those three, no CPU tensor.

Invariants
    P1  the module stays the object it was, with its name, hooks and `isinstance`: only its class changes, to a
        subclass of its own.
    P2  `.weight` reads as the original weight, bit for bit, unpacked on demand. A weight that is read again and again
        is kept dense beside the packed form. It cannot be assigned.
    P3  a weight held by several packed modules is packed once; one that anything else holds too is left alone.
    P4  after the undoing: the same Parameter objects, the same bits, the same order of state_dict().

Cost of a call: that of the product plus about 3 us. Packing reads and writes each weight once; at most one layer's
weight exists twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F

from quire.backends import native_module
from quire.errors import ArgumentError, BackendError

__all__ = [
    "DTYPE_NAMES",
    "PackedEmbedding",
    "PackedLinear",
    "PackedWeight",
    "Packing",
    "choose_packing",
    "pack_linears",
    "weights_to_pack",
]

Packing = Literal["native", "onednn"]

# The dtypes the kernels compute in, as they call them.
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_READS_BEFORE_KEPT = 2


class PackedWeight(Protocol):
    """A weight [num_outputs, num_inputs] in some packed form."""

    dtype: torch.dtype
    num_outputs: int
    num_inputs: int

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs], of the weight's dtype -> [..., num_outputs]."""
        ...

    def unpack(self) -> torch.Tensor:
        """The weight, bit for bit."""
        ...

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Integer ids [...] -> rows [..., num_inputs]; IndexError for one out of range."""
        ...


class NativeWeight:
    """Packed by the extension, as `native`. `isa` names a variant of its kernels; None is the one in use."""

    def __init__(self, weight: torch.Tensor, isa: str | None = None) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        module = native_module()
        if module is None:
            raise BackendError('expected quire._native for packing "native", and it is not built here')
        self.native = module.PackedWeight(
            weight.data_ptr(), *weight.shape, *weight.stride(), DTYPE_NAMES[weight.dtype], isa
        )
        self._multiply = self.native.multiply

    @classmethod
    def at(cls, weight: torch.Tensor, address: int, owner: object) -> NativeWeight:
        """`weight`, of which only shape and dtype are read, packed before by the variant in use: its packed bytes lie
        at `address`, kept by `owner`."""
        self = cls.__new__(cls)
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self.move(address, owner)
        return self

    def move(self, address: int, owner: object) -> None:
        """Read the packed bytes at `address` from now on. Before anybody has taken `native`."""
        module = cast(Any, native_module())
        self.native = module.PackedWeight.at(
            address, self.num_outputs, self.num_inputs, DTYPE_NAMES[self.dtype], None, owner
        )
        self._multiply = self.native.multiply

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        rows = x.numel() // self.num_inputs
        self._multiply(x.data_ptr(), rows, 0 if bias is None else bias.data_ptr(), out.data_ptr())
        return out

    def unpack(self) -> torch.Tensor:
        out = torch.empty(self.num_outputs, self.num_inputs, dtype=self.dtype)
        self.native.unpack(out.data_ptr())
        return out

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.num_inputs), dtype=self.dtype)
        self.native.gather_rows(ids.data_ptr(), ids.numel(), out.data_ptr())
        return out


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


class _PackedModule(nn.Module):
    """What packed modules share: where the weight went, and how it reads."""

    _packed: PackedWeight
    _transposed: bool
    _num_reads: int
    _dense: torch.Tensor | None

    def _hold(self, packed: PackedWeight, transposed: bool) -> None:
        # Past nn.Module, so that nothing of it is registered.
        self.__dict__.update(_packed=packed, _transposed=transposed, _num_reads=0, _dense=None)

    def _let_go(self) -> None:
        for name in ("_packed", "_transposed", "_num_reads", "_dense"):
            del self.__dict__[name]

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._dense is not None:
            return self._dense
        dense = self._unpacked()
        self.__dict__["_num_reads"] += 1
        if self._num_reads > _READS_BEFORE_KEPT:
            self.__dict__["_dense"] = dense
        return dense

    def _unpacked(self) -> torch.Tensor:
        dense = self._packed.unpack()
        return dense.t().contiguous() if self._transposed else dense

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self._unpacked()  # as its Parameter would be, in the same place
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ArgumentError(
                f"expected the weight of a packed {type(self).__name__} to stay; restore the model first"
            )
        super().__setattr__(name, value)


class PackedLinear(_PackedModule, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`nn.Linear` on a packed weight. Made by `pack_linears`, in place of the class of a layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed = self._packed
        serves = input.dtype is packed.dtype and input.is_cpu and not input.requires_grad
        if not serves or input.dim() == 0 or input.shape[-1] != packed.num_inputs:
            # Torch's own answer or error; with a gradient asked for, its own graph.
            weight = self.weight
            return F.linear(input, weight.t() if self._transposed else weight, self.bias)
        return packed.multiply(input, self.bias)


class PackedEmbedding(_PackedModule, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`nn.Embedding` whose rows are gathered from the packed weight it shares with a linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._packed.gather_rows(input)


@functools.cache
def _packed_class(cls: type[nn.Module]) -> type[_PackedModule]:
    """The packed subclass for modules of exactly `cls`.

    An embedding may be a subclass of `nn.Embedding` (Gemma's scales the rows): its `super().forward` then leads to
    `PackedEmbedding.forward`.
    """
    if cls is nn.Linear:
        return PackedLinear
    if cls is nn.Embedding:
        return PackedEmbedding
    bases: tuple[type, ...] = (_PackedModule, cls)
    namespace: dict[str, Any] = {"forward": PackedLinear.forward}
    if issubclass(cls, nn.Embedding):
        bases, namespace = (cls, PackedEmbedding), {}
    return type(f"Packed{cls.__name__}", bases, namespace)


def pack_linears(
    model: nn.Module,
    packing: Packing | None = None,
    *,
    release: Callable[[torch.Tensor], None] | None = None,
    pack: Callable[[torch.Tensor], NativeWeight] | None = None,
) -> Callable[[], None]:
    """Pack the linear layers of `model` in place.

    Args:
        model: any module on the CPU; its Parameters are emptied layer by layer while they are packed.
        packing: forces one; None chooses per dtype by the rule of `choose_packing`.
        release: called with each dense weight once it is packed, before it is let go of.
        pack: makes the packed form of each weight [num_outputs, num_inputs] that the extension serves; None packs it
            in memory.

    Returns:
        A function that gives every weight back, bit for bit; called again, it does nothing.
    """
    groups = _packable(model, packing)
    undo: list[Callable[[], None]] = []

    def restore() -> None:
        while undo:
            undo.pop()()

    try:
        for parameter, modules, kind in groups:
            undo.append(_pack(parameter, modules, kind, release, pack or NativeWeight))
    except BaseException:
        restore()
        raise
    return restore


def weights_to_pack(model: nn.Module) -> list[torch.Tensor]:
    """What `pack_linears(model, pack=...)` would call `pack` with, in that order."""
    groups = _packable(model, None)
    dense = [(p.detach(), _is_transposed(modules[0])) for p, modules, kind in groups if kind == "native"]
    return [weight.t() if transposed else weight for weight, transposed in dense]


def _packable(
    model: nn.Module, packing: Packing | None
) -> list[tuple[nn.Parameter, list[nn.Module], Packing]]:
    """The weights to pack, with the modules that hold each and what packs it."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    groups = []
    for parameter, held in holders.items():
        modules = [module for module, _ in held]
        linears = [module for module in modules if _is_linear(module)]
        embeddings = [
            module for module in modules if isinstance(module, nn.Embedding) and _gathers_rows(module)
        ]
        kind = packing or choose_packing(parameter.dtype)
        serves = (
            kind is not None
            and bool(linears)
            and len(linears) + len(embeddings) == len(held)
            and all(name == "weight" for _, name in held)
            and not (embeddings and kind == "onednn")
            and len({_is_transposed(module) for module in modules}) == 1
            and parameter.dtype in DTYPE_NAMES
            and parameter.device.type == "cpu"
            and type(parameter) is nn.Parameter
            and parameter.dim() == 2
            and parameter.numel() > 0
            and all(_has_plain_bias(module, parameter.dtype) for module in linears)
        )
        if serves and kind is not None:
            groups.append((parameter, modules, kind))
    return groups


def _pack(
    parameter: nn.Parameter,
    modules: list[nn.Module],
    kind: Packing,
    release: Callable[[torch.Tensor], None] | None,
    pack: Callable[[torch.Tensor], NativeWeight],
) -> Callable[[], None]:
    """Pack one weight for all modules that hold it; returns what undoes that."""
    transposed = _is_transposed(modules[0])
    dense = parameter.detach()
    oriented = dense.t() if transposed else dense
    packed: PackedWeight = pack(oriented) if kind == "native" else OneDnnWeight(oriented)
    classes = [type(module) for module in modules]
    for module in modules:
        module._parameters["weight"] = None  # the entry stays: state_dict() keeps its order
        module.__class__ = _packed_class(type(module))
        cast(_PackedModule, module)._hold(packed, transposed)
    if release is not None:
        release(dense)
    # Whoever else holds the Parameter must not keep its memory.
    parameter.data = torch.empty(0, dtype=parameter.dtype)

    def undo() -> None:
        weight = packed.unpack()
        parameter.data = weight.t().contiguous() if transposed else weight
        for module, cls in zip(modules, classes, strict=True):
            cast(_PackedModule, module)._let_go()
            module.__class__ = cls
            module._parameters["weight"] = parameter

    return undo


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, whose weight is [num_inputs, num_outputs]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _gathers_rows(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse


def _has_plain_bias(module: nn.Module, dtype: torch.dtype) -> bool:
    bias = module._parameters.get("bias")
    return bias is None or (bias.dtype == dtype and bias.is_contiguous() and bias.device.type == "cpu")
