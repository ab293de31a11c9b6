"""Every operator of a forward, row by row: batch-dependent operators of torch are replaced, assumptions are measured.

Rows alone against the same rows among others, compared by bytes, on one thread as in `PreparedModel.forward`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from support.architectures import ALL, tiny
from torch import nn
from torch.nn import functional as F

from quire.model import PreparedModel, row_invariant
from quire.weights import load

pytest.importorskip("quire._native")
from quire.model.fused import Fused

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 5, 8, 24, 64, 100, 344, 688, 1365]
ROWS = [2, 3, 7, 16, 33, 65]

# What a forward may call besides: operators that round exactly once, that only move data, and integers.
# index_add_ as experts do it (LongCat Flash): a row is there once in a call, so that it is one sum.
ROUNDED_ONCE = {
    "abs", "add", "add_", "clamp", "div", "div_", "floor", "index_add_", "max", "maximum", "min", "mul", "mul_",
    "multiply", "neg", "reciprocal", "relu", "sqrt", "square", "sub",
}  # fmt: skip
MOVES = {
    "alias", "any", "arange", "argsort", "bincount", "bitwise_not", "cat", "chunk", "clone", "concat", "contiguous",
    "copy_", "detach", "detach_", "dropout", "embedding", "empty", "empty_like", "eq", "expand", "flatten",
    "floor_divide", "full", "full_like", "gather", "ge", "greater", "gt", "index", "index_put_", "item",
    "lift_fresh", "logical_and", "lt", "masked_fill", "new_empty", "nonzero", "numpy_T", "one_hot", "ones",
    "ones_like", "permute", "repeat", "repeat_interleave", "reshape", "resolve_conj", "resolve_neg", "scatter",
    "scatter_", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "to", "topk", "transpose",
    "type_as", "unbind", "unflatten", "unsqueeze", "view",
    "view_as_complex", "view_as_real", "where", "zeros_like",
}  # fmt: skip
# Left to torch because they are measured here.
MEASURED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x.new_ones(x.shape[-1]), x.new_ones(x.shape[-1])),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean(-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], x.new_ones(x.shape[-1])),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: x.sum(-1, keepdim=True),
}
REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: torch.add(x, x * x, alpha=0.3),
    "cos": lambda x: (x * 100).cos(),
    "elu": F.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "gelu": F.gelu,
    "gelu of a half": lambda x: F.gelu(torch.cat((x, x), dim=-1).chunk(2, dim=-1)[0]),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "log": lambda x: (x.abs() + 1).log(),
    "log1p": lambda x: x.abs().log1p(),
    "mish": F.mish,
    "new_gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "polar": lambda x: torch.view_as_real(torch.polar(torch.ones_like(x), x)) if x.dtype is torch.float32 else x,
    "pow": lambda x: x.abs().pow(-0.5),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu": F.silu,
    "silu of a half": lambda x: F.silu(torch.cat((x, x), dim=-1).chunk(2, dim=-1)[1]),
    "sin": lambda x: (x * 100).sin(),
    "softplus": F.softplus,
    "std": lambda x: x.std(-1, unbiased=False, keepdim=True),
    "tanh": torch.tanh,
    "var": lambda x: x.var(-1),
    "complex product": lambda x: torch.view_as_real(
        torch.complex(x.float(), x.float()) * torch.complex(x.float(), -1.5 * x.float())
    ),
    "sum of the first": lambda x: torch.stack([x * (index + 1) / 7 for index in range(60)]).sum(0),
    "mean of two": lambda x: torch.stack([x * i / 7 for i in range(12)]).view(3, 4, *x.shape).mean((0, 1)),
    "product of activations": lambda x: x[:, :, None] @ x[:, None, :8],
    "inner product of activations": lambda x: (x[:, None, :] @ x[:, :, None])[:, 0],
}  # fmt: skip


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def a_step() -> Iterator[None]:
    """What is replaced serves in steps alone."""
    with row_invariant.serving():
        yield


def variant(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, width: int) -> list[int]:
    """The numbers of rows among which some row's bits are not those it has alone."""
    with torch.inference_mode():
        x = torch.randn(max(ROWS), width).to(dtype)
        alone = torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))])
        return [rows for rows in ROWS if not same_bits(function(x[:rows].clone()), alone[:rows])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Calls(nn.Module):
    """A module that calls one function, and may hold a weight."""

    def __init__(self, function: Callable[..., torch.Tensor], weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.weight is None else self.function(x, self.weight)


def exact(function: Callable[..., torch.Tensor], weight: torch.Tensor | None = None) -> nn.Module:
    module = Calls(function, weight)
    row_invariant.replace(module, [module])
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MEASURED)
def test_what_is_left_to_torch_is_row_invariant(name: str, dtype: torch.dtype) -> None:
    for width in [*WIDTHS, 4096]:
        assert variant(MEASURED[name], dtype, width) == [], width


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # by default one of the types of 16 bits in turn; "sum of the first" takes 3 s each
        pytest.param(name, dtype, marks=[pytest.mark.ci] * (name == "sum of the first" or left_out is dtype))
        for name, left_out in zip(REPLACED, cycle(DTYPES[1:]))
        for dtype in DTYPES
    ],
    ids=str,
)
def test_what_is_replaced_is_row_invariant_and_torchs_answer(name: str, dtype: torch.dtype) -> None:
    module = exact(REPLACED[name])
    for width in [8, 24, 100] if "product of" in name else WIDTHS:
        assert variant(module, dtype, width) == [], width
        x = torch.randn(7, width).to(dtype)
        with torch.inference_mode():
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
            torch.testing.assert_close(
                module(x), REPLACED[name](x), rtol=tolerance, atol=4 * tolerance, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "rsqrt", "cos"])
