"""LFM 2's gated short convolution: a state of some inputs, and no recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.model.state.adapter import CONVOLUTION, StateAdapter, convolution_field, has_parts
from quire.model.state.parts import MixerParts, consecutive_columns
from quire.recurrence import RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["ShortConvolution"]

_PARTS = frozenset({"conv", "in_proj", "out_proj"})


class ShortConvolution(StateAdapter):
    """C * convolution(B * x), with B, C and x from one projection."""

    kind = "short_convolution"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        before = convolution_field(self.module.conv)
        assert before is not None  # match
        self.fields = {CONVOLUTION: before}

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        return has_parts(module, _PARTS) and convolution_field(module.conv) is not None

    @property
    def first_projection(self) -> Any:
        return self.module.in_proj

    def parts(self) -> MixerParts:
        mixer, width = self.module, self.module.conv.in_channels
        b, gate, x = consecutive_columns(0, width, width, width)
        return MixerParts(
            kind="convolution",
            inputs=(mixer.in_proj,),
            x=x,
            gate=gate,
            a=(),
            b=b,
            conv=mixer.conv,
            heads=(1, width, 1, 1),
            output=mixer.out_proj,
        )

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        b, c, x = self.module.in_proj(hidden).chunk(3, dim=-1)
        return self.module.out_proj(c * self.convolve(self.module.conv, b * x, states, step, silu=False))
