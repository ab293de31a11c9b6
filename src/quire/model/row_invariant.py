"""Finds torch operators whose bits depend on the other rows, by running the model, and replaces them in their modules.

Torch computes the last elements of an array with other instructions than the rest (silu, gelu, sigmoid ... then differ
in the last bit), and its products and some of its sums add in an order that depends on the number of rows. In a
flattened row of many sequences both would make one request's answer depend on the others.

    find      a forward under `Recorder` finds the modules that call such operators in a shape where it matters;
    replace   the forward of each of these modules, and of no other, has them replaced from then on, within `serving`;
              any other call is the module's own.

So a model whose layers are fused, or all of whose widths are whole vectors, pays no cost, and there is no list of model
types. The operators and their replacements:
    functions of one element   the array is extended to whole vectors (_WHOLE elements): no element is a last one
    products with a weight     the extension's packed product; its packed copy is stored next to the weight (routers
                               are small; linear layers and experts were packed in place before: `linear`, `experts`)
    products of activations    a float32 sum in order of k, by elementwise steps: slow, rare, always the same bits
    sums not along the rows    the summed dimensions are moved to the end, where torch's order is a row's own
    var, std, complex products from means along the rows, and from real products
Left alone: operators that round exactly once, and operators that tests/model/test_row_invariant.py measures to be
invariant: norms, softmax, sums along the last dimension, all on one thread.

Invariants
    V1  after the undo every module has its previous forward.
    V2  in a replaced forward the bits of a row depend on that row alone.

Cost: none for modules left alone; about 5 us per operator in a replaced forward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.devices.cpu.packed_weights import NativeWeight
from quire.modules.module_patch import current_method, patch_methods
from quire.weights.linear import choose_packing
from quire.weights.packed_parameter import PackedParameter

__all__ = ["Recorder", "on_whole_vectors", "replace", "serving"]

aten = torch.ops.aten
_local = threading.local()
_WHOLE = 64  # two vectors of the widest kind in 16-bit elements: torch's loops take two at a time

# Functions of one element that torch computes in two ways. Exactly rounded functions (+, *, /, sqrt, comparisons) are
# not here: both ways give the same bits.
_FUNCTIONS = frozenset(
    (
        aten.celu, aten.cos, aten.elu, aten.erf, aten.exp, aten.exp2, aten.expm1, aten.gelu, aten.log,
        aten.log1p, aten.log2, aten.log_sigmoid, aten.mish, aten.polar, aten.pow, aten.rsqrt, aten.selu,
        aten.sigmoid, aten.silu, aten.sin, aten.softplus, aten.tanh,
    )
)  # fmt: skip
_SUMS = frozenset((aten.mean, aten.sum))
_SPREADS = frozenset((aten.std, aten.var))
_PRODUCTS = frozenset((aten.linear, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten._grouped_mm))
_MADE_OF_PRODUCTS = frozenset((aten.matmul, aten.einsum, aten.tensordot, aten.inner))
_IN_PLACE = {
    getattr(aten, packet.__name__ + "_"): packet
    for packet in (*_FUNCTIONS, *_PRODUCTS, aten.add, aten.mul, aten.sub)
    if hasattr(aten, packet.__name__ + "_")
}


class Recorder:
    """While entered, notes which modules of `model` call an operator that must be replaced: `modules`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[nn.Module, None] = {}
        self._model = model
        self._running: list[nn.Module] = []
        self._mode = _RecordingMode(self._note)
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(lambda m, _: self._running.append(m)))
            self._hooks.append(
                module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)
            )
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()
        self._running.clear()

    def _note(self) -> None:
        self.modules[self._running[-1] if self._running else self._model] = None