def test_every_16_bit_number_has_one_value(name: str, dtype: torch.dtype) -> None:
    """In the middle of a long array, and as the last of a short one."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    module = exact(REPLACED[name])
    with torch.inference_mode():
        assert same_bits(module(every), torch.cat([module(piece) for piece in every.split(1013)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: F.linear(x[None], w, w[:, 0])[0],
        lambda x, w: x @ w.t(),
        lambda x, w: torch.einsum("th,oh->to", x, w),
        lambda x, w: (w @ x.t()).t(),
        lambda x, w: torch.addmm(w[:, 0].contiguous(), x, w.t()),
        lambda x, w: torch.stack([w @ row for row in x]),
        lambda x, w: torch.bmm(x[None].expand(2, -1, -1), w.t()[None].expand(2, -1, -1))[1],
        lambda x, w: torch.baddbmm(x.new_zeros(1, 1, 1), x[None], w.t()[None])[0],
    ],
)
def test_a_product_with_a_weight_keeps_its_order(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    for width in (24, 100, 1365):
        weight = (torch.randn(9, width) / width**0.5).to(dtype)
        module = exact(function, weight)
        assert variant(module, dtype, width) == [], width
        x = torch.randn(7, width).to(dtype)
        with torch.inference_mode():
            plain = function(x, weight)
            tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
            torch.testing.assert_close(module(x), plain, rtol=tolerance, atol=tolerance)


def test_the_measure_can_fail() -> None:
    """torch's own products and silu, in shapes known to depend on the rows."""
    weight = torch.randn(96, 100)
    assert variant(lambda x: F.linear(x, weight), torch.float32, 100) or torch.get_num_threads() > 1
    assert any(variant(F.silu, torch.float32, width) for width in (100, 688, 1365))


def test_only_modules_that_need_it_are_replaced_and_all_are_given_back() -> None:
    inner, whole, outer = Calls(F.silu), Calls(F.silu), nn.Module()
    model = nn.Sequential(inner, Calls(lambda x: torch.cat((x, x[:, :28]), dim=-1)), whole, outer)
    outer.forward = lambda x: x + 1  # type: ignore[method-assign]
    with row_invariant.Recorder(model) as watch:
        model(torch.randn(3, 100))
    assert list(watch.modules) == [inner]
    undo = row_invariant.replace(model, [inner, outer])
    assert type(inner) is not Calls
    undo()
    assert type(inner) is Calls
    assert outer.forward(1) == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Unasked:
    """In the place of a `Probe` that takes whatever it is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def require(self, logits: torch.Tensor) -> None: ...


@pytest.mark.parametrize("name", ALL)
def test_no_architecture_calls_an_operator_nobody_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is fused here, so that the modules call all that they ever may; nor is anything proved."""
    called: set[str] = set()

    class Noting(row_invariant._RecordingMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.overloadpacket.__name__)
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(row_invariant, "_RecordingMode", Noting)
    monkeypatch.setattr("quire.model.fused.fuse", lambda *_: Fused())
    monkeypatch.setattr(sys.modules["quire.model.prepare"], "Probe", Unasked)
    monkeypatch.setattr(sys.modules["quire.model.prepare"], "check_generate", lambda *_: None)
    PreparedModel(load((tiny(name), None)), backend="native").restore()
    looked_at = ROUNDED_ONCE | MOVES | set(MEASURED)
    looked_at |= {
        p.__name__ for p in (*row_invariant._FUNCTIONS, *row_invariant._PRODUCTS, *row_invariant._SPREADS)
    }
    looked_at |= {p.__name__ for p in row_invariant._MADE_OF_PRODUCTS}
    assert called <= looked_at


@pytest.mark.parametrize(
    "function", [torch.exp, torch.sigmoid, F.softplus], ids=lambda function: function.__name__
)
def test_on_whole_vectors_an_element_has_one_value(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for width in (1, 5, 48, 64, 100):
        x = torch.randn(7, width) * 4
        whole = row_invariant.on_whole_vectors(function, x)
        assert whole.shape == x.shape
        assert torch.allclose(whole, function(x), rtol=1e-6)
        with row_invariant.Recorder(nn.Module()) as watch:
            again = row_invariant.on_whole_vectors(function, x)
        assert not watch.modules
        assert same_bits(again, whole)
        for row in range(7):
            assert same_bits(row_invariant.on_whole_vectors(function, x[row, None])[0], whole[row])
            strided = row_invariant.on_whole_vectors(function, x.t()[:, row])
            assert same_bits(strided, whole[row])
