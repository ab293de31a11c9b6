"""The recurrences in torch, token by token in float32: the definition, and the backend of the device `python`.

Slow: each token takes several torch operators. Tests compare every kernel with it.

Cost: about 50 us a token and sequence in addition to the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.recurrence.recurrences import (
    CausalConvolution,
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    Recurrence,
)
from quire.step import RecurrenceStep

__all__ = ["BACKEND", "DEFINITIONS", "ReferenceRecurrence"]

NORM_EPSILON = 1e-6  # of the norm of q and k in `DeltaRule`

Advance = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class ReferenceRecurrence:
    """The definition of each recurrence; see `quire.recurrence.recurrence_backend.RecurrenceBackend`."""

    @torch.no_grad()
    def compute(
        self, call: Recurrence, step: RecurrenceStep, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        call.check(step, out)
        out = torch.empty_like(call.rows, memory_format=torch.contiguous_format) if out is None else out
        return _each_row(call.state, step, out, DEFINITIONS[type(call)](call))


def _mamba1(call: Mamba1Scan) -> Advance:
    x, dt, a, b, c = call.x.float(), call.dt.float(), call.a.float(), call.b.float(), call.c.float()
    skip = None if call.d is None else call.d.float()

    def advance(h: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        decay = torch.exp(dt[row, :, None] * a)  # [channels, state_size]
        h = decay * h + (dt[row] * x[row])[:, None] * b[row]
        y = (h * c[row]).sum(-1)
        return h, y if skip is None else y + skip * x[row]

    return advance


def _mamba2(call: Mamba2Scan) -> Advance:
    x, dt, a = call.x.float(), call.dt.float(), call.a.float()
    b, c = (_repeat_heads(tensor.float(), x.shape[1]) for tensor in (call.b, call.c))
    skip = None if call.d is None else call.d.float()

    def advance(h: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        decay = torch.exp(dt[row] * a)[:, None, None]
        h = decay * h + (dt[row, :, None] * x[row])[:, :, None] * b[row][:, None, :]
        y = (h * c[row][:, None, :]).sum(-1)  # [num_heads, head_dim]
        return h, y if skip is None else y + skip[:, None] * x[row]

    return advance


def _delta_rule(call: DeltaRule) -> Advance:
    q, k = call.q.float(), call.k.float()
    if call.normalize:
        q, k = (
            tensor / torch.sqrt((tensor * tensor).sum(-1, keepdim=True) + NORM_EPSILON) for tensor in (q, k)
        )
    v, g, beta = call.v.float(), call.g.float(), call.beta.float()
    q, k = _repeat_heads(q, v.shape[1]) * call.scale, _repeat_heads(k, v.shape[1])
    decay = torch.exp(g if g.dim() == 3 else g[:, :, None])  # [num_rows, num_v_heads, k_dim or 1]

    def advance(s: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = decay[row][:, :, None] * s
        known = (k[row][:, :, None] * s).sum(1)  # [num_v_heads, v_dim]
        change = beta[row][:, None] * (v[row] - known)
        s = s + k[row][:, :, None] * change[:, None, :]
        return s, (q[row][:, :, None] * s).sum(1)

    return advance


def _linear_attention(call: LinearAttention) -> Advance:
    q, k, v = call.q.float() * call.scale, call.k.float(), call.v.float()
    decay = torch.exp(call.g.float())[:, None, None]

    def advance(s: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = decay * s + k[row][:, :, None] * v[row][:, None, :]
        return s, (q[row][:, :, None] * s).sum(1)

    return advance


def _real_gated_unit(call: RealGatedUnit) -> Advance:
    x, log_a = call.x.float(), call.log_a.float()
    is_first = [False] * len(x) if call.first is None else call.first.tolist()

    def advance(h: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if is_first[row]:
            return x[row].clone(), x[row]
        # expm1: if a is nearly 1, 1 - a^2 loses most of its digits.
        h = torch.exp(log_a[row]) * h + torch.sqrt(-torch.expm1(2 * log_a[row])) * x[row]
        return h, h

    return advance


def _causal_convolution(call: CausalConvolution) -> Advance:
    x, columns = call.x.float(), call.weight.float().t()  # [width, channels]
    bias = None if call.bias is None else call.bias.float()

    def advance(before: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([before, x[row][None]])  # [width, channels]
        y = (columns * window).sum(0)
        if bias is not None:
            y = y + bias
        return window[1:], torch.nn.functional.silu(y) if call.silu else y

    return advance


DEFINITIONS: dict[type[Recurrence], Callable[[Any], Advance]] = {
    Mamba1Scan: _mamba1,
    Mamba2Scan: _mamba2,
    DeltaRule: _delta_rule,
    LinearAttention: _linear_attention,
    RealGatedUnit: _real_gated_unit,
    CausalConvolution: _causal_convolution,
}


def _each_row(state: torch.Tensor, step: RecurrenceStep, out: torch.Tensor, advance: Advance) -> torch.Tensor:
    """Calls `advance` for each row of each sequence: from a state and a row it makes the next state and the result."""
    for slot, rows in step.sequences():
        current = state[slot].clone()
        for row in rows:
            current, y = advance(current, row)
            out[row] = y.to(out.dtype)
            for checkpoint in step.checkpoints_after(row):
                state[checkpoint] = current
        state[slot] = current
    return out


def _repeat_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[rows, heads, size] -> [rows, num_heads, size], each head repeated for the heads that it serves."""
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


BACKEND = ReferenceRecurrence()
