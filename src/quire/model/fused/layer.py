"""A whole decoder layer: norm, attention, norm, residual; norm, MLP, norm, residual. Two native calls.

A state layer has a mixer in place of the attention.
Matched by structure: a fused attention and a fused MLP, norms whose names give their places, perhaps a factor on what
is added to the residual, dropouts, nothing else. The proof compares what the layer adds to the residual, on rows no
larger than that, so that the residual does not hide it (`fused_proof`).
Cost of a call: the two native calls and about 12 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.model.fused.attention import FusedAttention, RotaryTable
from quire.model.fused.mixer import FusedMixer
from quire.model.fused.mlp import FusedMlp
from quire.model.fused.norm import RowNorm
from quire.model.fused.structure import forward_names
from quire.model.paged_cache import PagedCache

__all__ = ["FusedLayer", "match_layer"]

# The norms before and after the attention, before and after the MLP, by the sorted names of those that exist.
_PLACES: dict[tuple[str, ...], tuple[str | None, str | None, str | None, str | None]] = {
    tuple(sorted(filter(None, places))): places
    for places in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        ("attention_layernorm", None, "feedforward_layernorm", None),
        ("input_layernorm", None, "pre_feedforward_layernorm", None),
        ("ln_1", None, "ln_2", None),
        ("operator_norm", None, "ffn_norm", None),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    )
}  # fmt: skip
_FORWARD_NAMES = frozenset({
    "residual_multiplier", "use_parallel_residual",
    # Names that a layer of a hybrid model uses: its kind, and the parts of the other kinds.
    "block_type", "layer_type", "linear_attn", "self_attn", "mamba", "conv", "is_attention_layer", "has_experts",
    "block_sparse_moe",
})  # fmt: skip


@dataclass
class FusedLayer:
    """The parts of a decoder layer."""

    attention: FusedAttention | FusedMixer
    mlp: FusedMlp
    norms: tuple[RowNorm | None, RowNorm | None, RowNorm | None, RowNorm | None]
    residual_scale: float

    def __post_init__(self) -> None:
        self._blocks: tuple[Any, Any] | None = None

    def serves(self, hidden: Any, cache: object, mask: Any) -> bool:
        return self.attention.serves(hidden, cache, mask)

    def __call__(self, hidden: torch.Tensor, cache: PagedCache, table: RotaryTable) -> torch.Tensor:
        """The layer's output [1, T, width]. table: of `rotary_table`."""
        return self._run(self.blocks, hidden, cache, table)

    @property
    def blocks(self) -> tuple[Any, Any]:
        """The native calls of its two halves, once proved."""
        if self._blocks is None:
            self._blocks = self._build(self.attention.proved_rotation)
        return self._blocks

    def _build(self, rotation: str) -> tuple[Any, Any]:
        before, after, before_mlp, after_mlp = (None if norm is None else norm.native for norm in self.norms)
        return (
            self.attention.block(_native.Surroundings(before, after, self.residual_scale), rotation),
            self.mlp.block(_native.Surroundings(before_mlp, after_mlp, self.residual_scale)),
        )

    def _run(
        self, blocks: tuple[Any, Any], hidden: torch.Tensor, cache: PagedCache, table: RotaryTable
    ) -> torch.Tensor:
        attention, mlp = blocks
        out = self.attention.run(attention, hidden, cache, table)
        mlp.run(out, out)
        return out


def match_layer(
    module: nn.Module,
    attention: Mapping[nn.Module, FusedAttention | FusedMixer],
    mlps: Mapping[nn.Module, FusedMlp],
    norms: Mapping[nn.Module, RowNorm],
) -> FusedLayer | None:
    """The module as a fused layer of matched parts, to be proved; None if it has another structure."""
    children = dict(module.named_children())
    found_norms = {name: norms[child] for name, child in children.items() if child in norms}
    attentions = [attention[child] for child in children.values() if child in attention]
    found_mlps = [mlps[child] for child in children.values() if child in mlps]
    dropouts = [child for child in children.values() if isinstance(child, nn.Dropout)]
    places = _PLACES.get(tuple(sorted(found_norms)))
    if (
        places is None
        or len(attentions) != 1
        or len(found_mlps) != 1
        or len(children) != len(found_norms) + 2 + len(dropouts)
        or module._parameters
        or forward_names(module) - set(children) - _FORWARD_NAMES
    ):
        return None
    width, dtype = attentions[0].width, attentions[0].dtype
    parts = [*found_norms.values(), found_mlps[0]]
    if any(part.width != width or part.dtype is not dtype for part in parts):
        return None
    scale = float(getattr(module, "residual_multiplier", 1.0))
    first, second, third, fourth = (None if place is None else found_norms[place] for place in places)
    return FusedLayer(attentions[0], found_mlps[0], (first, second, third, fourth), scale)
