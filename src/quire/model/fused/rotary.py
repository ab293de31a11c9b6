"""Rotary angles by position: the model's own module computes them once, a step gathers its rows.

A dozen small operators a step otherwise. The same bits: an angle is a function of its position alone
(docs/exactness.md), and the decoder's proof compares (`quire.model.prepare`).
Not for modules that look at more than positions: `cos` and `sin` [1, T, width] is the only form it knows.

Cost of a call: two gathers, about 10 us. Memory: two rows a position of the longest sequence seen, up to twice as many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["RotaryRows"]

_FEWEST, _MOST = 1 << 10, 1 << 16  # positions; beyond the most the module computes them, step by step


class RotaryRows:
    """The answers of `module`, a rotary embedding, kept by position."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._num_positions = 0
        self._cos = self._sin = torch.empty(0)

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """What the module answers for hidden [T, width] at positions int64 [T]."""
        largest = int(positions.max())
        if largest >= self._num_positions and not self._grow(hidden, largest + 1):
            return self._module(hidden[None], positions[None])
        return self._cos[positions][None], self._sin[positions][None]

    def _grow(self, hidden: torch.Tensor, least: int) -> bool:
        """Has `least` positions at hand; False if that is too many, or the answer of another form."""
        if least > _MOST:
            return False
        num_positions = min(_MOST, max(_FEWEST, 2 * least))
        answer = self._module(hidden[None], torch.arange(num_positions)[None])
        if not isinstance(answer, tuple) or len(answer) != 2:
            return False
        if any(
            not isinstance(table, torch.Tensor) or table.shape[:-1] != (1, num_positions) for table in answer
        ):
            return False
        self._num_positions, (self._cos, self._sin) = num_positions, (answer[0][0], answer[1][0])
        return True
