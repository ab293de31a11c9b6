"""RMS and layer norms in one native pass over each row, in float32, rounded once.

Matched by structure: one weight, perhaps one bias, an epsilon, no children. Whether the weight counts from 0 or from 1
(Gemma's), and whether the mean is subtracted, is left open: each is a candidate, and `fused_proof` chooses one.
Cost of a call: about 3 us, and one read and one write of the rows.
"""

from __future__ import annotations

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices.cpu.packed_weights import DTYPE_NAMES
from quire.model.fused.structure import RowCall

__all__ = ["RowNorm", "norm_candidates"]

_KINDS = ("rms", "rms from 1", "layer")


class RowNorm(RowCall):
    """A norm over rows of `width` elements; the fused blocks take `native`.

    finding: which of `_KINDS` it is; weight: the factor of each column.
    """

    def __init__(
        self,
        finding: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        self.finding = finding
        self.width, self.dtype, self.epsilon = weight.numel(), dtype, epsilon
        kind = "layer" if finding == "layer" else "rms"
        self.native = _native.Norm(kind, weight, bias, epsilon)
        self._run = self.native.run


def norm_candidates(module: nn.Module, dtype: torch.dtype) -> dict[str, RowNorm]:
    """The module as a native norm for rows of `dtype`, by its possible `RowNorm.finding`; empty if it is no norm."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    epsilon = next(
        (getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None
    )
    if (
        not isinstance(epsilon, float)
        or weight is None
        or weight.dim() != 1
        or weight.device.type != "cpu"
        or set(module._parameters) - {"weight", "bias"}
        or module._modules
        or (bias is not None and bias.shape != weight.shape)
        or dtype not in DTYPE_NAMES
    ):
        return {}
    dense = weight.detach().float().contiguous().clone()
    added = None if bias is None else bias.detach().float().contiguous().clone()
    return {
        kind: RowNorm(kind, 1.0 + dense if kind == "rms from 1" else dense, added, epsilon, dtype)
        for kind in (_KINDS if bias is None else ("layer",))
    }
