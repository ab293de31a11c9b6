"""What a kernel is given to reach one layer's keys and values.

Not a layout: strided tensors. Whatever storage and layout lie behind them, slot `s` is token `s % block_size` of
block `s // block_size`, and strides lead there.

Invariants
    V1  `k` and `v` have the shape [num_blocks, num_kv_heads, block_size, head_dim]; the last dimension is dense.
    V2  they agree in all but the width of a head; in dtype too, but for codes.
    V3  of a latent layer `v` is the first columns of `k`, the same memory.
    V4  of a format of codes `k` and `v` are elements of codes, two codes of 4 bits each, and `k_scale` and `v_scale`
        [num_blocks, num_kv_heads, block_size] their scales, with groups a fourth dimension; scales lie behind the codes
        of their row. `dtype` is that of what the codes stand for: of what is written, of queries and of answers.

Cost: none; a view copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.errors import ArgumentError
from quire.spec import LayerSpec, format_of

__all__ = ["KVView"]


@dataclass(frozen=True, eq=False)
class KVView:
    """One layer's keys `[num_blocks, num_kv_heads, block_size, k_head_dim]` and values (`v_head_dim`).

    k_format, v_format: names of formats of codes (`quire.spec.kv_formats`); empty where `k` and `v` are numbers.
    coded: the dtype of what codes stand for. k_offset: float32 [num_kv_heads, k_head_dim], taken off keys before they
    are turned and coded; a softmax over scores alone does not see that.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_size: int
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_format: str = ""
    v_format: str = ""
    coded: torch.dtype | None = None
    k_offset: torch.Tensor | None = None

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != self.block_size:
            raise ArgumentError(
                f"expected k and v as [num_blocks, num_kv_heads, {self.block_size}, head_dim], "
                f"got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if (k.dtype != v.dtype and self.coded is None) or k.stride(3) != 1 or v.stride(3) != 1:
            raise ArgumentError(
                f"expected k and v of one dtype with a dense last dimension, got {k.dtype} with strides "
                f"{k.stride()} and {v.dtype} with {v.stride()}"
            )
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if (scale is None) != (self.coded is None) or (
                scale is not None and scale.shape[:3] != k.shape[:3]
            ):
                got = "none" if scale is None else tuple(scale.shape)
                expected = "none" if self.coded is None else tuple(k.shape[:3])
                raise ArgumentError(
                    f"expected {name} {expected} beside k and v of {k.dtype}, which stand for {self.dtype}, got {got}"
                )

        if self.k_offset is not None and (
            self.coded is None
            or self.k_offset.dtype != torch.float32
            or self.k_offset.shape != (k.shape[1], self.k_head_dim)
        ):
            raise ArgumentError(
                f"expected k_offset as float32 [{k.shape[1]}, {self.k_head_dim}] beside codes, got "
                f"{self.k_offset.dtype} {tuple(self.k_offset.shape)} beside {k.dtype}"
            )

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor], layer: LayerSpec) -> KVView:
        """rows: as they are stored, of K and of V, [num_blocks, num_kv_heads, block_size, row elements] of the model's
        dtype; of K alone where V is a part of it."""
        k, *v = rows
        if not layer.k_format:
            return cls(k, v[0] if v else k[..., : layer.v_head_dim], k.shape[2])
        k_codes, k_scale = _parts(k, layer.k_format, layer.k_head_dim)
        v_codes, v_scale = _parts(v[0], layer.v_format, layer.v_head_dim)
        return cls(
            *(k_codes, v_codes, k.shape[2], k_scale, v_scale),
            k_format=layer.k_format,
            v_format=layer.v_format,
            coded=k.dtype,
        )

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def k_head_dim(self) -> int:
        return self.k.shape[3] * (format_of(self.k_format).codes if self.k_format else 1)

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[3] * (format_of(self.v_format).codes if self.v_format else 1)

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype if self.coded is None else self.coded


def _parts(rows: torch.Tensor, name: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [.., elements] and scales, [..] or [.., groups], of rows as they are stored: a row ends with its scales."""
    found = format_of(name)
    codes, scales = rows.view(found.torch_dtype), rows.view(getattr(torch, found.scale))
    ends = scales[..., scales.shape[-1] - found.num_scales(width) :]
    return codes[..., : found.num_elements(width)], ends if found.group else ends[..., 0]
