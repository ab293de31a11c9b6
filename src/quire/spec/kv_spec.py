"""What a token costs: the shape of a model's KV cache, layer by layer and group by group.

A `KVSpec` knows no tensors and no blocks in use; it is arithmetic over a model's config, and works from a
`config.json` alone. It is what a planner reads and what `quire.Cache` is built from.

Invariants
    K1  every layer that stores KV belongs to exactly one group; a layer that reads another layer's KV
        (`shares_kv_with`), or keeps a state alone, belongs to none and costs nothing per token.
    K2  the layers of a group have one span rule, one shape, and one format of K and one of V.
    K3  `block_bytes(block_size)` is the largest `bytes_per_block` of any group, so that one pool of blocks of
        that size serves them all. The group with the largest token has `block_size` tokens to a block; one whose token
        is smaller may have several times as many (`block_factor`), where else there were too many groups.
    K4  what blocks of K3 take beyond the tokens in them (a group's token may be smaller than another's) is at most
        5 % of a sequence, short or long, wherever groups of whole layers can be chosen so.
    K5  `block_factor * blocks_per_node` is the same for all groups: a node of the prefix tree is the tokens of the
        largest block, and whole blocks of each group.

Cost: every call is O(number of layers), but for the first that asks for `groups`: O(layers x kinds of layers).
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
MAX_FACTOR = 8  # of a block's tokens: as many are copied at a branch, and told of and stored as one
_LONG = 1 << 17  # tokens of a sequence whose windows hold next to nothing of it


@dataclass(frozen=True)
class KVGroup:
    """Layers with one span rule and one shape, which share a block table.

    most_layers: of any group of this kind; the last one may have fewer. block_factor, blocks_per_node: K3 and K5.
    """

    index: int
    layers: tuple[int, ...]
    most_layers: int
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
        """What each of the layers is."""
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
        """As `LayerSpec.row_elements`, of the model's dtype."""
        return self.layer.row_elements(self.dtype_bytes)

    @property
    def bytes_per_token(self) -> int:
        return max(1, len(self.layers)) * self.num_kv_heads * sum(self.row_elements) * self.dtype_bytes

    def tokens_per_block(self, block_size: int) -> int:
        """Of its blocks, where those of the group with the largest token have `block_size`."""
        return block_size * self.block_factor

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * self.tokens_per_block(block_size)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes this group has to keep for one sequence of `num_tokens` (a window keeps its window)."""
        return self.bytes_per_token * self.span.num_kept(num_tokens)


def _tokens_alone(dtype_bytes: int) -> KVGroup:
    """Of a model of states alone: its blocks stand for tokens, which the prefix tree finds states by, and hold nothing.
    A token is counted as one element, so that blocks have a size."""
    return KVGroup(
        index=0,
        layers=(),
        most_layers=1,
        span=Span(),
        num_kv_heads=1,
        k_head_dim=1,
        v_head_dim=0,
        dtype_bytes=dtype_bytes,
    )


@dataclass(frozen=True)
class _Split:
    """One way to gather layers into groups. kinds: layers of a group and its block factor. taken: how many times the
    bytes of the tokens in them the blocks take (K4). node: the largest factor."""

    kinds: dict[LayerSpec, tuple[int, int]]
    taken: float
    num_groups: int
    node: int

    @property
    def is_dense(self) -> bool:
        return self.taken <= 1 + MAX_PADDING and self.num_groups <= MAX_GROUPS

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """The lowest is the best."""
        cost = 0.0 if self.is_dense else self.taken + self.num_groups / 200
        return not self.is_dense, cost, self.num_groups, self.node


def _excess(taken: float, used: int) -> float:
    """How much more is taken than used, where that is more than K4 allows; else 0."""
    return 0.0 if taken <= (1 + MAX_PADDING) * used else taken / used


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
    states: tuple[
        StateSpec, ...
    ] = ()  # of layers that keep a state per sequence, beside K and V or in their place
    in_pieces: bool = False  # see `for_pieces`

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if not self.stores_kv and not self.states:
            raise ArgumentError("expected at least one layer that stores KV or a state, got none")

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
            states=state_specs(model),
        )

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> KVSpec:
        """A spec of equal full-attention layers."""
        layer = LayerSpec(Span(), num_kv_heads, head_dim, head_dim)
        return cls(layers=(layer,) * num_layers, dtype=dtype)

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups, full-attention ones first (group 0 is a full one where the model has any).

        As few as leave blocks of one size hardly padded (K4): a layer with a larger token shares its block with fewer
        others. Of 50 windowed layers and 10 full ones whose token takes half as much, groups of 5 and one of 10. Where
        that makes too many, blocks of a small group have more tokens: of 31 windowed layers and one full one, groups of
        8 and one of a single layer with 8 times as many tokens to a block."""
        kinds: dict[LayerSpec, list[int]] = {}  # by what is equal in the layers of a group (K2)
        for index, layer in enumerate(self.layers):
            if layer.stores_kv:
                kinds.setdefault(replace(layer, index_of=None), []).append(index)
        if not kinds:
            return (_tokens_alone(self.dtype_bytes),)
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
                        most_layers=size,
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
        """The same for a storage whose blocks have a place in each layer of a group, as large as the largest group's
        (virtual): groups whose blocks take as much in every layer, where that wastes less."""
        return self if self.in_pieces else replace(self, in_pieces=True)

    def _split(self, num_layers: dict[LayerSpec, int]) -> dict[LayerSpec, tuple[int, int]]:
        """Layers of a group and its `block_factor`, for each kind of layer: of the splits that keep K4 with blocks of
        equal tokens the one with the fewest groups. If none does, of those with more tokens to some blocks; else the
        one with the least padding, where a group more (a table more in each step) counts as much as 1/2 % of
        padding."""
        found: list[_Split] = []
        for node in range(1, MAX_FACTOR + 1):
            found += self._splits(num_layers, node)
            if node == 1 and any(one.is_dense for one in found):
                break
        return min(found, key=lambda one: one.rank).kinds

    def _splits(self, num_layers: dict[LayerSpec, int], node: int) -> list[_Split]:
        """Those in which the largest block has `node` times the tokens of the smallest, one for each size of a
        block."""
        # Elements that a token of a layer takes as it is stored.
        widths = {kind: kind.num_kv_heads * sum(kind.row_elements(self.dtype_bytes)) for kind in num_layers}
        factors = [factor for factor in range(1, node + 1) if node % factor == 0]
        found: list[_Split] = []
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
                    key=lambda one: (_excess(one[0] * block_width / one[1], num * widths[kind]), *one),
                )
                split[kind] = (-(-num // num_groups), factor)
            splits.append((split, block_width))
        if self.in_pieces:
            # One piece for each of as many layers, as wide as the widest; of narrower layers with more tokens in it.
            piece = max(widths.values())
            tokens = {kind: max(one for one in factors if one * widths[kind] <= piece) for kind in num_layers}
            for size in range(1, max(num_layers.values()) + 1):
                split = {kind: (min(size, num_layers[kind]), tokens[kind]) for kind in num_layers}
                splits.append((split, size * piece))
        for split, block_width in splits:
            chosen = [factor for _, factor in split.values()]
            if min(chosen) != 1 or math.lcm(*chosen) != node:
                continue
            if self.in_pieces:
                most = max(size for size, _ in split.values())
                block_width = sum(
                    max(widths[kind] * factor for kind, (size, factor) in split.items() if size > at)
                    for at in range(most)
                )
            counts = {kind: -(-num_layers[kind] // size) for kind, (size, _) in split.items()}
            taken = {kind: counts[kind] * block_width / factor for kind, (_, factor) in split.items()}
            most_taken = max(
                sum(taken[kind] * kind.span.num_kept(num_tokens) for kind in num_layers)
                / sum(num_layers[kind] * widths[kind] * kind.span.num_kept(num_tokens) for kind in num_layers)
                for num_tokens in (1, _LONG)
            )
            found.append(_Split(split, most_taken, sum(counts.values()), node))
        return found

    def stored_in(self, layer: int) -> int:
        """The layer whose KV decoder layer `layer` reads: itself, or the one it shares with.

        *raises:* ArgumentError: there is no such layer.
        """
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(f"expected a layer of 0 to {len(self.layers) - 1}, got {layer}")
        owner = self.layers[layer].shares_kv_with
        return layer if owner is None else owner

    @property
    def stores_kv(self) -> bool:
        """Whether any layer keeps keys and values; not in a model of states alone."""
        return any(layer.stores_kv for layer in self.layers)

    @property
    def has_indexer(self) -> bool:
        """Whether layers choose the tokens they attend to, by keys that are kept beside K and V (DSA)."""
        return any(layer.index_of is not None for layer in self.layers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the states of one sequence, and of one checkpoint, in all layers together; however long it is."""
        return sum(state.bytes_per_sequence for state in self.states)

    @property
    def dtype_bytes(self) -> int:
        return format_of(self.dtype).num_bytes

    @property
    def plain(self) -> KVSpec:
        """The same with K and V in the model's dtype."""
        if not any(layer.k_format or layer.v_format for layer in self.layers):
            return self
        return replace(self, layers=tuple(replace(one, k_format="", v_format="") for one in self.layers))

    @property
    def kv_dtype(self) -> str:
        """What K and V are stored in: the dtype's name, or as `kv_dtype` has it where layers have formats, in layers'
        order: "int8", "int8 and bfloat16"."""
        return " and ".join(self._layers_by_dtype) or self.dtype

    @property
    def kept_in(self) -> str:
        """The same for people, with the layers' numbers where they differ: "bfloat16 (layers 0-1, 5) and int8 (layers
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
        found: dict[str, list[int]] = {}
        for number, layer in enumerate(self.layers):
            if layer.stores_kv:
                found.setdefault(layer.kv_dtype(self.dtype), []).append(number)
        return found

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

    def tokens_per_node(self, block_size: int) -> int:
        """Of the largest block of any group (K5)."""
        group = self.groups[0]
        return group.tokens_per_block(block_size) * group.blocks_per_node

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the pool (K3): a block of any one group."""
        return max(group.bytes_per_block(block_size) for group in self.groups)
