"""ZAYA's projections of attention: q and k pass two convolutions, half of each value is that of the token before.

Not the attention: the output rows are its q, k and v, which it stores as any attention does. So such a layer has K and
V, and a state in addition.

A convolution of (1, 0) gives the value of the token before, exactly. The second convolution mixes the channels of a
head and takes one token before: two products a head. Both treat a text as if tokens of zeros preceded it, which pass
the first convolution too and leave its bias.

Cost: three short convolutions in addition to the submodules, and two products a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.model.state.adapter import CONVOLUTION, MAX_WIDTH, StateAdapter, has_parts
from quire.recurrence import CausalConvolution, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["ConvolvedAttention"]

_PARTS = frozenset({
    "q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped"
})  # fmt: skip
_MIXED, _DELAYED = "mixed", "delayed"


class ConvolvedAttention(StateAdapter):
    """q, k and v of attention concatenated in one row; `wrap_output` separates them."""

    kind = "convolved_attention"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        mixer = self.module
        channels, width = mixer.conv_qk_depthwise.in_channels, mixer.conv_qk_depthwise.kernel_size[0]
        self.num_heads, self.num_kv_heads = mixer.num_attention_heads, mixer.num_key_value_heads
        self.fields = {
            CONVOLUTION: (width - 1, channels),
            _MIXED: (1, channels),
            _DELAYED: (1, mixer.v_proj_delayed.out_features),
        }

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        if not has_parts(module, _PARTS):
            return False
        first, second, mixer = module.conv_qk_depthwise, module.conv_qk_grouped, module
        if not isinstance(first, nn.Conv1d) or not isinstance(second, nn.Conv1d):
            return False
        heads, kv_heads = getattr(mixer, "num_attention_heads", 0), getattr(mixer, "num_key_value_heads", 0)
        channels = (heads + kv_heads) * getattr(mixer, "head_dim", 0)
        return (
            channels > 0
            and heads % kv_heads == 0
            and all(_is_unpadded(conv, channels) for conv in (first, second))
            and first.groups == channels
            and 2 <= first.kernel_size[0] <= MAX_WIDTH
            and second.groups == heads + kv_heads
            and second.kernel_size == (2,)
        )

    @property
    def first_projection(self) -> Any:
        return self.module.q_proj

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, num_rows, kv_heads = self.module, hidden.shape[0], self.num_kv_heads
        q, k = mixer.q_proj(hidden), mixer.k_proj(hidden)
        mixed = self._convolve_twice(torch.cat([q, k], dim=-1), states, step)
        # Residual of the convolutions: the mean of a query and its head's key; for a key, of all its queries.
        per_key = (num_rows, kv_heads, self.num_heads // kv_heads, mixer.head_dim)
        residual = (q.view(per_key) + k.view(num_rows, kv_heads, 1, mixer.head_dim)) * 0.5
        residuals = torch.cat(
            [residual.reshape(num_rows, -1), residual.mean(dim=2).reshape(num_rows, -1)], dim=-1
        )
        before = self._before(mixer.v_proj_delayed(hidden), states[_DELAYED], step, mixer.v_proj_delayed.bias)
        return torch.cat([mixed + residuals, mixer.v_proj_current(hidden), before], dim=-1)

    def _convolve_twice(
        self, qk: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        """The two convolutions of q and k, [num_rows, channels]."""
        first, second = self.module.conv_qk_depthwise, self.module.conv_qk_grouped
        first_rows = self.recurrence.compute(
            CausalConvolution(
                states[CONVOLUTION], qk.contiguous(), first.weight[:, 0], first.bias, silu=False
            ),
            step,
        )
        groups = second.groups
        weight = second.weight.view(groups, -1, *second.weight.shape[1:])  # [heads, out, in, 2]
        earlier, now = (
            rows.view(len(rows), groups, -1).transpose(0, 1)
            for rows in (self._before(first_rows, states[_MIXED], step, first.bias), first_rows)
        )
        second_rows = torch.baddbmm(
            second.bias.view(groups, 1, -1), earlier, weight[..., 0].transpose(1, 2)
        ) + torch.bmm(now, weight[..., 1].transpose(1, 2))
        return second_rows.transpose(0, 1).reshape(first_rows.shape)

    def _before(
        self, x: torch.Tensor, state: torch.Tensor, step: RecurrenceStep, at_first: torch.Tensor | None
    ) -> torch.Tensor:
        """For each row of x the row of the token before; `at_first` (zeros if None) for a first token."""
        weight = x.new_zeros(x.shape[-1], 2)
        weight[:, 0] = 1
        shifted = self.recurrence.compute(
            CausalConvolution(state, x.contiguous(), weight, None, silu=False), step
        )
        if at_first is None:
            return shifted
        return torch.where(step.begins_text[:, None], at_first.to(shifted.dtype), shifted)

    def module_output(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([part[0].flatten(1) for part in self.module(hidden[None], None)], dim=-1)

    def wrap_output(self, hidden: torch.Tensor) -> Any:
        per_head = hidden.view(*hidden.shape[:-1], -1, self.module.head_dim)
        return per_head.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)


def _is_unpadded(conv: Any, channels: int) -> bool:
    return (
        conv.in_channels == conv.out_channels == channels
        and conv.stride == conv.dilation == (1,)
        and conv.padding == (0,)
        and conv.bias is not None
    )
