"""What a mixer that one native call can run consists of: its own modules, and where in their answers lies what.

Not the call (`quire.model.fused.mixer`): an adapter says this of its mixer, whose modules these are.

Cost: none; it only names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["Columns", "MixerParts", "widths_in_turn"]

Columns = tuple[
    tuple[int, int, int], ...
]  # (which of the inputs, its first column, how many), one behind another


@dataclass(frozen=True, eq=False)
class MixerParts:
    """A gated delta net with one decay a head ("delta"), Mamba 2 ("scan"), a gated short convolution ("convolution").

    Args:
        inputs: linear layers that all take the mixer's rows.
        x: what passes the convolution and SiLU: q, k and v, or x, B and C; of a convolution alone x, times b, without.
        gate: what the normed result is gated by; of a convolution alone a factor.
        a: what the steps are made of, softplus(a + dt_bias); b: of delta, what beta is the sigmoid of.
        conv: the depthwise nn.Conv1d.
        heads: how many, the size of each, that of a key or a state, and how many heads of q and k (groups of B and C).
        a_log, dt_bias, d: [heads]; d of scan alone. Of a convolution alone none of what follows but `output`.
        limits: of a step (scan). factor: of the sigmoid (delta).
        norm: RMS norm with a gate; norm_width: elements that are normed together.
        output: the last linear layer.
    """

    kind: Literal["delta", "scan", "convolution"]
    inputs: tuple[Any, ...]
    x: Columns
    gate: Columns
    a: Columns
    b: Columns
    conv: Any
    heads: tuple[int, int, int, int]
    output: Any
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    d: torch.Tensor | None = None
    norm: Any = None
    norm_width: int = 0
    limits: tuple[float, float] = (0.0, float("inf"))
    factor: float = 1.0


def widths_in_turn(which: int, *widths: int) -> list[Columns]:
    """Columns of input `which`, one behind another, of these widths."""
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [((which, start, width),) for start, width in zip(starts, widths, strict=True)]
