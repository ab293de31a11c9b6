"""Checks of one argument of a recurrence, before memory is touched: one clear error, and no change.

The rows, slots and checkpoints of a step are checked once, by `recurrence_step`, for callers other than the engine;
the engine makes its steps from plans.

Cost: about 1 us an argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise

import torch

from quire.errors import ArgumentError
from quire.step import RecurrenceStep

__all__ = [
    "check_floats",
    "check_is_bool",
    "check_out",
    "check_place",
    "check_state",
    "num_shared_heads",
    "recurrence_step",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

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


def check_state(state: torch.Tensor, step: RecurrenceStep, sizes: tuple[str, ...]) -> Shape:
    """Checks a state whose slots have these sizes; returns the shape of one slot."""
    if state.dtype != torch.float32 or state.dim() != len(sizes) + 1:
        raise ArgumentError(
            f"expected state as torch.float32 [num_slots, {', '.join(sizes)}], got {_describe(state)}"
        )
    if 0 in state.shape[1:]:
        raise ArgumentError(f"expected state with sizes of 1 or more, got {_describe(state)}")
    one_slot = state.shape[1:].numel()
    strides, dense = state.stride(), torch.empty(state.shape[1:], device="meta").stride()
    inner = [stride for stride, size in zip(strides[1:], state.shape[1:], strict=True) if size > 1]
    expected = [stride for stride, size in zip(dense, state.shape[1:], strict=True) if size > 1]
    if inner != expected or (len(state) > 1 and strides[0] < one_slot):
        raise ArgumentError(
            f"expected state with contiguous slots that do not overlap, got strides {strides} for "
            f"{tuple(state.shape)}; use state.contiguous() when it is made"
        )
    if max(step.written_slots) >= len(state):
        raise ArgumentError(f"expected slots of 0 to {len(state) - 1}, got {max(step.written_slots)}")
    return tuple(state.shape[1:])


def check_floats(
    name: str, tensor: torch.Tensor | None, shape: Shape, dtype: torch.dtype | None = None
) -> None:
    """Checks an input of this shape; of any float type if `dtype` is None. None is an optional input left out."""
    if tensor is None:
        return
    kinds = _FLOATS if dtype is None else (dtype,)
    if tensor.dtype not in kinds or tensor.shape != shape:
        raise ArgumentError(
            f"expected {name} as {' or '.join(map(str, kinds))} {list(shape)}, got {_describe(tensor)}"
        )


def check_is_bool(name: str, tensor: torch.Tensor | None, shape: Shape) -> None:
    """Checks an optional input of booleans."""
    if tensor is not None and (tensor.dtype != torch.bool or tensor.shape != shape):
        raise ArgumentError(f"expected {name} as torch.bool {list(shape)}, got {_describe(tensor)}")


def num_shared_heads(name: str, tensor: torch.Tensor, num_heads: int) -> int:
    """The number of heads of a tensor whose heads each serve several of `num_heads`."""
    count = tensor.shape[1] if tensor.dim() == 3 else 0
    if count == 0 or num_heads % count:
        raise ArgumentError(
            f"expected {name} [num_rows, heads, size] with a number of heads that divides {num_heads}, got "
            f"{_describe(tensor)}"
        )
    return count


def check_place(name: str, argument: object, place: torch.device) -> None:
    """Checks that an argument, if it is a tensor, is on the device of the state."""
    if isinstance(argument, torch.Tensor) and argument.device != place:
        raise ArgumentError(f"expected {name} on {place}, where the state is, got {_describe(argument)}")


def check_out(out: torch.Tensor | None, dtype: torch.dtype, shape: Shape) -> None:
    """Checks the tensor for the result, None if there is none yet."""
    if out is None:
        return
    if out.dtype != dtype or out.shape != shape or not out.is_contiguous():
        raise ArgumentError(
            f"expected out as contiguous {dtype} {list(shape)}, got {_describe(out)} with strides "
            f"{out.stride()}"
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
