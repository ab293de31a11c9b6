"""A whole decoder in one native call: embedding, rotary angles, all layers, norm, vocabulary projection.

Between two products a step's weights stream through the processor's caches and evict the interpreter: a model's own
Python, 10 us a layer in an isolated loop, then takes 40 to 60 us, and the code around the layers as much again. Here no
Python runs in between.

Matched by structure: token embedding, layers that are all fused and proved, one rotary embedding, one norm, a packed
vocabulary projection, and forwards that use only known names. Proved by the probe: the same operators run, so the
logits must equal those of the model's own forward bit for bit (`quire.model.prepare`).
Cost of a call: the products and the attention, and about 0.1 ms. Before it one module of the model runs if the
embedding does more than gather packed rows (Gemma's is scaled).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices.cpu.native_attention import batch_handle, handles
from quire.model.cache_keyword import CACHE_KEYWORDS
from quire.model.fused.attention import FusedAttention
from quire.model.fused.fuse import Fused
from quire.model.fused.layer import FusedLayer
from quire.model.fused.norm import RowNorm
from quire.model.fused.rotary import RotaryRows
from quire.model.fused.structure import PackedLayer, forward_names, native_weight, packed_layer
from quire.model.paged_cache import PagedCache
from quire.step import ForwardStep
from quire.torch_threads import one_torch_thread
from quire.weights.linear import PackedEmbedding

__all__ = ["FusedDecoder", "match_decoder"]

_BASE_NAMES = frozenset({
    "embed_tokens", "layers", "norm", "rotary_emb", "config", "num_hidden_layers", "layer_types", "has_sliding_layers",
    "DynamicCache", "get_seq_length", "create_causal_mask", "create_sliding_window_causal_mask", "sliding_window",
    "arange", "copy", "device", "dict", "enumerate", "isinstance", "shape", "torch", "unsqueeze", "getattr",
    "ValueError",
})  # fmt: skip
_HEAD_NAMES = frozenset({
    "lm_head", "model", "config", "vocab_size", "slice_logits_to_keep", "slice", "isinstance", "int", "loss_function",
    "last_hidden_state", "hidden_states", "attentions", *CACHE_KEYWORDS,
})  # fmt: skip
_OUTPUTS = "OutputWithPast"  # ending of the names of output classes


class _Compiled(NamedTuple):
    """A native decoder over a cache's views; it refers to them."""

    decoder: FusedDecoder
    generation: int
    native: Any


class FusedDecoder:
    """The parts of a decoder; called with a step and the cache on which `begin` was called for it."""

    def __init__(
        self,
        embedding: nn.Module,
        rotary: RotaryRows,
        layers: list[FusedLayer],
        norm: RowNorm,
        head: PackedLayer,
    ) -> None:
        self._embedding, self._norm, self._head = embedding, norm, head
        is_packed = type(embedding) is PackedEmbedding
        self._packed_embedding = native_weight(embedding) if is_packed else None
        self._rotary = rotary
        self._layers = [layer.attention for layer in layers if isinstance(layer.attention, FusedAttention)]
        self._blocks = [layer.blocks for layer in layers]

    def __call__(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor | None:
        """Logits [R, vocab_size] of `step.logits_rows`; None if the rotary table has another form."""
        ids, logits_rows = step.input_ids.contiguous(), step.logits_rows.contiguous()
        angles = self._rotary(step.position_ids.contiguous())
        if angles is None:
            return None
        hidden = None if self._packed_embedding is not None else self._embed(ids)
        logits = torch.empty((logits_rows.numel(), self._head.num_outputs), dtype=self._norm.dtype)
        self._native_decoder(cache).run(
            [batch.native_handle or batch_handle(batch) for batch in step.batches],
            step.slot_mappings,
            ids,
            hidden,
            angles.rows,
            angles.cos,
            angles.sin,
            logits_rows,
            logits,
        )
        cache.num_attended += len(self._layers)
        return logits

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's own embedding of ids [T]: [T, width], which the layers overwrite."""
        with torch.inference_mode(), one_torch_thread():
            return self._embedding(ids).contiguous()

    def _native_decoder(self, cache: PagedCache) -> Any:
        """The native decoder over the present views of `cache`, stored in the cache."""
        compiled = cache.compiled
        if compiled is None or compiled.decoder is not self or compiled.generation != cache.generation:
            views, options, tables = [], [], []
            for attention in self._layers:
                layer, settings = attention.layer_and_options
                view, _, option = handles(cache.view(layer), cache.batch(layer), settings)
                views.append(view)
                options.append(option)
                tables.append(cache.table_of(layer))
            embedding = None if self._packed_embedding is None else self._packed_embedding.native
            native = _native.Decoder(
                self._blocks, views, options, tables, embedding, self._norm.native, *self._head.product
            )
            cache.compiled = compiled = _Compiled(self, cache.generation, native)
        return compiled.native


def match_decoder(model: nn.Module, fused: Fused) -> FusedDecoder | None:
    """The model as a fused decoder, to be proved; None if it has another structure, or if a part is not fused."""
    name = getattr(model, "base_model_prefix", "")
    base = model._modules.get(name)
    if (
        base is None
        or set(model._modules) != {name, "lm_head"}
        or set(base._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}
        or not _uses_only(model, _HEAD_NAMES | {name})
        or not _uses_only(base, _BASE_NAMES)
    ):
        return None
    layers = [fused.part_of(layer) for layer in base.get_submodule("layers").children()]
    norm, head = fused.part_of(base.get_submodule("norm")), packed_layer(model.get_submodule("lm_head"))
    if not isinstance(norm, RowNorm) or head is None or head.dtype is not norm.dtype:
        return None
    fused_layers = [
        layer
        for layer in layers
        if isinstance(layer, FusedLayer) and isinstance(layer.attention, FusedAttention)
    ]
    rotary = RotaryRows(base.get_submodule("rotary_emb"), norm.dtype)
    if len(fused_layers) != len(layers) or not fused_layers or not rotary.is_proved():
        return None
    return FusedDecoder(base.get_submodule("embed_tokens"), rotary, fused_layers, norm, head)


def _uses_only(module: nn.Module, known: frozenset[str]) -> bool:
    return all(name in known or name.endswith(_OUTPUTS) for name in forward_names(module))
