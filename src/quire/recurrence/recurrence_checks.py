"""Checks of both backends before they touch memory: one clear error, and no change.

The rows, slots and checkpoints of a step are checked once, by `recurrence_step`, for callers other than the engine;
the engine makes its steps from plans.

Cost: some us of comparisons. The native backend runs them only after the extension has refused a call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise

import torch

from quire.errors import ArgumentError
from quire.step import RecurrenceStep

__all__ = [
    "FLOATS",
    "check_delta_rule",
    "check_linear_attention",
    "check_mamba1",
    "check_mamba2",
    "check_rg_lru",
    "check_short_convolution",
    "recurrence_step",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 8  # of a short convolution

Shape = tuple[int, ...]


def recurrence_step(
    starts: Iterable[int] | torch.Tensor,
    slots: Iterable[int] | torch.Tensor,
    checkpoints: Iterable[tuple[int, int]] = (),
    *,
    positions: torch.Tensor | None = None,
) -> RecurrenceStep:
    """A step for callers of recurrences or mixers by themselves; see `RecurrenceStep` for the arguments.

    Raises:
        ArgumentError: rows that do not rise from 0, slots that are not distinct, a checkpoint outside the rows, or
            positions that are not one int64 for each row.
    """
    pairs = [_whole_numbers("a checkpoint", pair) for pair in checkpoints]
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(f"expected checkpoints as pairs (row, slot), got {pairs}")
    step = RecurrenceStep(
        _whole_numbers("starts", starts),
        _whole_numbers("slots", slots),
        tuple(sorted((row, slot) for row, slot in pairs)),
        positions,
    )
    _check_step(step)
    return step


def _check_step(step: RecurrenceStep) -> None:
    starts, slots = step.starts, step.slots
    if not slots or len(starts) != len(slots) + 1:
        raise ArgumentError(
            f"expected at least one sequence, and one start more than slots, got {len(starts)} starts and "
            f"{len(slots)} slots"
        )
    if starts[0] != 0 or starts[-1] >= 1 << 63 or any(stop <= start for start, stop in pairwise(starts)):
        raise ArgumentError(f"expected starts that rise from 0 by at least 1, got {starts}")
    written = step.written_slots
    if min(written) < 0 or max(written) >= 1 << 63 or len(set(written)) != len(written):
        raise ArgumentError(
            f"expected slots of 0 to 2^63 - 1, all distinct, those of checkpoints included, got {slots} and "
            f"checkpoints {step.checkpoints}"
        )
    rows = [row for row, _ in step.checkpoints]
    if rows and (rows[0] < 0 or rows[-1] >= starts[-1]):
        raise ArgumentError(f"expected checkpoints at rows of 0 to {starts[-1] - 1}, got {step.checkpoints}")
    positions = step.positions
    if positions is not None and (positions.shape != (step.num_rows,) or positions.dtype != torch.int64):
        raise ArgumentError(
            f"expected positions as int64 {[step.num_rows]}, got {positions.dtype} {list(positions.shape)}"
        )


def _whole_numbers(name: str, values: Iterable[int] | torch.Tensor) -> tuple[int, ...]:
    try:
        listed = values.tolist() if isinstance(values, torch.Tensor) else values
        return tuple(operator.index(value) for value in listed)
    except TypeError:
        raise ArgumentError(f"expected {name} as a list of whole numbers, got {values!r}") from None


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
    """Checks the arguments of `mamba1`."""
    channels, size = _check_state("state", state, step, ("channels", "state_size"))
    rows = step.num_rows
    _check_floats("x", x, (rows, channels))
    _check_floats("dt", dt, (rows, channels))
    _check_floats("a", a, (channels, size))
    _check_floats("b", b, (rows, size), x.dtype)
    _check_floats("c", c, (rows, size), x.dtype)
    if d is not None:
        _check_floats("d", d, (channels,))
    _check_out(out, x.dtype, (rows, channels))


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
    """Checks the arguments of `mamba2`."""
    heads, head_dim, size = _check_state("state", state, step, ("num_heads", "head_dim", "state_size"))
    rows = step.num_rows
    _check_floats("x", x, (rows, heads, head_dim))
    _check_floats("dt", dt, (rows, heads))
    _check_floats("a", a, (heads,))
    groups = _shared_heads("b", b, heads)
    _check_floats("b", b, (rows, groups, size), x.dtype)
    _check_floats("c", c, (rows, groups, size), x.dtype)
    if d is not None:
        _check_floats("d", d, (heads,))
    _check_out(out, x.dtype, (rows, heads, head_dim))


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
    """Checks the arguments of `delta_rule`."""
    heads, k_dim, v_dim = _check_state("state", state, step, ("num_v_heads", "k_dim", "v_dim"))
    rows = step.num_rows
    _check_floats("v", v, (rows, heads, v_dim))
    k_heads = _shared_heads("q", q, heads)
    _check_floats("q", q, (rows, k_heads, k_dim), v.dtype)
    _check_floats("k", k, (rows, k_heads, k_dim), v.dtype)
    _check_floats("g", g, (rows, heads, k_dim) if g.dim() == 3 else (rows, heads))
    _check_floats("beta", beta, (rows, heads))
    _check_out(out, v.dtype, (rows, heads, v_dim))


def check_linear_attention(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """Checks the arguments of `linear_attention`."""
    heads, k_dim, v_dim = _check_state("state", state, step, ("num_heads", "k_dim", "v_dim"))
    rows = step.num_rows
    _check_floats("v", v, (rows, heads, v_dim))
    _check_floats("q", q, (rows, heads, k_dim), v.dtype)
    _check_floats("k", k, (rows, heads, k_dim), v.dtype)
    _check_floats("g", g, (heads,))
    _check_out(out, v.dtype, (rows, heads, v_dim))


def check_rg_lru(
    state: torch.Tensor,
    x: torch.Tensor,
    log_a: torch.Tensor,
    step: RecurrenceStep,
    first: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Checks the arguments of `rg_lru`."""
    (channels,) = _check_state("state", state, step, ("channels",))
    rows = step.num_rows
    _check_floats("x", x, (rows, channels))
    _check_floats("log_a", log_a, (rows, channels))
    if first is not None and (first.dtype != torch.bool or first.shape != (rows,) or _is_off_host(first)):
        raise ArgumentError(f"expected first as torch.bool [{rows}] on the CPU, got {_describe(first)}")
    _check_out(out, x.dtype, (rows, channels))


