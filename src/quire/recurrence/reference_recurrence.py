"""The recurrences in torch, token by token in float32: the definition, and the `python` backend.

Slow: each token takes several torch operators. Tests compare every kernel with it.

Cost: about 50 us a token and sequence in addition to the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.recurrence.recurrence_checks import (
    check_delta_rule,
    check_linear_attention,
    check_mamba1,
    check_mamba2,
    check_rg_lru,
    check_short_convolution,
)
from quire.step import RecurrenceStep

__all__ = ["BACKEND", "NORM_EPSILON", "ReferenceRecurrence"]

NORM_EPSILON = 1e-6  # of the norm of q and k in `delta_rule`

Advance = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class ReferenceRecurrence:
    """The definition of each recurrence; `quire.recurrence.recurrence_backend.RecurrenceBackend` describes the
    arguments."""

    name = "python"

    @torch.no_grad()
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
        check_mamba1(state, x, dt, a, b, c, d, step, out)
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        x, dt, a, b, c = x.float(), dt.float(), a.float(), b.float(), c.float()
        skip = None if d is None else d.float()

        def advance(h: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            decay = torch.exp(dt[row, :, None] * a)  # [channels, state_size]
            h = decay * h + (dt[row] * x[row])[:, None] * b[row]
            y = (h * c[row]).sum(-1)
            return h, y if skip is None else y + skip * x[row]

        return _each_row(state, step, out, advance)

    @torch.no_grad()
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
        check_mamba2(state, x, dt, a, b, c, d, step, out)
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        b, c = (_repeat_heads(tensor.float(), x.shape[1]) for tensor in (b, c))
        x, dt, a = x.float(), dt.float(), a.float()
        skip = None if d is None else d.float()

        def advance(h: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            decay = torch.exp(dt[row] * a)[:, None, None]
            h = decay * h + (dt[row, :, None] * x[row])[:, :, None] * b[row][:, None, :]
            y = (h * c[row][:, None, :]).sum(-1)  # [num_heads, head_dim]
            return h, y if skip is None else y + skip[:, None] * x[row]

        return _each_row(state, step, out, advance)

    @torch.no_grad()
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
        check_delta_rule(state, q, k, v, g, beta, step, out)
        out = torch.empty(v.shape, dtype=v.dtype) if out is None else out
        q, k = q.float(), k.float()
        if normalize:
            q, k = (
                tensor / torch.sqrt((tensor * tensor).sum(-1, keepdim=True) + NORM_EPSILON)
                for tensor in (q, k)
            )
        q, k = _repeat_heads(q, v.shape[1]) * scale, _repeat_heads(k, v.shape[1])
        v, g, beta = v.float(), g.float(), beta.float()
        decay = torch.exp(g if g.dim() == 3 else g[:, :, None])  # [num_rows, num_v_heads, k_dim or 1]

        def advance(s: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            s = decay[row][:, :, None] * s
            known = (k[row][:, :, None] * s).sum(1)  # [num_v_heads, v_dim]
            change = beta[row][:, None] * (v[row] - known)
            s = s + k[row][:, :, None] * change[:, None, :]
            return s, (q[row][:, :, None] * s).sum(1)

        return _each_row(state, step, out, advance)

    @torch.no_grad()
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
        check_linear_attention(state, q, k, v, g, step, out)
        out = torch.empty(v.shape, dtype=v.dtype) if out is None else out
        q, k, v = q.float() * scale, k.float(), v.float()
        decay = torch.exp(g.float())[:, None, None]

        def advance(s: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            s = decay * s + k[row][:, :, None] * v[row][:, None, :]
            return s, (q[row][:, :, None] * s).sum(1)

        return _each_row(state, step, out, advance)

    @torch.no_grad()
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
        check_rg_lru(state, x, log_a, step, first, out)
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        x, log_a = x.float(), log_a.float()
        is_first = [False] * step.num_rows if first is None else first.tolist()

        def advance(h: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            if is_first[row]:
                return x[row].clone(), x[row]
            # expm1: if a is nearly 1, 1 - a^2 loses most of its digits.
            h = torch.exp(log_a[row]) * h + torch.sqrt(-torch.expm1(2 * log_a[row])) * x[row]
            return h, h

        return _each_row(state, step, out, advance)

    @torch.no_grad()
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
        check_short_convolution(state, x, weight, bias, step, out)
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        x, columns = x.float(), weight.float().t()  # [width, channels]
        added = None if bias is None else bias.float()

        def advance(before: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            window = torch.cat([before, x[row][None]])  # [width, channels]
            y = (columns * window).sum(0)
            if added is not None:
                y = y + added
            return window[1:], torch.nn.functional.silu(y) if silu else y

        return _each_row(state, step, out, advance)


def _each_row(state: torch.Tensor, step: RecurrenceStep, out: torch.Tensor, advance: Advance) -> torch.Tensor:
    """Calls `advance` for each row of each sequence; a state and a row give the next state and the result."""
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
