"""Small Triton kernels whose compiled form is known: the judge of kernels is judged by them (test_kernel_table.py)."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from quire.devices.cuda.kernel_variants import KernelVariant


def scale(x, out, num_rows, BLOCK: tl.constexpr):  # noqa: N803
    """out [num_rows, BLOCK] = 2 x, a program a row."""
    row = tl.program_id(0).to(tl.int64)
    offsets = row * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    values = tl.load(x + offsets, mask=mask, other=0.0)
    tl.store(out + offsets, (values.to(tl.float32) * 2).to(values.dtype), mask=mask)


scale_kernel = triton.jit(scale, do_not_specialize=["num_rows"])
unaligned_scale_kernel = triton.jit(scale, do_not_specialize=["num_rows", "x", "out"])


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(x, weight, out, num_rows, K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """out [num_rows, N] = x [num_rows, K] @ weight [N, K].T, in tiles of BLOCK x BLOCK; BLOCK divides N and K."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    mask = rows[:, None] < num_rows
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        a = tl.load(x + rows[:, None] * K + start + inner[None, :], mask=mask, other=0.0)
        b = tl.load(weight + columns[None, :] * K + start + inner[:, None])
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


def _scale(dtype: str, block: int) -> KernelVariant:
    return KernelVariant(
        scale_kernel,
        f"scale_{dtype}_{block}",
        {"x": f"*{dtype}", "out": f"*{dtype}", "num_rows": "i32"},
        {"BLOCK": block},
        divisible=("x", "out"),
        promises=("vector_load",),
        tags={"head": block},
    )


def _product(dtype: str, block: int) -> KernelVariant:
    return KernelVariant(
        product_kernel,
        f"product_{dtype}_{block}",
        {"x": f"*{dtype}", "weight": f"*{dtype}", "out": f"*{dtype}", "num_rows": "i32"},
        {"K": 256, "N": 256, "BLOCK": block},
        divisible=("x", "weight", "out"),
        num_stages=3,
        promises=("tensor_core", "async_copy", "vector_load"),
        tags={"head": block},
    )


def variants() -> list[KernelVariant]:
    """All are right on every target."""
    scales = [_scale(dtype, block) for dtype in ("fp32", "fp16", "bf16") for block in (2048, 4096)]
    return scales + [_product(dtype, 64) for dtype in ("fp16", "bf16")]


def spilling() -> list[KernelVariant]:
    """128 x 128 sums in one warp: 512 registers a thread."""
    large = replace(_product("bf16", 128), name="spilling", num_warps=1, num_stages=1, promises=())
    return [replace(large, targets=("sm_90",))]


def large() -> list[KernelVariant]:
    """256 KB of tiles in shared memory."""
    return [replace(_product("bf16", 128), name="large", num_warps=8, num_stages=5, targets=("sm_80",))]


def without_promises() -> list[KernelVariant]:
    """Loads of single elements without divisibility, and no matrix instruction for float32 in ieee precision."""
    loads = replace(_scale("bf16", 2048), kernel=unaligned_scale_kernel, name="single_loads", divisible=())
    product = replace(_product("fp32", 32), name="ieee_product", promises=("tensor_core",))
    return [replace(variant, targets=("sm_90",)) for variant in (loads, product)]


def specialized() -> list[KernelVariant]:
    """A launch would compile them again for pointers that are multiples of 16."""
    return [replace(_scale("bf16", 2048), name="specialized", divisible=("x",))]


def broken() -> list[KernelVariant]:
    """A type that the compiler refuses."""
    variant = _scale("bf16", 2048)
    return [replace(variant, name="broken", constexprs={"BLOCK": 2000}, targets=("sm_90",))]


def twice() -> list[KernelVariant]:
    return [_scale("bf16", 2048), _scale("bf16", 2048)]


def unknown_names() -> list[KernelVariant]:
    variant = _scale("bf16", 2048)
    signature = {name: kind for name, kind in variant.signature.items() if name != "num_rows"}
    return [replace(variant, name="unknown", signature=signature, promises=("speed",))]
