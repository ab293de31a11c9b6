"""The settings of a layer's attention beyond plain causal attention.

Not a kernel and not a plan: they stay the same from step to step.

A query at position q sees the key at position k if k <= q and
    window = w > 0:  q - k < w
    chunk  = c > 0:  k // c == q // c
    both:            k >= (q - w + 1) // c * c, a window that moves in steps of c (not in the native kernels)
and its score is  x = scale * <q, k>, then  softcap * tanh(x / softcap)  if softcap > 0, and then  + slope * (k - q)
with the slope of its head (ALiBi), in float32. A head's sink is a score without a value: it is a term of the softmax's
denominator only (and is neither capped nor biased).

Cost: none per call; validated once, when built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.errors import ArgumentError

__all__ = ["AttentionOptions"]


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Settings of one layer.

    Args:
        scale: factor of the scores (usually head_dim ** -0.5).
        window: number of keys that a query sees at most, its own included; 0 for all.
        chunk: a query sees only keys of its own chunk of this many positions; 0 for all.
        softcap: bound of the scores; 0.0 for none.
        sinks: float32 [num_q_heads], or None.
        slopes: float32 [num_q_heads], or None.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ArgumentError(f"expected a finite attention scale, got {self.scale}")
        if self.window < 0 or self.chunk < 0:
            raise ArgumentError(
                "expected a window or a chunk of a positive number of tokens, or 0 for neither, "
                f"got window={self.window} and chunk={self.chunk}"
            )
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ArgumentError(f"expected a soft cap of at least 0, got {self.softcap}")
        for name, tensor in (("sinks", self.sinks), ("slopes", self.slopes)):
            if tensor is None:
                continue
            if tensor.dim() != 1 or tensor.dtype != torch.float32:
                raise ArgumentError(
                    f"expected attention {name} as float32 [num_q_heads], got {tensor.dtype} {tuple(tensor.shape)}"
                )
            object.__setattr__(self, name, tensor.detach().contiguous())

    @staticmethod
    def limits(window: int, step: int) -> tuple[int, int]:
        """(window, chunk) of a layer's span; see `quire.spec.Span`."""
        return (0, step) if window == 1 and step > 1 else (window, step if step > 1 else 0)

    def first_visible(self, position: int) -> int:
        """Position of the first key visible to the query at `position`."""
        if not self.window and not self.chunk:
            return 0
        first = max(0, position - (self.window or 1) + 1)
        return first - first % (self.chunk or 1)
