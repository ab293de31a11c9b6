"""The shape of a layer's stored tokens, and the check that new keys and values fit it.

Cost: `check_tokens` a few us; every update calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ArgumentError
from quire.memory.view import split_codes
from quire.spec import LayerSpec, Span

__all__ = ["StoredShape", "check_tokens"]

_PADDING = 100  # padding of a token of codes is at most this fraction of it


@dataclass
class StoredShape:
    """Shape of a layer's stored tokens: rows, and heads and widths of K and of V, which may differ.

    formats: of K and of V (`quire.spec.kv_formats`), with equally many heads; empty if rows are numbers of `dtype`.
    """

    num_rows: int
    num_heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype
    formats: tuple[str, str] = ("", "")

    @classmethod
    def of(
        cls, key_states: torch.Tensor, value_states: torch.Tensor, formats: tuple[str, str] = ("", "")
    ) -> StoredShape:
        """The shape of keys and values [rows, heads, tokens, width]."""
        return cls(
            key_states.shape[0],
            (key_states.shape[1], value_states.shape[1]),
            (key_states.shape[3], value_states.shape[3]),
            key_states.dtype,
            formats,
        )

    @property
    def is_coded(self) -> bool:
        """Whether K or V are codes."""
        return any(self.formats)

    @property
    def layer(self) -> LayerSpec:
        """The layer of codes that `KVView.of_rows` takes."""
        return LayerSpec(
            Span(), self.num_heads[0], *self.widths, k_format=self.formats[0], v_format=self.formats[1]
        )

    def row_elements(self, which: int) -> int:
        """Elements of `dtype` of one head of a token."""
        return self.layer.row_elements(self.dtype.itemsize)[which] if self.is_coded else self.widths[which]

    def token_elements(self, which: int) -> int:
        """Elements from a token to the next.

        Codes and a scale are seldom a round number of bytes, so only many tokens together would fill whole pages. So a
        token of codes is rounded up to a multiple of the largest power of two that adds at most a hundredth.
        """
        elements = self.num_heads[which] * self.row_elements(which)
        if not self.is_coded:
            return elements
        unit = 1
        while -elements % (2 * unit) * _PADDING <= elements:
            unit *= 2
        return elements + -elements % unit

    def token_bytes(self, which: int) -> int:
        return self.token_elements(which) * self.dtype.itemsize

    def rows_in(self, buffer: torch.Tensor, which: int, num_rows: int, row_tokens: int) -> torch.Tensor:
        """A view [num_rows, heads, row_tokens, row elements] of `dtype` of a uint8 buffer that begins with a token of
        the first row."""
        token, elements = self.token_elements(which), self.row_elements(which)
        size = (num_rows, self.num_heads[which], row_tokens, elements)
        return buffer.view(self.dtype).as_strided(size, (row_tokens * token, elements, token, 1))

    def part(self, tokens: torch.Tensor, which: int, *, is_scale: bool) -> torch.Tensor:
        """A view [tokens, heads, ..] of the bytes of successive tokens: their numbers, or their codes or scales."""
        rows = self.rows_in(tokens, which, 1, len(tokens) // self.token_bytes(which))[0]
        if self.is_coded:
            rows = split_codes(rows, self.formats[which], self.widths[which])[is_scale]
        return rows.transpose(0, 1)


def check_tokens(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    shape: StoredShape | None,
    layer: int,
    place: torch.device,
) -> None:
    """*raises:* ArgumentError: tokens that do not fit `layer`, which holds tokens of `shape` on device `place`, or none
    yet."""
    where = f"layer {layer} of a QuireCache"
    for name, tensor in (("keys", key_states), ("values", value_states)):
        if tensor.device != place:
            raise ArgumentError(
                f"expected {name} on the CPU in {where}, got {tensor.device}; its memory is the CPU's: move the "
                "model with model.to('cpu')"
                if place.type == "cpu"
                else f"expected {name} on {place} in {where}, where its memory is, got {tensor.device}; move the model "
                f"with model.to({str(place)!r})"
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
            f"expected {shape.dtype} in {where}, as in its stored tokens, got {key_states.dtype}; reset() the "
            "cache, or convert the model back"
        )
    for which, (name, tensor) in enumerate((("keys", key_states), ("values", value_states))):
        expected = (shape.num_rows, shape.num_heads[which], tensor.shape[2], shape.widths[which])
        if tensor.shape != expected:
            raise ArgumentError(
                f"expected {name} {list(expected)} in {where}, as in its stored tokens, got "
                f"{list(tensor.shape)}; reset() the cache, make one for this model, or fork it for each batch"
            )
