"""Mamba 1: Mamba, Falcon Mamba and Jamba (norms on dt, B and C), and Zamba (several heads, each a scan of its own).

Scans take and give float32, so that the gate multiplies a result that is not yet rounded, as in the models.

Cost: one convolution and a scan a head in addition to the submodules; -exp(A_log) is computed at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu, softplus

from quire.model.state.adapter import (
    CONVOLUTION,
    RECURRENT,
    StateAdapter,
    convolution_field,
    has_parts,
    is_silu,
)
from quire.recurrence import Mamba1Scan, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["Mamba1", "ZambaHeads"]

_PARTS = frozenset({"conv1d", "act", "in_proj", "x_proj", "dt_proj", "out_proj"})
_NORMS = frozenset({"dt_layernorm", "b_layernorm", "c_layernorm"})
_ZAMBA = frozenset({"conv1d", "act", "in_proj", "out_proj"})
_ZAMBA_PARAMETERS = frozenset({"x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"})


class _Scan(StateAdapter):
    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        before = convolution_field(self.module.conv1d)
        assert before is not None  # match
        self.fields = {CONVOLUTION: before, RECURRENT: (before[1], self.module.ssm_state_size)}


class Mamba1(_Scan):
    """One selective scan over all channels."""

    kind = "mamba1"

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        known = (_PARTS, _PARTS | _NORMS)
        if not any(has_parts(module, children, frozenset({"A_log", "D"})) for children in known):
            return False
        before = convolution_field(module.conv1d)
        return (
            before is not None
            and is_silu(getattr(module, "activation", None))
            and tuple(module.A_log.shape) == (before[1], getattr(module, "ssm_state_size", 0))  # type: ignore[union-attr]
        )

    @property
    def first_projection(self) -> Any:
        return self.module.in_proj

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer = self.module
        x, gate = mixer.in_proj(hidden).chunk(2, dim=-1)
        x = self.convolve(mixer.conv1d, x, states, step, silu=True)
        dt, b, c = mixer.x_proj(x).split(
            [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1
        )
        if hasattr(mixer, "dt_layernorm"):
            dt, b, c = mixer.dt_layernorm(dt), mixer.b_layernorm(b), mixer.c_layernorm(c)
        # The weight alone, as in the model: in 16 bits the bias, which is larger, is added in float32.
        dt = linear(dt, mixer.dt_proj.weight).float()
        if mixer.dt_proj.bias is not None:
            dt = dt + mixer.dt_proj.bias.float()
        y = self.recurrence.compute(
            Mamba1Scan(
                states[RECURRENT],
                x.float(),
                softplus(dt),
                -torch.exp(mixer.A_log.float()),
                b.float().contiguous(),
                c.float().contiguous(),
                mixer.D.float(),
            ),
            step,
        )
        return mixer.out_proj((y * silu(gate.float())).to(hidden.dtype))


class ZambaHeads(_Scan):
    """Several heads of channels, each with projections and a scan of its own."""

    kind = "zamba"

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        if not has_parts(module, _ZAMBA, _ZAMBA_PARAMETERS):
            return False
        before = convolution_field(module.conv1d)
        heads, size = getattr(module, "n_mamba_heads", 0), getattr(module, "mamba_head_dim", 0)
        return (
            before is not None
            and before[1] == heads * size
            and is_silu(getattr(module, "activation", None))
            and tuple(module.A_log.shape) == (heads, size, getattr(module, "ssm_state_size", 0))  # type: ignore[union-attr]
        )

    @property
    def first_projection(self) -> Any:
        return self.module.in_proj

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, num_rows, size = self.module, hidden.shape[0], self.module.mamba_head_dim
        # The projection gives x and gate of the first channel, then of the second, and so on.
        x, gate = mixer.in_proj(hidden).view(num_rows, -1, 2).unbind(dim=-1)
        x = self.convolve(mixer.conv1d, x, states, step, silu=True)
        sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
        parts: list[torch.Tensor] = []
        for head in range(mixer.n_mamba_heads):
            channels = slice(head * size, (head + 1) * size)
            head_x = x[:, channels].contiguous()
            dt, b, c = linear(head_x, mixer.x_proj_weight[head]).split(sizes, dim=-1)
            dt = linear(dt, mixer.dt_proj_weight[head]).float() + mixer.dt_proj_bias[head].float()
            y = self.recurrence.compute(
                Mamba1Scan(
                    states[RECURRENT][:, channels],
                    head_x.float(),
                    softplus(dt),
                    -torch.exp(mixer.A_log[head].float()),
                    b.float().contiguous(),
                    c.float().contiguous(),
                    mixer.D[head].float(),
                ),
                step,
            )
            parts.append(y)
        y = torch.cat(parts, dim=-1) * silu(gate.float())
        return mixer.out_proj(y.to(hidden.dtype))
