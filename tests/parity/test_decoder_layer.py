"""The fused halves of a decoder layer against the same operators written out in torch, for every variant that runs
here; and the emulated AVX-512 row operators against the real ones, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from support.variants import needs_emulated
from torch.nn import functional as F

from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.devices.cpu.native_attention import handles
from quire.devices.cpu.packed_weights import NativeWeight
from quire.memory.view import KVView

_native = pytest.importorskip("quire._native")

ISAS = _native.supported_isas()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}
CASES = [
    (isa, dtype) for isa in ISAS for dtype in DTYPES if "emulated" not in isa or dtype is not torch.float16
]
each_variant = pytest.mark.parametrize(("isa", "dtype"), CASES)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got.float() - want).norm() <= TOLERANCE[got.dtype] * want.norm())


class Norm:
    """A native norm and its twin."""

    def __init__(self, kind: str, width: int, seed: int, bias: bool = False) -> None:
        self.kind, self.width = kind, width
        self.weight, self.bias = random(width, seed=seed), random(width, seed=seed + 1) if bias else None
        self.native = _native.Norm(kind, self.weight, self.bias, 1e-5)

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), self.weight, self.bias, 1e-5)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def mlp(
    isa: str, dtype: torch.dtype, hidden: int, inner: int, activation: str, *, gated: bool, merged: bool,
    before: Norm | None, after: Norm | None, scale: float | None, rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the native block and its twin make of random rows."""
    gate, up = (
        random(inner, hidden, dtype=dtype, seed=1) / hidden**0.5,
        random(inner, hidden, dtype=dtype, seed=2),
    )
    down, bias = random(hidden, inner, dtype=dtype, seed=3) / inner**0.5, random(hidden, dtype=dtype, seed=4)
    dense = [torch.cat([gate, up])] if gated and merged else [gate, up] if gated else [gate]
    weights = [NativeWeight(weight, isa) for weight in dense]
    output = NativeWeight(down, isa)
    block = _native.MlpBlock(
        _native.Surroundings(before and before.native, after and after.native, scale),
        [(weight.native, None) for weight in weights], gated, activation, output.native, bias,
    )  # fmt: skip
    x = random(rows, hidden, dtype=dtype, seed=rows)
    out = torch.full_like(x, float("nan"))
    block.run(x, out)
    y = x.float() if before is None else before.twin(x.float())
    inside = ACTIVATIONS[activation](y @ gate.float().T)
    y = (inside * (y @ up.float().T) if gated else inside) @ down.float().T + bias.float()
    y = y if after is None else after.twin(y)
    return out, y if scale is None else x.float() + scale * y


@each_variant
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(isa: str, dtype: torch.dtype, activation: str) -> None:
    got, want = mlp(isa, dtype, 100, 73, activation, gated=True, merged=False, before=None, after=None,
                    scale=None, rows=3)  # fmt: skip
    assert close(got, want)


@each_variant
def test_mlp_with_norms_and_residual(isa: str, dtype: torch.dtype) -> None:
    for merged, gated, before, after in (
        (True, True, Norm("rms", 57, 5), None),
        (False, False, Norm("layer", 57, 6, bias=True), Norm("rms", 57, 8)),
        (False, True, None, Norm("layer", 57, 9)),
    ):
        got, want = mlp(isa, dtype, 57, 41, "silu", gated=gated, merged=merged, before=before, after=after,
                        scale=0.5, rows=17)  # fmt: skip
        assert close(got, want), (merged, gated)


