"""What a token costs: the shape of a model's KV cache, layer by layer and group by group.

A `KVSpec` knows no tensors and no blocks in use; it is arithmetic over a model's config, and works from a
`config.json` alone. It is what a planner reads and what `quire.Cache` is built from.

Invariants
    K1  every layer that stores KV belongs to exactly one group; a layer that reads another layer's KV
        (`shares_kv_with`) belongs to none and costs nothing.
    K2  the layers of a group have one span rule and one shape.
    K3  `block_bytes(block_size)` is the largest `bytes_per_block` of any group, so that one pool of blocks of
        that size serves them all.

Cost: every call is O(number of layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError
from quire.spec.config import dtype_of, layers_of, max_length_of, model_type_of, read_config, vocab_size_of
from quire.spec.formats import format_of
from quire.spec.layer_spec import LayerSpec, Span

__all__ = ["KVGroup", "KVSpec"]


@dataclass(frozen=True)
class KVGroup:
    """Layers with one span rule and one shape, which share a block table."""

    index: int
    layers: tuple[int, ...]
    span: Span
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype_bytes: int
    latent: bool = False

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """As `LayerSpec.stored_dims`."""
        return (self.k_head_dim,) if self.latent else (self.k_head_dim, self.v_head_dim)

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.num_kv_heads * sum(self.stored_dims) * self.dtype_bytes

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes this group has to keep for one sequence of `num_tokens` (a window keeps its window)."""
        return self.bytes_per_token * self.span.num_kept(num_tokens)


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of a model: layers, dtype, and the groups made of them.

    Build it with `from_config`, or by hand from `LayerSpec`s for an engine of one's own.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    vocab_size: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if not any(layer.shares_kv_with is None for layer in self.layers):
            raise ArgumentError("expected at least one layer that stores KV, got none")

    @classmethod
    def from_config(cls, config: Any | str | Path | dict[str, Any], *, dtype: str | None = None) -> KVSpec:
        """The spec of a transformers config object, of a folder or `config.json` path, or of its dict.

        `dtype` overrides the config's own (one that names none counts as float32, as in transformers).
        raises: ConfigError naming the field; UnsupportedModelError for layers that keep something else than
        K and V, or a latent, per token (state); LoadError where the file cannot be read.
        """
        model = read_config(config)
        return cls(
            layers=layers_of(model),
            dtype=dtype or dtype_of(model),
            max_model_len=max_length_of(model),
            vocab_size=vocab_size_of(model),
            name=model_type_of(model),
        )

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> KVSpec:
        """A spec of equal full-attention layers."""
        layer = LayerSpec(Span(), num_kv_heads, head_dim, head_dim)
        return cls(layers=(layer,) * num_layers, dtype=dtype)

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups, full-attention ones first (group 0 is a full one where the model has any).

        A group has as many layers as the rarest kind of layer has, so that the blocks of all groups have
        about equal bytes; where that does not divide, a kind's last group is smaller (its block is padded).
        """
        kinds: dict[tuple[Span, int, int, int, bool], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.shares_kv_with is None:
                kind = (layer.span, layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim, layer.latent)
                kinds.setdefault(kind, []).append(index)
        size = min(len(members) for members in kinds.values())
        full_first = sorted(kinds.items(), key=lambda item: item[0][0].kind != "full")
        groups: list[KVGroup] = []
        for (span, num_kv_heads, k_head_dim, v_head_dim, latent), members in full_first:
            for start in range(0, len(members), size):
                groups.append(
                    KVGroup(
                        index=len(groups),
                        layers=tuple(members[start : start + size]),
                        span=span,
                        num_kv_heads=num_kv_heads,
                        k_head_dim=k_head_dim,
                        v_head_dim=v_head_dim,
                        dtype_bytes=self.dtype_bytes,
                        latent=latent,
                    )
                )
        return tuple(groups)

    def stored_in(self, layer: int) -> int:
        """The layer whose KV decoder layer `layer` reads: itself, or the one it shares with.

        *raises:* ArgumentError: there is no such layer.
        """
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(f"expected a layer of 0 to {len(self.layers) - 1}, got {layer}")
        owner = self.layers[layer].shares_kv_with
        return layer if owner is None else owner

    @property
    def dtype_bytes(self) -> int:
        return format_of(self.dtype).num_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token adds to all layers together (while it is inside every window)."""
        return sum(group.bytes_per_token for group in self.groups)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of tokens in all layers together."""
        return self.bytes_per_token * block_size

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes one sequence of `num_tokens` has to keep in all layers together."""
        return sum(group.bytes_for(num_tokens) for group in self.groups)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the pool (K3): a block of any one group."""
        return max(group.bytes_per_block(block_size) for group in self.groups)
