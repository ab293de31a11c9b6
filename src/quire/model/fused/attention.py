"""Attention in one native call: q, k and v, their norms, rotary embedding, K and V to their slots, attention, output.

Matched by structure: q, k, v and output as packed linear layers (or q, k and v as one), norms named for q and k, and a
forward that uses only known names; if it names a sigmoid, a gate follows each head of q. The rotation of the embedding
(halves, pairs, none) is left open: the proof chooses one of `rotations` (`fuse`). The layer's number and settings
(scale, window, soft cap, sinks) are those of the original's own call of the attention function
(`PagedCache.attended`).
Cost of a call: the products, the attention, and about 8 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.attention import AttentionOptions
from quire.devices.cpu.native_attention import handles
from quire.model.fused.norm import RowNorm
from quire.model.fused.structure import PackedLayer, can_run_together, forward_names, packed_layers
from quire.model.paged_cache import PagedCache
from quire.spec import LayerSpec

__all__ = ["FusedAttention", "RotaryTable", "match_attention", "rotary_table"]

_ROTATIONS = ("halves", "pairs_half_table", "pairs", "halves_short_table", "none")
_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
# Names that a forward may use besides its own children. An unknown use of positions or values (temperatures, clamps,
# gates) has other names, so the module is not fused.
_FORWARD_NAMES = frozenset({
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "get_interface", "eager_attention_forward", "config",
    "apply_rotary_pos_emb", "update", "layer_idx", "scaling", "sliding_window", "sinks", "attn_logit_softcapping",
    "head_dim", "num_heads", "num_attention_heads", "num_key_value_heads", "rotary_ndims", "use_rope", "is_sliding",
    "use_qk_norm", "qk_layernorm", "q_norm", "k_norm", "q_layernorm", "k_layernorm",
    "shape", "size", "view", "reshape", "transpose", "contiguous", "cat", "torch", "getattr",
    "training", "attention_dropout", "residual_dropout", "dropout", "functional", "nn",
})  # fmt: skip
_GATE_NAMES = frozenset({"chunk", "sigmoid"})


# cos and sin [1, rows, width] of a call, or two None without a rotation.
RotaryTable = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]


def rotary_table(position_embeddings: Any, rows: int, dtype: torch.dtype) -> RotaryTable | None:
    """cos and sin [1, rows, width], contiguous; None if they have another form."""
    if position_embeddings is None:
        return None, None
    if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
        return None
    cos, sin = position_embeddings
    for table in (cos, sin):
        if (
            not isinstance(table, torch.Tensor)
            or table.dtype is not dtype
            or table.shape != (1, rows, cos.shape[-1])
            or not table.is_contiguous()
        ):
            return None
    return cos, sin


@dataclass
class FusedAttention:
    """The parts of an attention module, and what the proof has decided about it."""

    qkv: list[PackedLayer]
    output: PackedLayer
    q_norm: RowNorm | None
    k_norm: RowNorm | None
    gated: bool = False  # each head of q is followed by a gate, whose sigmoid multiplies the head's output

    def __post_init__(self) -> None:
        self.rotation: str | None = None  # how the embedding rotates q and k, once proved
        self.layer: int | None = None
        self.options: AttentionOptions | None = None
        self.num_q_heads = self.head_dim = 0
        self._standalone_block: Any = None

    @property
    def finding(self) -> dict[str, Any] | None:
        """The proof's decision as JSON, for `match_attention` at a later start; None with sinks or slopes, which are
        tensors."""
        if self.options is None or self.options.sinks is not None or self.options.slopes is not None:
            return None
        settings = asdict(self.options)
        del settings["sinks"], settings["slopes"]
        return {
            "rotation": self.rotation,
            "layer": self.layer,
            "options": settings,
            "heads": [self.num_q_heads, self.head_dim],
            "norms": [None if norm is None else norm.finding for norm in (self.q_norm, self.k_norm)],
        }

    def restore_finding(self, finding: dict[str, Any]) -> None:
        """Sets the decision of an earlier proof of the same module."""
        self.rotation, self.layer = finding["rotation"], finding["layer"]
        self.options = AttentionOptions(**finding["options"])
        self.num_q_heads, self.head_dim = finding["heads"]

    @property
    def width(self) -> int:
        return self.output.num_outputs

    @property
    def dtype(self) -> torch.dtype:
        return self.output.dtype

    @property
    def layer_and_options(self) -> tuple[int, AttentionOptions]:
        """Its layer's number and settings, once known."""
        assert self.layer is not None
        assert self.options is not None
        return self.layer, self.options

    def block(self, around: Any, rotation: str) -> Any:
        return _native.AttentionBlock(
            around,
            [layer.product for layer in self.qkv],
            None if self.q_norm is None else self.q_norm.native,
            None if self.k_norm is None else self.k_norm.native,
            self.q_norm is None or self.q_norm.width == self.head_dim,
            rotation,
            *self.output.product,
            self.num_q_heads,
            self.gated,
        )

    def run(self, block: Any, hidden: torch.Tensor, cache: PagedCache, table: RotaryTable) -> torch.Tensor:
        """Runs hidden [1, T, width], contiguous, through `block`; K and V are in their slots afterwards."""
        layer, settings = self.layer_and_options
        out = torch.empty_like(hidden)
        view, batch, options = handles(cache.view(layer), cache.batch(layer), settings)
        block.run(view, batch, options, cache.slots(layer), *table, hidden, out)
        cache.num_attended += 1
        return out

    def serves(self, hidden: Any, cache: object, mask: Any) -> bool:
        return (
            type(cache) is PagedCache
            and mask is None
            and hidden.dtype is self.output.dtype
            and hidden.dim() == 3
            and hidden.shape[0] == 1
            and hidden.is_contiguous()
        )

    def __call__(self, hidden: torch.Tensor, cache: PagedCache, table: RotaryTable) -> torch.Tensor:
        """The module's output [1, T, width]. table: of `rotary_table`."""
        if self._standalone_block is None:
            self._standalone_block = self.block(_native.Surroundings(None, None, None), self.proved_rotation)
        return self.run(self._standalone_block, hidden, cache, table)

    @property
    def proved_rotation(self) -> str:
        assert self.rotation is not None
        return self.rotation

    def rotations(self, table_width: int) -> list[str]:
        """The rotations that fit an embedding table of so many columns; 0: there is no table."""
        fitting = []
        for rotation in _ROTATIONS:
            turned = table_width * (2 if rotation == "halves_short_table" else 1)
            if rotation == "none" or 0 < turned <= self.head_dim:
                fitting.append(rotation)
        return fitting

    def run_rotated(
        self, rotation: str, hidden: torch.Tensor, cache: PagedCache, table: RotaryTable
    ) -> torch.Tensor:
        """`__call__` with this rotation."""
        block = self.block(_native.Surroundings(None, None, None), rotation)
        return self.run(block, hidden, cache, table)

    def fit(self, layer: int, options: AttentionOptions, shape: LayerSpec) -> bool:
        """Set the layer's number and settings; False, without a change, if the parts do not fit its shape."""
        kv_width = shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim)
        num_q_heads, rest = divmod(self._all_width() - kv_width, shape.k_head_dim * (2 if self.gated else 1))
        if (
            rest
            or (self.gated and (len(self.qkv) != 3 or shape.k_head_dim != shape.v_head_dim))
            or num_q_heads < 1
            or num_q_heads % shape.num_kv_heads
            or self.output.num_inputs != num_q_heads * shape.v_head_dim
        ):
            return False
        if self.q_norm is not None and self.k_norm is not None:
            heads = 1 if self.q_norm.width == shape.k_head_dim else shape.num_kv_heads
            if self.k_norm.width != heads * shape.k_head_dim:
                return False
            if heads > 1 and self.q_norm.width != num_q_heads * shape.k_head_dim:
                return False
        self.layer, self.options = layer, options
        self.num_q_heads, self.head_dim = num_q_heads, shape.k_head_dim
        return True

    def _all_width(self) -> int:
        return sum(layer.num_outputs for layer in self.qkv)


