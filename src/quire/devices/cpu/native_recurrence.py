"""The recurrences in C++ (native/kernels): the same contract as `reference_recurrence`, at the speed of the memory.

Not here: the arithmetic, and the division of a call among threads.

Tensors are passed without copies: the extension reads their addresses, shapes and strides, and refuses unfit ones. The
`RecurrenceStep` stores its handle. Inputs much smaller than the states (decays, parameters) are converted to float32
here.

Cost: about 5 us a call in addition to the work, and 2 us to allocate `out`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire import _native
from quire.errors import ArgumentError
from quire.recurrence.recurrence_checks import (
    check_delta_rule,
    check_linear_attention,
    check_mamba1,
    check_mamba2,
    check_rg_lru,
    check_short_convolution,
)
from quire.step import RecurrenceStep

__all__ = ["BACKEND", "NativeRecurrence", "handle_of"]


class NativeRecurrence:
    """The extension's kernels; `quire.recurrence.recurrence_backend.RecurrenceBackend` describes the arguments."""

    name = "native"

    def mamba1(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        step: RecurrenceStep,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def check() -> None:
            check_mamba1(state, x, dt, a, b, c, d, step, out)

        return _scan(3, check, state, x, dt, a, b, c, d, step, out)

    def mamba2(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        step: RecurrenceStep,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def check() -> None:
            check_mamba2(state, x, dt, a, b, c, d, step, out)

        return _scan(4, check, state, x, dt, a, b, c, d, step, out)

    def delta_rule(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        step: RecurrenceStep,
        *,
        scale: float,
        normalize: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def run(handle: Any, target: torch.Tensor) -> None:
            inputs = _dense_rows(q), _dense_rows(k), _dense_rows(v)
            _native.recurrent_delta(
                handle, state, *inputs, _to_float32(g), _to_float32(beta), scale, normalize, target
            )

        return _run(run, lambda: check_delta_rule(state, q, k, v, g, beta, step, out), step, v, out)

    def linear_attention(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        step: RecurrenceStep,
        *,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def check() -> None:
            check_linear_attention(state, q, k, v, g, step, out)

        def run(handle: Any, target: torch.Tensor) -> None:
            if q.shape != k.shape or q.shape[:2] != v.shape[:2]:
                check()
            inputs = _dense_rows(q), _dense_rows(k), _dense_rows(v)
            _native.recurrent_delta(
                handle, state, *inputs, _to_float32(g).contiguous(), None, scale, False, target
            )

        return _run(run, check, step, v, out)

    def rg_lru(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        log_a: torch.Tensor,
        step: RecurrenceStep,
        *,
        first: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def check() -> None:
            check_rg_lru(state, x, log_a, step, first, out)

        def run(handle: Any, target: torch.Tensor) -> None:
            if first is not None and (first.dtype is not torch.bool or first.dim() != 1):
                check()
            marks = None if first is None else first.contiguous().view(torch.uint8)
            _native.recurrent_lru(handle, state, _dense_rows(x), _to_float32(log_a), marks, target)

        return _run(run, check, step, x, out)

    def short_convolution(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        step: RecurrenceStep,
        *,
        silu: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def check() -> None:
            check_short_convolution(state, x, weight, bias, step, out)

        def run(handle: Any, target: torch.Tensor) -> None:
            if bias is not None and bias.dim() != 1:
                check()
            added = None if bias is None else _to_float32(bias).contiguous()
            columns = _to_float32(weight).contiguous()
            _native.short_convolution(handle, state, _dense_rows(x), columns, added, silu, target)

        return _run(run, check, step, x, out)


def _scan(
    num_dims: int,
    check: Callable[[], None],
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    step: RecurrenceStep,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The scan of Mamba 1 (a state of 3 dimensions) or Mamba 2 (4)."""

    def run(handle: Any, target: torch.Tensor) -> None:
        if state.dim() != num_dims or (d is not None and d.dim() != 1):
            check()
        skip = None if d is None else _to_float32(d).contiguous()
        inputs = _dense_rows(x), _to_float32(dt), _to_float32(a).contiguous(), _dense_rows(b), _dense_rows(c)
        _native.recurrent_scan(handle, state, *inputs, skip, target)

    return _run(run, check, step, x, out)


def _run(
    run: Callable[[Any, torch.Tensor], None],
    check: Callable[[], None],
    step: RecurrenceStep,
    like: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Calls `run` with the kernels' handle of the step and an output tensor of the shape and type of `like`."""
    if like.shape[:1] != (step.num_rows,):
        check()
    target = torch.empty(like.shape, dtype=like.dtype) if out is None else out
    try:
        run(handle_of(step), target)
    except ValueError as error:
        check()
        raise ArgumentError(str(error)) from None
    return target


def handle_of(step: RecurrenceStep) -> Any:
    """The kernels' handle of the step, which the step stores."""
    if step.native_handle is not None:
        return step.native_handle
    rows, slots = ([pair[i] for pair in step.checkpoints] for i in (0, 1))
    step.native_handle = _native.RecurrenceStep(
        torch.tensor(step.starts, dtype=torch.int64),
        torch.tensor(step.slots, dtype=torch.int64),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
    )
    return step.native_handle


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride()[-1:] == (1,) else tensor.contiguous()


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 with a contiguous last dimension; the kernels refuse unsupported types, which stay."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return _dense_rows(tensor)


BACKEND = NativeRecurrence()
