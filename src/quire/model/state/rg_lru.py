"""Griffin's recurrent block (Recurrent Gemma): a convolution and a real-gated linear recurrent unit.

The first token of a text enters the state unscaled (`first`); the gates are products of blocks of channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from quire.model.state.adapter import CONVOLUTION, RECURRENT, StateAdapter, convolution_field, has_parts
from quire.recurrence import RealGatedUnit, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["RecurrentBlock"]

_PARTS = frozenset({"linear_y", "linear_x", "linear_out", "conv_1d", "rg_lru", "act_fn"})
_GATES = frozenset({
    "recurrent_param", "input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias"
})  # fmt: skip


class RecurrentBlock(StateAdapter):
    """y branch * RG-LRU(convolution(x branch))."""

    kind = "rg_lru"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        before = convolution_field(self.module.conv_1d)
        assert before is not None  # match
        self.fields = {CONVOLUTION: before, RECURRENT: (before[1],)}

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        if not has_parts(module, _PARTS):
            return False
        unit, before = module.rg_lru, convolution_field(module.conv_1d)
        return (
            isinstance(unit, nn.Module)
            and has_parts(unit, frozenset(), _GATES)
            and before is not None
            and tuple(unit.recurrent_param.shape) == (before[1],)  # type: ignore[union-attr]
        )

    @property
    def first_projection(self) -> Any:
        return self.module.linear_x

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, unit = self.module, self.module.rg_lru
        y_branch = mixer.act_fn(mixer.linear_y(hidden))
        x = self.convolve(mixer.conv_1d, mixer.linear_x(hidden), states, step, silu=False)
        input_gate = _gate(x, unit.input_gate_weight, unit.input_gate_bias)
        recurrent_gate = _gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log_a = -8.0 * recurrent_gate.float() * softplus(unit.recurrent_param.float())
        h = self.recurrence.compute(
            RealGatedUnit(states[RECURRENT], x * input_gate, log_a, first=step.begins_text), step
        )
        return mixer.linear_out(h * y_branch)

    def module_output(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(hidden), device=hidden.device)[None]
        return self.module(hidden[None], position_ids=positions, attention_mask=None, use_cache=False)[0][0]

    def wrap_output(self, hidden: torch.Tensor) -> Any:
        return hidden, None


def _gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """sigmoid of each block of channels times its own matrix; [num_rows, channels]."""
    blocks, size = bias.shape
    products = torch.baddbmm(bias[:, None], x.view(-1, blocks, size).transpose(0, 1), weight)
    return torch.sigmoid(products.transpose(0, 1).reshape(x.shape))