def match_attention(
    module: nn.Module, norms: Mapping[nn.Module, RowNorm], finding: dict[str, Any] | None = None
) -> FusedAttention | None:
    """The module as fused attention, to be proved; None if it has another structure.

    norms: matched norms, among them those of q and k. finding: result of an earlier proof of the same module.
    """
    layers, names_used = packed_layers(module), forward_names(module)
    gated = "sigmoid" in names_used
    known = _FORWARD_NAMES | _GATE_NAMES if gated else _FORWARD_NAMES
    if len(layers) not in (2, 4) or names_used - set(layers) - known:
        return None
    names = next((pair for pair in _NORM_NAMES if all(hasattr(module, name) for name in pair)), ())
    own_norms = {
        name: getattr(module, name) for name in names if isinstance(getattr(module, name), nn.Module)
    }
    others = [
        name
        for name, child in module.named_children()
        if name not in layers and name not in own_norms and not isinstance(child, nn.Dropout | nn.Identity)
    ]
    if others:
        return None
    output_name = next((name for name in ("o_proj", "out_proj", "dense") if name in layers), None)
    if output_name is None:
        return None
    output = layers.pop(output_name)
    matched = [norms.get(norm) for norm in own_norms.values()]
    if any(norm is None or norm.dtype is not output.dtype for norm in matched) or any(
        layer.dtype is not output.dtype for layer in layers.values()
    ):
        return None
    if any(layer.num_inputs != output.num_outputs for layer in layers.values()):
        return None  # it reads another input than the residual
    if not can_run_together(list(layers.values())):
        return None
    q_norm, k_norm = matched if len(matched) == 2 else (None, None)
    attention = FusedAttention(list(layers.values()), output, q_norm, k_norm, gated)
    if finding is not None:
        attention.restore_finding(finding)
    return attention