@pytest.mark.parametrize("merged", [False, True])
def test_mlp_of_more_rows_than_a_pass(merged: bool) -> None:
    got, want = mlp(_native.isa(), torch.float32, 32, 24, "gelu", gated=True, merged=merged,
                    before=Norm("rms", 32, 1), after=None, scale=1.0, rows=1001)  # fmt: skip
    assert close(got, want)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: str) -> torch.Tensor:
    """x [T, heads, width] in float32; cos, sin [T, table width]."""
    if rotation == "none":
        return x
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    width = cos.shape[-1] * (2 if rotation == "halves_short_table" else 1)
    x, rest = x[..., :width], x[..., width:]
    if rotation == "halves_short_table":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if rotation == "pairs_half_table":
        cos, sin = (table[..., : width // 2].repeat_interleave(2, -1) for table in (cos, sin))
    if rotation.startswith("halves"):
        other = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    else:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return torch.cat([x * cos + other * sin, rest], -1)


@each_variant
@pytest.mark.parametrize("rotation", ["halves", "halves_short_table", "pairs", "pairs_half_table", "none"])
def test_attention(isa: str, dtype: torch.dtype, rotation: str) -> None:
    """Two sequences, a merged or three products, a norm over heads or over all of them, values of two widths;
    KV poisoned with NaN."""
    if isa != _native.isa() and dtype is torch.bfloat16:
        pytest.skip("the attention inside runs as the variant in use; its products of pairs take whole pairs")
    hidden, heads, kv_heads, width, tokens = 60, 6, 2, 24, 7
    merged = rotation in ("halves_short_table", "pairs", "none")
    whole = rotation in ("pairs", "pairs_half_table")
    v_width = 16 if rotation in ("pairs_half_table", "none") else width
    split = [heads * width, kv_heads * width, kv_heads * v_width]
    all_width = sum(split)
    qkv = random(all_width, hidden, dtype=dtype, seed=1) / hidden**0.5
    bias = random(all_width, dtype=dtype, seed=2)
    pieces = [all_width] if merged else split
    weights = [NativeWeight(weight.contiguous(), isa) for weight in qkv.split(pieces)]
    biases = [piece.contiguous() for piece in bias.split(pieces)]
    output = NativeWeight(random(hidden, heads * v_width, dtype=dtype, seed=3) / 12, isa)
    before = Norm("rms", hidden, 4)
    q_norm = Norm("rms", width * (heads if whole else 1), 5)
    k_norm = Norm("rms", width * (kv_heads if whole else 1), 6)
    block = _native.AttentionBlock(
        _native.Surroundings(before.native, None, 1.0),
        [(weight.native, piece) for weight, piece in zip(weights, biases, strict=True)],
        q_norm.native, k_norm.native, not whole, rotation, output.native, None, heads,
    )  # fmt: skip
    pool = torch.full((8, kv_heads, 4, width + v_width), float("nan"), dtype=dtype)
    view = KVView(pool[..., :width], pool[..., width:], 4)
    plan = attention_batch([0, 4, tokens], [4, 3], torch.tensor([[5, -1], [2, -1]], dtype=torch.int32), 4)
    slots = torch.tensor([20, 21, 22, 23, 8, 9, 10])
    options = AttentionOptions(scale=width**-0.5)
    table_width = {"halves": 16, "halves_short_table": 12, "pairs": 24, "pairs_half_table": 16, "none": 16}[
        rotation
    ]
    angle = torch.rand(tokens, table_width, generator=torch.Generator().manual_seed(9)) * 6
    if rotation == "halves":
        angle = torch.cat([angle[:, : table_width // 2]] * 2, -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x = random(tokens, hidden, dtype=dtype, seed=7)
    out = torch.full_like(x, float("nan"))
    block.run(*handles(view, plan, options), slots, cos, sin, x, out)

    q, k, v = (before.twin(x.float()) @ qkv.float().T + bias.float()).split(split, -1)
    shaped = (q_norm.twin(q) if whole else q).view(tokens, heads, width)
    q = turned(shaped if whole else q_norm.twin(shaped), cos, sin, rotation)
    shaped = (k_norm.twin(k) if whole else k).view(tokens, kv_heads, width)
    k = turned(shaped if whole else k_norm.twin(shaped), cos, sin, rotation)
    twin_pool = torch.full(pool.shape, float("nan"))
    twin_view = KVView(twin_pool[..., :width], twin_pool[..., width:], 4)
    reference_attention.write(twin_view, k, v.view(tokens, kv_heads, v_width), slots)
    attended = reference_attention.run(twin_view, q, plan, options).flatten(1)
    assert close(out, x.float() + attended @ output.unpack().float().T)
    written = twin_pool.isfinite()
    assert torch.equal(pool.isfinite(), written)
    assert close(pool[written], twin_pool[written])


@pytest.mark.skipif(
    "avx512" not in ISAS, reason="this processor has no AVX-512 to compare the emulation with"
)
@needs_emulated
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_emulated_row_operators_give_the_real_ones_bits(activation: str) -> None:
    for dtype in DTYPES:
        real, emulated = (
            mlp(isa, dtype, 57, 41, activation, gated=True, merged=True, before=Norm("layer", 57, 6, bias=True),
                after=Norm("rms", 57, 8), scale=0.5, rows=5)[0]
            for isa in ("avx512", "emulated_avx512")
        )  # fmt: skip
        assert torch.equal(real.view(torch.uint8), emulated.view(torch.uint8))


def argmax(isa: str, x: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    rows = x.shape[0]
    indices, best = torch.full((rows,), -7), torch.full((rows,), float("nan"))
    _native.argmax_rows(x, indices, best, isa)
    return indices.tolist(), best


@each_variant
def test_argmax(isa: str, dtype: torch.dtype) -> None:
    infinity = float("inf")
    for width in (1, 3, 16, 17, 1023, 1024, 3001):
        x = random(5, width, dtype=dtype, seed=width)
        x[1] = x[1].abs().neg() - 1  # all below zero
        x[2] = -infinity
        x[2, width // 2] = -5.0
        x[3] = 2.0  # a tie: the first
        indices, best = argmax(isa, x)
        want = x.float().max(dim=1)
        assert torch.equal(best, want.values)
        assert indices == [
            int((row == top).nonzero()[0]) for row, top in zip(x.float(), want.values, strict=True)
        ]
        x[0, width - 1] = infinity
        x[4, width // 3] = float("nan")
        x[2] = -infinity
        indices, best = argmax(isa, x)
        assert (indices[0], indices[4], indices[2]) == (width - 1, width // 3, 0)
        assert best[0] == infinity
        assert best[4].isnan()
        assert best[2] == -infinity


def test_a_slot_outside_is_refused_before_anything_is_written() -> None:
    weight = NativeWeight(random(24, 8), None)
    output = NativeWeight(random(8, 8), None)
    block = _native.AttentionBlock(
        _native.Surroundings(None, None, None),
        [(weight.native, None)],
        None,
        None,
        True,
        "none",
        output.native,
        None,
        1,
    )
    pool = torch.full((2, 1, 2, 4, 8), float("nan"))
    view = KVView(pool[:, :, 0], pool[:, :, 1], 4)
    plan = attention_batch([0, 2], [2], torch.tensor([[0]], dtype=torch.int32), 4)
    slots, x, out = torch.tensor([0, 8]), random(2, 8), torch.zeros(2, 8)
    arguments = (*handles(view, plan, AttentionOptions(scale=1.0)), slots, None, None, x)
    with pytest.raises(ValueError, match="expected slots of 0 to 7, got 8"):
        block.run(*arguments, out)
    assert pool.isnan().all()
    assert not out.any()


def test_parts_that_do_not_fit_are_refused() -> None:
    around = _native.Surroundings(None, None, None)
    up, down = NativeWeight(random(12, 8), None), NativeWeight(random(8, 10), None)
    with pytest.raises(ValueError, match="another width than the output takes"):
        _native.MlpBlock(around, [(up.native, None)], False, "silu", down.native, None)
    with pytest.raises(ValueError, match="expected one of silu, gelu"):
        _native.MlpBlock(around, [(up.native, None)], False, "swish", down.native, None)
