"""The shape of what a layer stores, and whether keys and values can be stored beside it.

Cost: `check_tokens` a few us; it is asked in every update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ArgumentError

__all__ = ["StoredShape", "check_tokens"]


@dataclass
class StoredShape:
    """Shape of what a layer stores: rows, and heads and widths of K and of V, which may differ."""

    num_rows: int
    num_heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> StoredShape:
        """The shape of keys and values [rows, heads, tokens, width]."""
        return cls(
            key_states.shape[0],
            (key_states.shape[1], value_states.shape[1]),
            (key_states.shape[3], value_states.shape[3]),
            key_states.dtype,
        )

    def token_bytes(self, which: int) -> int:
        return self.num_heads[which] * self.widths[which] * self.dtype.itemsize


def check_tokens(
    key_states: torch.Tensor, value_states: torch.Tensor, shape: StoredShape | None, layer: int
) -> None:
    """Raises ArgumentError for tokens that cannot be stored in `layer`, which holds some of `shape`, or none yet."""
    where = f"layer {layer} of a QuireCache"
    for name, tensor in (("keys", key_states), ("values", value_states)):
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"expected {name} on the CPU in {where}, got {tensor.device}; its memory is the CPU's: move the "
                "model with model.to('cpu')"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"expected {name} without a gradient in {where}; it writes in place: run the model under "
                "torch.no_grad()"
            )
    if key_states.dtype is not value_states.dtype and torch.is_autocast_enabled("cpu"):
        raise ArgumentError(
            f"expected keys and values of one dtype in {where}, got {key_states.dtype} and {value_states.dtype} under "
            "torch.autocast; leave it, or convert the model with model.to(dtype)"
        )
    if key_states.dtype is not value_states.dtype or key_states.shape[::2] != value_states.shape[::2]:
        raise ArgumentError(
            f"expected keys and values of one batch, length and dtype in {where}, got {key_states.dtype} "
            f"{tuple(key_states.shape)} and {value_states.dtype} {tuple(value_states.shape)}"
        )
    if shape is None:
        return
    if key_states.dtype is not shape.dtype:
        raise ArgumentError(
            f"expected {shape.dtype} in {where}, what it was filled with, got {key_states.dtype}; reset() the "
            "cache, or convert the model back"
        )
    for which, (name, tensor) in enumerate((("keys", key_states), ("values", value_states))):
        expected = (shape.num_rows, shape.num_heads[which], tensor.shape[2], shape.widths[which])
        if tensor.shape != expected:
            raise ArgumentError(
                f"expected {name} {list(expected)} in {where}, what it was filled with, got "
                f"{list(tensor.shape)}; reset() the cache, make one for this model, or fork it for each batch"
            )
