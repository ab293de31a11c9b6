"""MiniMax's lightning attention: linear attention with a constant decay a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from quire.model.state.adapter import RECURRENT, StateAdapter, has_parts
from quire.recurrence import LinearAttention, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["LightningAttention"]

_TABLES = ("query_decay", "key_decay", "diagonal_decay")
_PARTS = frozenset({"act_fn", "norm", "qkv_proj", "out_proj", "output_gate"})


class LightningAttention(StateAdapter):
    """q, k and v from one projection, then activation, linear attention, norm and a sigmoid gate."""

    kind = "lightning_attention"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        mixer = self.module
        self.fields = {RECURRENT: (mixer.num_attention_heads, mixer.head_dim, mixer.head_dim)}

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        heads = getattr(module, "num_attention_heads", 0)
        slopes = dict(module.named_buffers(recurse=False)).get("slope_rate")
        return has_parts(module, _PARTS) and slopes is not None and tuple(slopes.shape) == (heads, 1, 1)

    @property
    def first_projection(self) -> Any:
        return self.module.qkv_proj

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, num_rows = self.module, hidden.shape[0]
        qkv = mixer.act_fn(mixer.qkv_proj(hidden)).view(
            num_rows, mixer.num_attention_heads, 3 * mixer.head_dim
        )
        q, k, v = (part.contiguous() for part in qkv.split(mixer.head_dim, dim=-1))
        slopes = mixer.slope_rate.float().reshape(-1)
        y = self.recurrence.compute(LinearAttention(states[RECURRENT], q, k, v, -slopes), step)
        y = mixer.norm(y.reshape(num_rows, -1))
        return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden)) * y)

    @property
    def text_lengths(self) -> tuple[int, ...]:
        return *super().text_lengths, self.module.block_size + 65  # the mixer computes in blocks

    def float32_copy(self) -> Self:
        """With the decay tables recomputed from its slopes in float32: in 16 bits each entry is rounded separately.
        Tables that do not follow from the slopes stay."""
        wide, eps = super().float32_copy(), torch.finfo(self.module.slope_rate.dtype).eps
        tables = dict(zip(_TABLES, wide.module.decay_factors(wide.module.slope_rate), strict=True))
        if all(_is_rounded(getattr(wide.module, name), table, eps) for name, table in tables.items()):
            for name, table in tables.items():
                setattr(wide.module, name, table)
        return wide

    def module_output(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module(hidden[None], None, None)[0][0]

    def wrap_output(self, hidden: torch.Tensor) -> Any:
        return hidden, None


def _is_rounded(table_entries: torch.Tensor, exact: torch.Tensor, eps: float) -> bool:
    """Whether each entry is the exp(-x) of `exact` to the precision of its type: x is a product of rounded numbers,
    with a relative error, and the result is rounded once more."""
    smallest = torch.finfo(torch.float16).smallest_normal * eps  # smaller numbers may be 0
    x = -exact.clamp_min(smallest).log()
    return bool(((table_entries - exact).abs() <= exact * (torch.expm1(eps * x) + eps) + smallest).all())
