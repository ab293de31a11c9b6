"""The parts of a mixer that one native call can run: its own modules, and the layout of their outputs.

Not the call (`quire.model.fused.mixer`): an adapter describes its mixer by it.

Cost: none; it only refers to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["Columns", "MixerParts", "consecutive_columns"]

Columns = tuple[
    tuple[int, int, int], ...
]  # (index of the input, its first column, number of columns), concatenated


@dataclass(frozen=True, eq=False)
class MixerParts:
    """A gated delta net with one decay a head ("delta"), Mamba 2 ("scan"), a gated short convolution ("convolution").

    Args:
        inputs: linear layers that all take the mixer's rows.
        x: input of the convolution and SiLU: q, k and v, or x, B and C; for a convolution alone x times b, no SiLU.
        gate: gate of the normed result; for a convolution alone a factor.
        a: the steps are softplus(a + dt_bias); b: for delta, beta is its sigmoid.
        conv: the depthwise nn.Conv1d.
        heads: their number, the size of each, the size of a key or a state, the number of q and k heads (B, C groups).
        a_log, dt_bias, d: [heads]; d for scan only. A convolution alone has none of the fields below but `output`.
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


def consecutive_columns(input_index: int, *widths: int) -> list[Columns]:
    """Columns of these widths in one input, one after another."""
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [((input_index, start, width),) for start, width in zip(starts, widths, strict=True)]
