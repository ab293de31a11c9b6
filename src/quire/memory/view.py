"""What a kernel is given to reach one layer's keys and values.

Not a layout: two strided tensors. Whatever storage and layout lie behind them, slot `s` is token `s % block_size` of
block `s // block_size`, and strides lead there.

Invariants
    V1  `k` and `v` have the shape [num_blocks, num_kv_heads, block_size, head_dim]; the last dimension is dense.
    V2  they agree in all but the width of a head, in dtype too.
    V3  of a latent layer `v` is the first columns of `k`, the same memory.

Cost: none; a view copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ArgumentError

__all__ = ["KVView"]


@dataclass(frozen=True, eq=False)
class KVView:
    """One layer's keys `[num_blocks, num_kv_heads, block_size, k_head_dim]` and values (`v_head_dim`)."""

    k: torch.Tensor
    v: torch.Tensor
    block_size: int

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != self.block_size:
            raise ArgumentError(
                f"expected k and v as [num_blocks, num_kv_heads, {self.block_size}, head_dim], "
                f"got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if k.dtype != v.dtype or k.stride(3) != 1 or v.stride(3) != 1:
            raise ArgumentError(
                f"expected k and v of one dtype with a dense last dimension, got {k.dtype} with strides "
                f"{k.stride()} and {v.dtype} with {v.stride()}"
            )

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def k_head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype
