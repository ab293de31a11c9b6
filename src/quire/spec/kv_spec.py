"""The cost of a token: the shape of a model's KV cache, layer by layer and group by group.

A `KVSpec` has no tensors and no blocks in use; it is arithmetic over a model's config, and a `config.json` suffices for
it. A planner reads it, and `quire.Cache` is built from it.

Invariants
    K1  every layer that stores KV belongs to exactly one group; a layer that reads another layer's KV
        (`shares_kv_with`), or has a state alone, belongs to none and costs nothing per token.
    K2  the layers of a group have one span rule, one shape, and one format of K and one of V.
    K3  `block_bytes(block_size)` is the largest `bytes_per_block` of any group, so that one pool of blocks of
        that size serves them all. The group with the largest token has `block_size` tokens in a block; a group with a
        smaller token may have several times as many (`block_factor`), if there would be too many groups otherwise.
    K4  the bytes of blocks of K3 exceed those of their tokens (a group's token may be smaller than another's) by at
        most 5 % of a sequence, short or long, if groups of whole layers can be chosen so.
    K5  `block_factor * blocks_per_node` is the same for all groups: a node of the prefix tree has the tokens of the
        largest block, and whole blocks of each group.

Cost: every call is O(number of layers); the first use of `groups` is O(layers x kinds of layers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError
from quire.spec.kv_formats import format_of
from quire.spec.layer_spec import LayerSpec, Span, layer_ranges
from quire.spec.model_config import (
    dtype_of,
    layers_of,
    max_length_of,
    model_type_of,
    read_config,
    vocab_size_of,
)
from quire.spec.state_spec import StateSpec, state_specs

__all__ = ["KVGroup", "KVSpec"]

MAX_PADDING = 0.05
MAX_GROUPS = 16
MAX_FACTOR = 8  # of a block's tokens: a branch copies as many, and events and tiers treat them as one
_LONG = 1 << 17  # tokens of a sequence so long that windows contain a negligible part of it


@dataclass(frozen=True)
class KVGroup:
    """Layers with one span rule and one shape, which share a block table.

    max_layers: of any group of this kind; the last group may have fewer. block_factor, blocks_per_node: K3 and K5.
    """

    index: int
    layers: tuple[int, ...]
    max_layers: int
    span: Span
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype_bytes: int
    latent: bool = False
    k_format: str = ""
    v_format: str = ""
    block_factor: int = 1
    blocks_per_node: int = 1

    @property
    def layer(self) -> LayerSpec:
        """The spec of each of its layers."""
        return LayerSpec(
            self.span,
            self.num_kv_heads,
            self.k_head_dim,
            self.v_head_dim,
            latent=self.latent,
            k_format=self.k_format,
            v_format=self.v_format,
        )

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """As `LayerSpec.stored_dims`."""
        return (self.k_head_dim,) if self.latent else (self.k_head_dim, self.v_head_dim)

    @cached_property
    def row_elements(self) -> tuple[int, ...]:
        """As `LayerSpec.row_elements`, in elements of the model's dtype."""
        return self.layer.row_elements(self.dtype_bytes)

    @property
    def bytes_per_token(self) -> int:
        return max(1, len(self.layers)) * self.num_kv_heads * sum(self.row_elements) * self.dtype_bytes

    def tokens_per_block(self, block_size: int) -> int:
        """Tokens of its blocks, if those of the group with the largest token have `block_size`."""
        return block_size * self.block_factor

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * self.tokens_per_block(block_size)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that this group stores for one sequence of `num_tokens` (a window stores its window)."""
        return self.bytes_per_token * self.span.num_kept(num_tokens)


def _group_without_kv(dtype_bytes: int) -> KVGroup:
    """The group of a model with states alone: its blocks represent tokens, by which the prefix tree finds states, and
    have no contents. A token counts as one element, so that blocks have a size."""
    return KVGroup(
        index=0,
        layers=(),
        max_layers=1,
        span=Span(),
        num_kv_heads=1,
        k_head_dim=1,
        v_head_dim=0,
        dtype_bytes=dtype_bytes,
    )


@dataclass(frozen=True)
class _Split:
    """A way to gather layers into groups. kinds: layers of a group and its block factor. ratio: bytes of the blocks
    over bytes of the tokens in them (K4). node: the largest factor."""

    kinds: dict[LayerSpec, tuple[int, int]]
    ratio: float
    num_groups: int
    node: int

    @property
    def is_dense(self) -> bool:
        return self.ratio <= 1 + MAX_PADDING and self.num_groups <= MAX_GROUPS

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """Sort key: the best split has the lowest."""
        cost = 0.0 if self.is_dense else self.ratio + self.num_groups / 200
        return not self.is_dense, cost, self.num_groups, self.node


def _excess(allocated: float, used: int) -> float:
    """The ratio of allocated to used bytes if K4 does not allow it; else 0."""
    return 0.0 if allocated <= (1 + MAX_PADDING) * used else allocated / used


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of a model: layers, dtype, and the groups made of them.

    Build it with `from_config`, or from `LayerSpec`s for another engine.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    vocab_size: int | None = None
    name: str = ""
    states: tuple[
        StateSpec, ...
    ] = ()  # of layers with a state per sequence, in addition to K and V or instead
    in_pieces: bool = False  # see `for_pieces`

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if not self.stores_kv and not self.states:
            raise ArgumentError("expected at least one layer that stores KV or a state, got none")

    @classmethod
    def from_config(cls, config: Any | str | Path | dict[str, Any], *, dtype: str | None = None) -> KVSpec:
        """The spec of a transformers config object, of a folder or `config.json` path, or of its dict.

        `dtype` overrides the config's own (a config without one counts as float32, as in transformers).
        raises: ConfigError naming the field; UnsupportedModelError for layers that store something else than
        K and V, or a latent, per token (state); LoadError if the file cannot be read.
        """
        model = read_config(config)
        return cls(
            layers=layers_of(model),
            dtype=dtype or dtype_of(model),
            max_model_len=max_length_of(model),
            vocab_size=vocab_size_of(model),
            name=model_type_of(model),
            states=state_specs(model),
        )

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> KVSpec:
        """A spec of equal full-attention layers."""
        layer = LayerSpec(Span(), num_kv_heads, head_dim, head_dim)
        return cls(layers=(layer,) * num_layers, dtype=dtype)

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups, full-attention ones first (group 0 is a full one if the model has any).

        The fewest for which blocks of one size are hardly padded (K4): a layer with a larger token shares its block
        with fewer others. 50 windowed layers and 10 full ones whose token takes half as much make groups of 5 and one
        of 10. If that makes too many, blocks of a small group have more tokens: 31 windowed layers and one full one
        make groups of 8 and one of a single layer with 8 times as many tokens in a block."""
        kinds: dict[LayerSpec, list[int]] = {}  # by the properties that the layers of a group share (K2)
        for index, layer in enumerate(self.layers):
            if layer.stores_kv:
                kinds.setdefault(replace(layer, index_of=None), []).append(index)
        if not kinds:
            return (_group_without_kv(self.dtype_bytes),)
        split = self._split({kind: len(members) for kind, members in kinds.items()})
        node = math.lcm(*(factor for _, factor in split.values()))
        full_first = sorted(kinds.items(), key=lambda item: item[0].span.kind != "full")
        groups: list[KVGroup] = []
        for kind, members in full_first:
            size, factor = split[kind]
            for start in range(0, len(members), size):
                groups.append(
                    KVGroup(
                        index=len(groups),
                        layers=tuple(members[start : start + size]),
                        max_layers=size,
                        span=kind.span,
                        num_kv_heads=kind.num_kv_heads,
                        k_head_dim=kind.k_head_dim,
                        v_head_dim=kind.v_head_dim,
                        dtype_bytes=self.dtype_bytes,
                        latent=kind.latent,
                        k_format=kind.k_format,
                        v_format=kind.v_format,
                        block_factor=factor,
                        blocks_per_node=node // factor,
                    )
                )
        return tuple(groups)

    def for_pieces(self) -> KVSpec:
        """The same for a storage whose blocks have a place in each layer of a group, all as large as the largest
        group's (virtual): groups whose blocks take as much in every layer, if that wastes less."""
        return self if self.in_pieces else replace(self, in_pieces=True)

    def _split(self, num_layers: dict[LayerSpec, int]) -> dict[LayerSpec, tuple[int, int]]:
        """Layers of a group and its `block_factor`, for each kind of layer: among splits that keep K4 with blocks of
        equal tokens, the one with the fewest groups. Failing that, among splits with more tokens in some blocks;
        failing that, the split with the least padding, where one group more (one table more in each step) counts as
        much as 1/2 % of padding."""
        candidates: list[_Split] = []
        for node in range(1, MAX_FACTOR + 1):
            candidates += self._splits(num_layers, node)
            if node == 1 and any(split.is_dense for split in candidates):
                break
        return min(candidates, key=lambda split: split.rank).kinds

    def _splits(self, num_layers: dict[LayerSpec, int], node: int) -> list[_Split]:
        """Splits in which the largest block has `node` times the tokens of the smallest, one for each size of a
        block."""
        # Stored elements of a token of a layer.
        widths = {kind: kind.num_kv_heads * sum(kind.row_elements(self.dtype_bytes)) for kind in num_layers}
        factors = [factor for factor in range(1, node + 1) if node % factor == 0]
        candidates: list[_Split] = []
        splits: list[tuple[dict[LayerSpec, tuple[int, int]], int]] = []
        for block_width in sorted(
            {count * widths[kind] for kind in num_layers for count in range(1, num_layers[kind] + 1)}
        ):
            if block_width < max(widths.values()):
                continue
            split: dict[LayerSpec, tuple[int, int]] = {}
            for kind, num in num_layers.items():
                num_groups, factor = min(
                    (
                        (-(-num // min(num, block_width // (widths[kind] * factor))), factor)
                        for factor in factors
                        if widths[kind] * factor <= block_width
                    ),
                    key=lambda option: (
                        _excess(option[0] * block_width / option[1], num * widths[kind]),
                        *option,
                    ),
                )
                split[kind] = (-(-num // num_groups), factor)
            splits.append((split, block_width))
        if self.in_pieces:
            # One piece for each of as many layers, as wide as the widest; narrower layers have more tokens in it.
            piece = max(widths.values())
            tokens = {
                kind: max(factor for factor in factors if factor * widths[kind] <= piece)
                for kind in num_layers
            }
            for size in range(1, max(num_layers.values()) + 1):
                split = {kind: (min(size, num_layers[kind]), tokens[kind]) for kind in num_layers}
                splits.append((split, size * piece))
        for split, block_width in splits:
            chosen = [factor for _, factor in split.values()]
            if min(chosen) != 1 or math.lcm(*chosen) != node:
                continue
            if self.in_pieces:
                num_pieces = max(size for size, _ in split.values())
                block_width = sum(
                    max(widths[kind] * factor for kind, (size, factor) in split.items() if size > at)
                    for at in range(num_pieces)
                )
            counts = {kind: -(-num_layers[kind] // size) for kind, (size, _) in split.items()}
            allocated = {kind: counts[kind] * block_width / factor for kind, (_, factor) in split.items()}
            largest_ratio = max(
                sum(allocated[kind] * kind.span.num_kept(num_tokens) for kind in num_layers)
                / sum(num_layers[kind] * widths[kind] * kind.span.num_kept(num_tokens) for kind in num_layers)
                for num_tokens in (1, _LONG)
            )
            candidates.append(_Split(split, largest_ratio, sum(counts.values()), node))
        return candidates

    def stored_in(self, layer: int) -> int:
        """The layer whose KV decoder layer `layer` reads: itself, or the layer that it shares with.

        *raises:* ArgumentError: no such layer.

        *raises:* ArgumentError: there is no such layer.
        """
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(f"expected a layer of 0 to {len(self.layers) - 1}, got {layer}")
        owner = self.layers[layer].shares_kv_with
        return layer if owner is None else owner

    @property
    def stores_kv(self) -> bool:
        """Whether any layer stores keys and values; not in a model with states alone."""
        return any(layer.stores_kv for layer in self.layers)

    @property
    def has_indexer(self) -> bool:
        """Whether layers choose the tokens they attend to, by keys stored in addition to K and V (DSA)."""
        return any(layer.index_of is not None for layer in self.layers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the states of one sequence, and of one checkpoint, in all layers together, at any length."""
        return sum(state.bytes_per_sequence for state in self.states)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the model's dtype."""
        return format_of(self.dtype).num_bytes

    @property
    def in_model_dtype(self) -> KVSpec:
        """The same with K and V in the model's dtype."""
        if not any(layer.k_format or layer.v_format for layer in self.layers):
            return self
        return replace(self, layers=tuple(replace(layer, k_format="", v_format="") for layer in self.layers))

    @property
    def kv_dtype(self) -> str:
        """The storage format of K and V: the dtype's name, or `kv_dtype`'s if layers have formats, in the layers'
        order: "int8", "int8 and bfloat16"."""
        return " and ".join(self._layers_by_dtype) or self.dtype

    @property
    def kv_dtype_by_layers(self) -> str:
        """The same for people, with the layers' numbers if they differ: "bfloat16 (layers 0-1, 5) and int8 (layers
        2-4)"."""
        by_dtype = self._layers_by_dtype
        if len(by_dtype) < 2:
            return self.kv_dtype
        *most, last = (
            f"{name} (layer{'s' * (len(numbers) > 1)} {layer_ranges(numbers)})"
            for name, numbers in by_dtype.items()
        )
        return f"{', '.join(most)} and {last}"

    @property
    def _layers_by_dtype(self) -> dict[str, list[int]]:
        numbers_by_dtype: dict[str, list[int]] = {}
        for number, layer in enumerate(self.layers):
            if layer.stores_kv:
                numbers_by_dtype.setdefault(layer.kv_dtype(self.dtype), []).append(number)
        return numbers_by_dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds to all layers together (while it is inside every window)."""
        return sum(group.bytes_per_token for group in self.groups)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of tokens in all layers together."""
        return self.bytes_per_token * block_size

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` needs in all layers together."""
        return sum(group.bytes_for(num_tokens) for group in self.groups)

    def tokens_per_node(self, block_size: int) -> int:
        """Tokens of the largest block of any group (K5)."""
        group = self.groups[0]
        return group.tokens_per_block(block_size) * group.blocks_per_node

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the pool (K3): a block of any one group."""
        return max(group.bytes_per_block(block_size) for group in self.groups)
