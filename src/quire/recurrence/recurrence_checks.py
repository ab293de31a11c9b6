"""The checks that both backends make of arguments before they touch memory: one clear error, and nothing changed.

Not the step's own checks, which are made once, when it is built.

Cost: some us of comparisons. The native backend runs them only after the extension has refused a call.
"""

from __future__ import annotations

import torch

from quire.errors import ArgumentError
from quire.recurrence.step import RecurrenceStep

__all__ = [
    "FLOATS",
    "check_delta_rule",
    "check_linear_attention",
    "check_mamba1",
    "check_mamba2",
    "check_rg_lru",
    "check_short_convolution",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 8  # of a short convolution

Shape = tuple[int, ...]


def check_mamba1(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """The arguments of `mamba1`."""
    channels, size = _state("state", state, step, ("channels", "state_size"))
    rows = step.num_rows
    _floats("x", x, (rows, channels))
    _floats("dt", dt, (rows, channels))
    _floats("a", a, (channels, size))
    _floats("b", b, (rows, size), x.dtype)
    _floats("c", c, (rows, size), x.dtype)
    if d is not None:
        _floats("d", d, (channels,))
    _out(out, x.dtype, (rows, channels))


def check_mamba2(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """The arguments of `mamba2`."""
    heads, head_dim, size = _state("state", state, step, ("num_heads", "head_dim", "state_size"))
    rows = step.num_rows
    _floats("x", x, (rows, heads, head_dim))
    _floats("dt", dt, (rows, heads))
    _floats("a", a, (heads,))
    groups = _shared_heads("b", b, heads)
    _floats("b", b, (rows, groups, size), x.dtype)
    _floats("c", c, (rows, groups, size), x.dtype)
    if d is not None:
        _floats("d", d, (heads,))
    _out(out, x.dtype, (rows, heads, head_dim))


def check_delta_rule(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """The arguments of `delta_rule`."""
    heads, k_dim, v_dim = _state("state", state, step, ("num_v_heads", "k_dim", "v_dim"))
    rows = step.num_rows
    _floats("v", v, (rows, heads, v_dim))
    k_heads = _shared_heads("q", q, heads)
    _floats("q", q, (rows, k_heads, k_dim), v.dtype)
    _floats("k", k, (rows, k_heads, k_dim), v.dtype)
    _floats("g", g, (rows, heads, k_dim) if g.dim() == 3 else (rows, heads))
    _floats("beta", beta, (rows, heads))
    _out(out, v.dtype, (rows, heads, v_dim))


def check_linear_attention(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """The arguments of `linear_attention`."""
    heads, k_dim, v_dim = _state("state", state, step, ("num_heads", "k_dim", "v_dim"))
    rows = step.num_rows
    _floats("v", v, (rows, heads, v_dim))
    _floats("q", q, (rows, heads, k_dim), v.dtype)
    _floats("k", k, (rows, heads, k_dim), v.dtype)
    _floats("g", g, (heads,))
    _out(out, v.dtype, (rows, heads, v_dim))


def check_rg_lru(
    state: torch.Tensor,
    x: torch.Tensor,
    log_a: torch.Tensor,
    step: RecurrenceStep,
    first: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """The arguments of `rg_lru`."""
    (channels,) = _state("state", state, step, ("channels",))
    rows = step.num_rows
    _floats("x", x, (rows, channels))
    _floats("log_a", log_a, (rows, channels))
    if first is not None and (first.dtype != torch.bool or first.shape != (rows,) or _is_off_host(first)):
        raise ArgumentError(f"expected first as torch.bool [{rows}] on the CPU, got {_describe(first)}")
    _out(out, x.dtype, (rows, channels))


def check_short_convolution(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """The arguments of `short_convolution`."""
    before, channels = _state("state", state, step, ("width - 1", "channels"))
    if before >= MAX_WIDTH:
        raise ArgumentError(
            f"expected a convolution of 2 to {MAX_WIDTH} columns, got a state of {before} inputs before"
        )
    _floats("x", x, (step.num_rows, channels))
    _floats("weight", weight, (channels, before + 1))
    if bias is not None:
        _floats("bias", bias, (channels,))
    _out(out, x.dtype, (step.num_rows, channels))


def _state(name: str, state: torch.Tensor, step: RecurrenceStep, sizes: tuple[str, ...]) -> Shape:
    """The shape of one state."""
    if state.dtype != torch.float32 or state.dim() != len(sizes) + 1 or _is_off_host(state):
        raise ArgumentError(
            f"expected {name} as torch.float32 [num_slots, {', '.join(sizes)}] on the CPU, got {_describe(state)}"
        )
    if 0 in state.shape[1:]:
        raise ArgumentError(f"expected {name} with sizes of 1 or more, got {_describe(state)}")
    one_slot = state.shape[1:].numel()
    strides, dense = state.stride(), torch.empty(state.shape[1:], device="meta").stride()
    inner = [stride for stride, size in zip(strides[1:], state.shape[1:], strict=True) if size > 1]
    expected = [stride for stride, size in zip(dense, state.shape[1:], strict=True) if size > 1]
    if inner != expected or (len(state) > 1 and strides[0] < one_slot):
        raise ArgumentError(
            f"expected {name} with contiguous slots that do not overlap, got strides {strides} for "
            f"{tuple(state.shape)}; use state.contiguous() when it is made"
        )
    if max(step.written_slots) >= len(state):
        raise ArgumentError(f"expected slots of 0 to {len(state) - 1}, got {max(step.written_slots)}")
    return tuple(state.shape[1:])


def _floats(name: str, tensor: torch.Tensor, shape: Shape, dtype: torch.dtype | None = None) -> None:
    kinds = FLOATS if dtype is None else (dtype,)
    if tensor.dtype not in kinds or tensor.shape != shape or _is_off_host(tensor):
        raise ArgumentError(
            f"expected {name} as {' or '.join(map(str, kinds))} {list(shape)} on the CPU, got {_describe(tensor)}"
        )


def _shared_heads(name: str, tensor: torch.Tensor, num_heads: int) -> int:
    """The number of heads of a tensor each of which serves several heads."""
    count = tensor.shape[1] if tensor.dim() == 3 else 0
    if count == 0 or num_heads % count:
        raise ArgumentError(
            f"expected {name} [num_rows, heads, size] with a number of heads that divides {num_heads}, got "
            f"{_describe(tensor)}"
        )
    return count


def _out(out: torch.Tensor | None, dtype: torch.dtype, shape: Shape) -> None:
    if out is None:
        return
    if out.dtype != dtype or out.shape != shape or not out.is_contiguous() or _is_off_host(out):
        raise ArgumentError(
            f"expected out as contiguous {dtype} {list(shape)} on the CPU, got {_describe(out)} with strides "
            f"{out.stride()}"
        )


def _is_off_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