def check_short_convolution(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> None:
    """Checks the arguments of `short_convolution`."""
    before, channels = _check_state("state", state, step, ("width - 1", "channels"))
    if before >= MAX_WIDTH:
        raise ArgumentError(
            f"expected a convolution of 2 to {MAX_WIDTH} columns, got a state of {before} previous inputs"
        )
    _check_floats("x", x, (step.num_rows, channels))
    _check_floats("weight", weight, (channels, before + 1))
    if bias is not None:
        _check_floats("bias", bias, (channels,))
    _check_out(out, x.dtype, (step.num_rows, channels))


def _check_state(name: str, state: torch.Tensor, step: RecurrenceStep, sizes: tuple[str, ...]) -> Shape:
    """Checks a state; returns the shape of one slot."""
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


def _check_floats(name: str, tensor: torch.Tensor, shape: Shape, dtype: torch.dtype | None = None) -> None:
    kinds = FLOATS if dtype is None else (dtype,)
    if tensor.dtype not in kinds or tensor.shape != shape or _is_off_host(tensor):
        raise ArgumentError(
            f"expected {name} as {' or '.join(map(str, kinds))} {list(shape)} on the CPU, got {_describe(tensor)}"
        )


def _shared_heads(name: str, tensor: torch.Tensor, num_heads: int) -> int:
    """The number of heads of a tensor whose heads each serve several of `num_heads`."""
    count = tensor.shape[1] if tensor.dim() == 3 else 0
    if count == 0 or num_heads % count:
        raise ArgumentError(
            f"expected {name} [num_rows, heads, size] with a number of heads that divides {num_heads}, got "
            f"{_describe(tensor)}"
        )
    return count


def _check_out(out: torch.Tensor | None, dtype: torch.dtype, shape: Shape) -> None:
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
