"""Rotary angles by position: the model's own module computes them once, the kernels take each row's.

This saves a dozen small operators a step. The bits are the same: an angle is a function of its position alone
(docs/exactness.md), and the decoder's proof compares (`quire.model.prepare`).
Not for modules that read more than positions: `cos` and `sin` [1, T, width] is the only form supported.

Cost of a call: about 3 us. Memory: two rows a position of the longest sequence seen, up to twice as many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.torch_threads import one_torch_thread

__all__ = ["Angles", "RotaryRows"]

_MIN_POSITIONS, _MAX_POSITIONS = (
    1 << 12,
    1 << 16,
)  # of the table; positions beyond it are computed at each step


class Angles(NamedTuple):
    """cos, sin: [n, width], contiguous. rows: int64 [T], the row of each token."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor


class RotaryRows:
    """The outputs of `module`, a rotary embedding, for rows of `dtype`, stored by position."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._like = module, torch.empty(1, 1, 1, dtype=dtype)
        self._cos = self._sin = torch.empty(0, 0)

    def __call__(self, positions: torch.Tensor) -> Angles | None:
        """The module's output at positions int64 [T], contiguous; None if it has another form."""
        largest = int(positions.numpy().max())
        if largest < self._cos.shape[0]:
            return Angles(self._cos, self._sin, positions)
        if largest >= _MAX_POSITIONS:
            tables = self._tables(positions)
            return None if tables is None else Angles(*tables, torch.arange(positions.numel()))
        tables = self._tables(torch.arange(min(_MAX_POSITIONS, max(_MIN_POSITIONS, 2 * (largest + 1)))))
        if tables is None:
            return None
        self._cos, self._sin = tables
        return Angles(self._cos, self._sin, positions)

    def is_proved(self) -> bool:
        """Whether the stored rows equal the module's own output at positions up to 512, bit for bit, in any order."""
        positions = torch.tensor([511, 0, 1, 300, 17, 64, 255, 256, 5, 509, 130])
        angles, expected = self(positions), self._tables(positions)
        if angles is None or expected is None:
            return False
        stored = angles.cos[angles.rows], angles.sin[angles.rows]
        return all(torch.equal(table, want) for table, want in zip(stored, expected, strict=True))

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        with torch.inference_mode(), one_torch_thread():
            answer = self._module(self._like, positions[None])
        if not isinstance(answer, tuple) or len(answer) != 2:
            return None
        cos, sin = answer
        for table in answer:
            if (
                not isinstance(table, torch.Tensor)
                or table.dtype is not self._like.dtype
                or table.shape != (1, positions.numel(), cos.shape[-1])
                or not table.is_contiguous()
            ):
                return None
        return cos[0], sin[0]
