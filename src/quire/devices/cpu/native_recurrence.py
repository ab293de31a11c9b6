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
from quire.recurrence import (
    CausalConvolution,
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    Recurrence,
)
from quire.step import RecurrenceStep

__all__ = ["BACKEND", "KERNELS", "NativeRecurrence", "handle_of"]


class NativeRecurrence:
    """The extension's kernels; see `quire.recurrence.RecurrenceBackend`."""

    def compute(
        self, call: Recurrence, step: RecurrenceStep, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = call.rows
        try:
            if rows.shape[:1] != (step.num_rows,):
                raise ValueError(f"expected {step.num_rows} rows, got {list(rows.shape)}")
            target = torch.empty(rows.shape, dtype=rows.dtype) if out is None else out
            KERNELS[type(call)](handle_of(step), call, target)
        except ValueError as error:
            call.check(step, out)
            raise ArgumentError(str(error)) from None
        return target


def _scan(handle: Any, call: Mamba1Scan | Mamba2Scan, target: torch.Tensor) -> None:
    num_dims = 3 if type(call) is Mamba1Scan else 4
    _expect(call.state.dim() == num_dims and (call.d is None or call.d.dim() == 1))
    _native.recurrent_scan(
        handle,
        call.state,
        _dense_rows(call.x),
        _to_float32(call.dt),
        _to_float32(call.a).contiguous(),
        _dense_rows(call.b),
        _dense_rows(call.c),
        None if call.d is None else _to_float32(call.d).contiguous(),
        target,
    )


def _delta_rule(handle: Any, call: DeltaRule, target: torch.Tensor) -> None:
    inputs = _dense_rows(call.q), _dense_rows(call.k), _dense_rows(call.v)
    g, beta = _to_float32(call.g), _to_float32(call.beta)
    _native.recurrent_delta(handle, call.state, *inputs, g, beta, call.scale, call.normalize, target)


def _linear_attention(handle: Any, call: LinearAttention, target: torch.Tensor) -> None:
    _expect(call.q.shape == call.k.shape and call.q.shape[:2] == call.v.shape[:2])
    inputs = _dense_rows(call.q), _dense_rows(call.k), _dense_rows(call.v)
    g = _to_float32(call.g).contiguous()
    _native.recurrent_delta(handle, call.state, *inputs, g, None, call.scale, False, target)


def _real_gated_unit(handle: Any, call: RealGatedUnit, target: torch.Tensor) -> None:
    _expect(call.first is None or (call.first.dtype is torch.bool and call.first.dim() == 1))
    marks = None if call.first is None else call.first.contiguous().view(torch.uint8)
    _native.recurrent_lru(handle, call.state, _dense_rows(call.x), _to_float32(call.log_a), marks, target)


def _causal_convolution(handle: Any, call: CausalConvolution, target: torch.Tensor) -> None:
    _expect(call.bias is None or call.bias.dim() == 1)
    bias = None if call.bias is None else _to_float32(call.bias).contiguous()
    columns = _to_float32(call.weight).contiguous()
    _native.short_convolution(handle, call.state, _dense_rows(call.x), columns, bias, call.silu, target)


KERNELS: dict[type[Recurrence], Callable[[Any, Any, torch.Tensor], None]] = {
    Mamba1Scan: _scan,
    Mamba2Scan: _scan,
    DeltaRule: _delta_rule,
    LinearAttention: _linear_attention,
    RealGatedUnit: _real_gated_unit,
    CausalConvolution: _causal_convolution,
}


def _expect(has_kernel_shape: bool) -> None:
    """Refuses shapes that the extension would accept with another meaning; `Recurrence.check` then has the message."""
    if not has_kernel_shape:
        raise ValueError("unfit arguments")


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
