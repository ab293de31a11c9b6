"""`KVView`: the tensors through which a kernel reaches one layer's keys and values.

Not a layout but strided tensors: in every storage and layout, slot `s` is token `s % block_size` of block `s //
block_size`, and the strides lead there.

Invariants
    V1  `k` and `v` have the shape [num_blocks, num_kv_heads, block_size, head_dim]; the last dimension is dense.
    V2  they agree in all but the width of a head; their dtypes may differ only in formats of codes.
    V3  in a latent layer `v` is the first columns of `k`, the same memory.
    V4  in a format of codes `k` and `v` hold codes (two codes of 4 bits to an element), `k_scale` and `v_scale`
        [num_blocks, num_kv_heads, block_size] their scales, with groups as a fourth dimension; scales lie behind the
        codes of their row. `dtype` is the dtype of the decoded numbers: of written rows, queries and outputs.

Cost: none; a view copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.errors import ArgumentError
from quire.spec import LayerSpec, format_of

__all__ = ["KVView", "split_codes"]


@dataclass(frozen=True, eq=False)
class KVView:
    """One layer's keys `[num_blocks, num_kv_heads, block_size, k_head_dim]` and values (`v_head_dim`).

    k_format, v_format: names of formats of codes (`quire.spec.kv_formats`); empty where `k` and `v` are numbers.
    decoded_dtype: the dtype of the numbers that codes stand for; None without codes. k_offset: float32 [num_kv_heads,
    k_head_dim], subtracted from keys before they are rotated and coded; a softmax over the scores alone cancels it.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_size: int
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_format: str = ""
    v_format: str = ""
    decoded_dtype: torch.dtype | None = None
    k_offset: torch.Tensor | None = None

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != self.block_size:
            raise ArgumentError(
                f"expected k and v as [num_blocks, num_kv_heads, {self.block_size}, head_dim], "
                f"got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if (k.dtype != v.dtype and self.decoded_dtype is None) or k.stride(3) != 1 or v.stride(3) != 1:
            raise ArgumentError(
                f"expected k and v of one dtype with a dense last dimension, got {k.dtype} with strides "
                f"{k.stride()} and {v.dtype} with {v.stride()}"
            )
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if (scale is None) != (self.decoded_dtype is None) or (
                scale is not None and scale.shape[:3] != k.shape[:3]
            ):
                got = "none" if scale is None else tuple(scale.shape)
                expected = "none" if self.decoded_dtype is None else tuple(k.shape[:3])
                raise ArgumentError(
                    f"expected {name} {expected} beside k and v of {k.dtype}, which stand for {self.dtype}, got {got}"
                )

        if self.k_offset is not None and (
            self.decoded_dtype is None
            or self.k_offset.dtype != torch.float32
            or self.k_offset.shape != (k.shape[1], self.k_head_dim)
        ):
            raise ArgumentError(
                f"expected k_offset as float32 [{k.shape[1]}, {self.k_head_dim}] beside codes, got "
                f"{self.k_offset.dtype} {tuple(self.k_offset.shape)} beside {k.dtype}"
            )

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor], layer: LayerSpec) -> KVView:
        """A view of stored rows. rows: of K and of V, [num_blocks, num_kv_heads, block_size, row elements] of the
        model's dtype; only K if V is a part of it."""
        k, *v = rows
        if not layer.k_format:
            return cls(k, v[0] if v else k[..., : layer.v_head_dim], k.shape[2])
        k_codes, k_scale = split_codes(k, layer.k_format, layer.k_head_dim)
        v_codes, v_scale = split_codes(v[0], layer.v_format, layer.v_head_dim)
        return cls(
            *(k_codes, v_codes, k.shape[2], k_scale, v_scale),
            k_format=layer.k_format,
            v_format=layer.v_format,
            decoded_dtype=k.dtype,
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
        return self.k.dtype if self.decoded_dtype is None else self.decoded_dtype


def split_codes(rows: torch.Tensor, name: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the codes [.., elements] and scales, [..] or [.., groups], of rows stored in format `name`: a row ends
    with its scales."""
    kv_format = format_of(name)
    codes, scales = rows.view(kv_format.torch_dtype), rows.view(getattr(torch, kv_format.scale))
    ends = scales[..., scales.shape[-1] - kv_format.num_scales(width) :]
    return codes[..., : kv_format.num_elements(width)], ends if kv_format.group else ends[..., 0]
