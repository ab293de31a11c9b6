"""ZAYA's projections of attention: q and k pass two convolutions, half of each value is that of the token before.

Not the attention: the rows that this answers are its q, k and v, which it stores as any attention does. So such a layer
has K and V and a state beside them.

The value of the token before is what a convolution of (1, 0) answers, exactly. The second convolution mixes the
channels of a head and takes one token before: two products a head. Both see a text as if tokens of zeros stood before
it, which pass the first convolution too and leave its bias.

Cost: beside the submodules three short convolutions, and two products a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.model.state.adapter import CONVOLUTION, MOST_WIDTH, StateAdapter, has_parts
from quire.recurrence import RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["ConvolvedAttention"]

_PARTS = frozenset({
    "q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped"
})  # fmt: skip
_MIXED, _DELAYED = "mixed", "delayed"


class ConvolvedAttention(StateAdapter):
    """q, k and v of attention, one behind another in a row: `answer` takes them apart."""

    kind = "convolved_attention"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        own = self.module
        channels, width = own.conv_qk_depthwise.in_channels, own.conv_qk_depthwise.kernel_size[0]
        self.num_heads, self.num_kv_heads = own.num_attention_heads, own.num_key_value_heads
        self.fields = {
            CONVOLUTION: (width - 1, channels),
            _MIXED: (1, channels),
            _DELAYED: (1, own.v_proj_delayed.out_features),
        }

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        if not has_parts(module, _PARTS):
            return False
        first, second, own = module.conv_qk_depthwise, module.conv_qk_grouped, module
        if not isinstance(first, nn.Conv1d) or not isinstance(second, nn.Conv1d):
            return False
        heads, kv_heads = getattr(own, "num_attention_heads", 0), getattr(own, "num_key_value_heads", 0)
        channels = (heads + kv_heads) * getattr(own, "head_dim", 0)
        return (
            channels > 0
            and heads % kv_heads == 0
            and all(_is_plain(conv, channels) for conv in (first, second))
            and first.groups == channels
            and 2 <= first.kernel_size[0] <= MOST_WIDTH
            and second.groups == heads + kv_heads
            and second.kernel_size == (2,)
        )

    @property
    def first_projection(self) -> Any:
        return self.module.q_proj

    def rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        own, num_rows, kv_heads = self.module, hidden.shape[0], self.num_kv_heads
        q, k = own.q_proj(hidden), own.k_proj(hidden)
        mixed = self._convolved(torch.cat([q, k], dim=-1), states, step)
        # What passes the convolutions by: the mean of a query and the key of its head; of its queries for a key.
        per_key = (num_rows, kv_heads, self.num_heads // kv_heads, own.head_dim)
        residual = (q.view(per_key) + k.view(num_rows, kv_heads, 1, own.head_dim)) * 0.5
        beside = torch.cat(
            [residual.reshape(num_rows, -1), residual.mean(dim=2).reshape(num_rows, -1)], dim=-1
        )
        before = self._before(own.v_proj_delayed(hidden), states[_DELAYED], step, own.v_proj_delayed.bias)
        return torch.cat([mixed + beside, own.v_proj_current(hidden), before], dim=-1)

    def _convolved(
        self, qk: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        """The two convolutions of q and k, [num_rows, channels]."""
        first, second = self.module.conv_qk_depthwise, self.module.conv_qk_grouped
        one = self.recurrence.short_convolution(
            states[CONVOLUTION], qk.contiguous(), first.weight[:, 0], first.bias, step, silu=False
        )
        groups = second.groups
        weight = second.weight.view(groups, -1, *second.weight.shape[1:])  # [heads, out, in, 2]
        earlier, now = (
            rows.view(len(rows), groups, -1).transpose(0, 1)
            for rows in (self._before(one, states[_MIXED], step, first.bias), one)
        )
        two = torch.baddbmm(
            second.bias.view(groups, 1, -1), earlier, weight[..., 0].transpose(1, 2)
        ) + torch.bmm(now, weight[..., 1].transpose(1, 2))
        return two.transpose(0, 1).reshape(one.shape)

    def _before(
        self, x: torch.Tensor, state: torch.Tensor, step: RecurrenceStep, at_first: torch.Tensor | None
    ) -> torch.Tensor:
        """Of each row of x the one of the token before; `at_first` (zeros if None) where there is none."""
        weight = x.new_zeros(x.shape[-1], 2)
        weight[:, 0] = 1
        moved = self.recurrence.short_convolution(state, x.contiguous(), weight, None, step, silu=False)
        if at_first is None:
            return moved
        return torch.where(step.begins_text[:, None], at_first.to(moved.dtype), moved)

    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([part[0].flatten(1) for part in self.module(hidden[None], None)], dim=-1)

    def answer(self, hidden: torch.Tensor) -> Any:
        per_head = hidden.view(*hidden.shape[:-1], -1, self.module.head_dim)
        return per_head.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)


def _is_plain(conv: Any, channels: int) -> bool:
    return (
        conv.in_channels == conv.out_channels == channels
        and conv.stride == conv.dilation == (1,)
        and conv.padding == (0,)
        and conv.bias is not None
    )
