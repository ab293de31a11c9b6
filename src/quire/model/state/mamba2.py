"""Mamba 2: Mamba 2, Bamba, Falcon H1 (multipliers, perhaps no norm), Granite hybrid, Nemotron H and Zamba 2.

The scan takes and gives float32: the gated norm then gets unrounded numbers, as in the models over a prompt.
The limits of dt hold for every row. transformers ignores them for a single token after a prompt: if a limit takes
effect (Nemotron H and Zamba 2 have a lowest dt), its own decode is another function than its own prefill.

Cost: one convolution and one scan in addition to the submodules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from quire.model.row_invariant import on_whole_vectors
from quire.model.state.adapter import (
    CONVOLUTION,
    RECURRENT,
    StateAdapter,
    convolution_field,
    has_parts,
    is_silu,
)
from quire.model.state.parts import MixerParts, consecutive_columns
from quire.recurrence import Mamba2Scan, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["Mamba2"]

_PARTS = frozenset({"conv1d", "act", "in_proj", "norm", "out_proj"})
_PARAMETERS = frozenset({"dt_bias", "A_log", "D"})
_SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size")


class Mamba2(StateAdapter):
    """A scan with one decay a head."""

    kind = "mamba2"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        mixer = self.module
        before = convolution_field(mixer.conv1d)
        assert before is not None  # match
        self.fields = {
            CONVOLUTION: before,
            RECURRENT: (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size),
        }

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        if not has_parts(module, _PARTS, _PARAMETERS):
            return False
        before = convolution_field(module.conv1d)
        if before is None or not all(isinstance(getattr(module, name, None), int) for name in _SIZES):
            return False
        heads, size, groups, state, width = (getattr(module, name) for name in _SIZES)
        return (
            heads * size == width
            and groups > 0
            and heads % groups == 0
            and before[1] == width + 2 * groups * state
            and tuple(module.A_log.shape) == tuple(module.D.shape) == tuple(module.dt_bias.shape) == (heads,)  # type: ignore[union-attr]
            and is_silu(getattr(module, "activation", None))
            and len(getattr(module, "time_step_limit", ())) == 2
        )

    @property
    def first_projection(self) -> Any:
        return self.module.in_proj

    def parts(self) -> MixerParts | None:
        mixer = self.module
        if hasattr(mixer, "ssm_in_multiplier") or not getattr(mixer, "mamba_rms_norm", True):
            return None
        width, states = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
        gate, x, a = consecutive_columns(0, width, width + 2 * states, mixer.num_heads)
        return MixerParts(
            kind="scan",
            inputs=(mixer.in_proj,),
            x=x,
            gate=gate,
            a=a,
            b=(),
            conv=mixer.conv1d,
            heads=(mixer.num_heads, mixer.head_dim, mixer.ssm_state_size, mixer.n_groups),
            a_log=mixer.A_log,
            dt_bias=mixer.dt_bias,
            d=mixer.D,
            norm=mixer.norm,
            norm_width=getattr(mixer.norm, "group_size", width),
            output=mixer.out_proj,
            limits=(float(mixer.time_step_limit[0]), float(mixer.time_step_limit[1])),
        )

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, num_rows, width = self.module, hidden.shape[0], self.module.intermediate_size
        if hasattr(mixer, "ssm_in_multiplier"):  # Falcon H1
            projected = mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector[0]
        else:
            projected = mixer.in_proj(hidden)
        groups_of_states = mixer.n_groups * mixer.ssm_state_size
        gate, xbc, dt = projected.split([width, width + 2 * groups_of_states, mixer.num_heads], dim=-1)
        xbc = self.convolve(mixer.conv1d, xbc, states, step, silu=True).float()
        x, b, c = xbc.split([width, groups_of_states, groups_of_states], dim=-1)
        dt = on_whole_vectors(softplus, dt.float() + mixer.dt_bias.float()).clamp(*mixer.time_step_limit)
        y = self.recurrence.compute(
            Mamba2Scan(
                states[RECURRENT],
                x.reshape(num_rows, mixer.num_heads, mixer.head_dim),
                dt,
                -on_whole_vectors(torch.exp, mixer.A_log.float()),
                b.reshape(num_rows, mixer.n_groups, mixer.ssm_state_size),
                c.reshape(num_rows, mixer.n_groups, mixer.ssm_state_size),
                mixer.D.float(),
            ),
            step,
        ).view(num_rows, width)
        y = mixer.norm(y, gate) if getattr(mixer, "mamba_rms_norm", True) else y * silu(gate.float())
        return mixer.out_proj(y.to(hidden.dtype))