def replace(model: nn.Module, modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Run the forwards of `modules`, parts of `model`, row-invariantly; returns the undo."""
    mode = _ExactMode(model)
    undos = [
        patch_methods(module, forward=_under(mode, current_method(module, "forward"))) for module in modules
    ]

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


@contextmanager
def serving() -> Iterator[None]:
    """Within it, in this thread, the replaced forwards are row-invariant; outside they are the models' own."""
    before, _local.serving = getattr(_local, "serving", False), True
    try:
        yield
    finally:
        _local.serving = before


def _under(mode: _ExactMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # `generate` and Quire read the signature
    def exact_forward(*args: Any, **kwargs: Any) -> Any:
        if mode.is_active or not getattr(_local, "serving", False):  # or within another module's forward
            return forward(*args, **kwargs)
        mode.is_active = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            mode.is_active = False

    return exact_forward


def on_whole_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function`, of one element each, computed so that an element's bits depend on it alone, as by `replace`.

    For Quire's own code, whose modules then need not be replaced. x: any shape; the result has it. Cost: one more copy
    of x if its rows are not whole vectors.
    """
    return function(x) if _is_whole(x, True) else _on_whole_vectors(function, (x,), {})


class _RecordingMode(TorchDispatchMode):
    """Calls `note` for each operator that `_ExactMode` would replace."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        packet = _IN_PLACE.get(packet, packet)
        if packet in _PRODUCTS or packet in _MADE_OF_PRODUCTS or _differs(packet, args, kwargs or {}):
            self._note()
        return func(*args, **(kwargs or {}))


class _ExactMode(TorchDispatchMode):
    """Makes every operator a function of its row alone. Caches the packed weights it has met."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.is_active = False
        # A packed weight's own modules compute with it; its dense memory, if any, is not constant.
        tensors = [t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, PackedParameter)]
        self._constants = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self._packed: dict[tuple[Any, ...], NativeWeight] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        functional = _IN_PLACE.get(packet, packet)
        if not (
            functional in _PRODUCTS or functional in _MADE_OF_PRODUCTS or _differs(functional, args, kwargs)
        ):
            return func(*args, **kwargs)
        out = args[0] if functional is not packet else kwargs.get("out")
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if functional in _PRODUCTS:
            result = getattr(self, "_" + functional.__name__.lstrip("_"))(*args, **kwargs)
        elif functional in _MADE_OF_PRODUCTS:
            with self:
                result = func.decompose(*args, **kwargs)
        else:
            result = _computed(functional, args, kwargs)
        return result if out is None else out.copy_(result)

    # -- products --------------------------------------------------------------------------------------

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(x, weight.t(), bias)

    def _mm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self._is_constant(a) and not self._is_constant(b):
            return self._product(b.t(), a.t()).t()
        return self._product(a, b)

    def _mv(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._mm(a, b[:, None])[:, 0]

    def _addmm(
        self, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        return beta * bias + alpha * self._mm(a, b)

    def _bmm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not self._is_constant(b):
            return _sum_in_order(a, b)
        if b.stride(0) == 0:  # one weight for all
            return self._product(a, b[0])
        return torch.stack([self._product(rows, weight) for rows, weight in zip(a, b, strict=True)])

    def _baddbmm(
        self, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        return beta * bias + alpha * self._bmm(a, b)

    def _grouped_mm(
        self, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]
        return torch.cat([self._product(a[i:j], w) for i, j, w in zip(starts, ends, b, strict=True) if j > i])

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., K] @ weight [K, N] + bias [N]."""
        if x.dtype is not weight.dtype or x.shape[-1] != weight.shape[0]:
            return torch.matmul(x, weight)  # torch's error
        if not self._is_constant(weight) or choose_packing(weight.dtype) != "native":
            return _sum_in_order(x, weight, bias)
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in self._packed:
            self._packed[key] = NativeWeight(weight.t())
        return self._packed[key].multiply(x, None if bias is None else bias.contiguous())

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._constants


def _sum_in_order(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N] + bias in float32, k by k; multiply and add round the same way everywhere."""
    left, right = a.float(), b.float()
    total = left[..., :, 0:1] * right[..., 0:1, :]
    for k in range(1, a.shape[-1]):
        total = total + left[..., :, k : k + 1] * right[..., k : k + 1, :]
    if bias is not None:
        total = total + bias.float()
    return total.to(a.dtype)


def _differs(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an element's bits may depend on its index in the array, or on the number of other elements."""
    tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim()]
    if not tensors:
        return False
    x = tensors[0]
    if packet in _FUNCTIONS:
        if not x.is_floating_point():
            return False
        if packet is aten.rsqrt and x.dtype is torch.float32:  # 1 / sqrt, both exactly rounded
            return False
        if packet is aten.pow and isinstance(args[1], int | float) and args[1] in (1, 2, 3):  # products
            return False
        return not all(_is_whole(tensor, packet is aten.gelu) for tensor in tensors)
    if packet is aten.add or packet is aten.sub:  # x + alpha * y rounds once or twice
        return kwargs.get("alpha", 1) != 1 and len(tensors) == 2 and x.is_floating_point()
    if packet is aten.mul:
        return all(tensor.is_complex() for tensor in tensors) and len(tensors) == 2
    if packet in _SUMS:
        dims = _dims(x, args)
        return bool(dims) and x.is_floating_point() and dims != [*range(x.dim() - len(dims), x.dim())]
    return packet in _SPREADS


def _dims(x: torch.Tensor, args: Sequence[Any]) -> list[int]:
    """The dimensions that a reduction of `x` names, ascending; [] for all."""
    named = args[1] if len(args) > 1 else None
    named = [named] if isinstance(named, int) else named
    return sorted(dim % x.dim() for dim in named) if isinstance(named, list | tuple) else []


def _is_whole(x: torch.Tensor, needs_contiguous: bool) -> bool:
    """Whether every row of x is whole vectors. gelu of a contiguous array is oneDNN's, of any other torch's own."""
    return x.shape[-1] % _WHOLE == 0 and (x.is_contiguous() or (x.stride(-1) == 1 and not needs_contiguous))


def _computed(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The result of `packet`, for the packets and arguments for which `_differs` holds."""
    if packet in _FUNCTIONS:
        return _on_whole_vectors(packet, args, kwargs)
    if packet is aten.mul:
        a, b = torch.broadcast_tensors(*args)
        real, imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
        return torch.complex(real, imag)
    if packet in _SUMS:
        return _sum_at_the_end(packet, args, kwargs)
    if packet in _SPREADS:
        return _spread(packet, args, kwargs)
    return packet(args[0], args[1] * kwargs["alpha"])


def _on_whole_vectors(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """`packet` of arrays extended to whole vectors, so that all elements are computed by the same instructions."""
    indices = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor) and value.dim()]
    tensors = torch.broadcast_tensors(*(args[index] for index in indices))
    shape, count = tensors[0].shape, tensors[0].numel()
    extended = list(args)
    for index, x in zip(indices, tensors, strict=True):
        flat = x.new_ones(-(-count // _WHOLE) * _WHOLE)
        flat[:count].view(shape).copy_(x)
        extended[index] = flat
    return packet(*extended, **kwargs)[:count].view(shape)


def _sum_at_the_end(
    packet: Any, args: Sequence[Any], kwargs: dict[str, Any], keepdim: bool | None = None
) -> torch.Tensor:
    """A sum or mean along any dimensions, computed along the last of a contiguous array."""
    x, dims = args[0], _dims(args[0], args)
    keepdim = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False)) if keepdim is None else keepdim
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    rows = x.permute(*rest, *dims).reshape(*(x.shape[dim] for dim in rest), -1).contiguous()
    total = packet(rows, [-1], dtype=kwargs.get("dtype"))
    if keepdim:
        for dim in dims:
            total = total.unsqueeze(dim)
    return total


def _spread(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """var or std: `(x, dim, unbiased, keepdim)` or `(x, dim, correction=, keepdim=)`, by the mean first."""
    x = args[0]
    dims = _dims(x, args) or [*range(x.dim())]
    unbiased = next((value for value in args[1:3] if isinstance(value, bool)), True)
    correction = kwargs.get("correction", int(unbiased))
    keepdim = bool(args[3] if len(args) > 3 else kwargs.get("keepdim", False))
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    wide = x.float()
    distance = wide - _sum_at_the_end(aten.mean, (wide, dims), {}, keepdim=True)
    squares = _sum_at_the_end(aten.sum, (distance * distance, dims), {}, keepdim=keepdim)
    variance = squares / max(0, count - (1 if correction is None else correction))
    return (variance.sqrt() if packet is aten.std else variance).to(x.dtype)
