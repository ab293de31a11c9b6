"""A whole decoder in a few calls: embedding, all layers in one native call, norm, vocabulary projection.

Between two products a step's weights stream through the processor's caches and drive the interpreter out of them: what
a model's own Python costs a layer (10 us in a loop of its own) becomes 40 to 60 us, and as much again for what stands
around the layers. Here nothing of it runs in between.

Matched by structure: token embedding, layers that are all fused and proved, one rotary embedding, one norm, a packed
vocabulary projection, and forwards that name nothing beyond these. Proved by the probe: the same operators run, so
the logits must be the model's own forward's bit for bit (`quire.model.prepare`).
Cost of a call: the products and the attention, and about 0.3 ms.
"""

from __future__ import annotations

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.attention.native import handles
from quire.model.fused.attention import rotary_table
from quire.model.fused.fuse import Fused
from quire.model.fused.layer import FusedLayer
from quire.model.fused.norm import RowNorm
from quire.model.fused.rotary import RotaryRows
from quire.model.fused.structure import forward_names, packed_layer
from quire.model.paged_cache import PagedCache
from quire.model.step import ForwardStep

__all__ = ["FusedDecoder", "match_decoder"]

_BASE_NAMES = frozenset({
    "embed_tokens", "layers", "norm", "rotary_emb", "config", "num_hidden_layers", "layer_types", "has_sliding_layers",
    "DynamicCache", "get_seq_length", "create_causal_mask", "create_sliding_window_causal_mask", "sliding_window",
    "arange", "copy", "device", "dict", "enumerate", "isinstance", "shape", "torch", "unsqueeze", "getattr",
    "ValueError",
})  # fmt: skip
_HEAD_NAMES = frozenset({
    "lm_head", "model", "config", "vocab_size", "slice_logits_to_keep", "slice", "isinstance", "int", "loss_function",
    "last_hidden_state", "hidden_states", "past_key_values", "attentions",
})  # fmt: skip
_OUTPUTS = "OutputWithPast"  # what the classes of their outputs are called, in the end


class FusedDecoder:
    """The parts of a decoder; called with a step and the cache that has begun it."""

    def __init__(
        self,
        embedding: nn.Module,
        rotary: nn.Module,
        layers: list[FusedLayer],
        norm: RowNorm,
        head: nn.Module,
    ) -> None:
        self._embedding, self._norm, self._head = embedding, norm, head
        self._rotary = RotaryRows(rotary)
        self._layers = [layer.attention for layer in layers]
        self._blocks = [layer.blocks for layer in layers]
        self._dtype = norm.dtype

    def __call__(self, step: ForwardStep, cache: PagedCache) -> torch.Tensor | None:
        """Logits [R, vocab_size] of `step.logits_rows`; None where the rotary table is not of the usual form."""
        hidden = self._embedding(step.input_ids)
        num_rows = hidden.shape[0]
        angles = self._rotary(hidden, step.position_ids)  # whose addresses the table holds
        table = rotary_table(angles, num_rows, self._dtype)
        if table is None:
            return None
        given, slots = [], []
        for attention in self._layers:
            layer, options = attention.place
            given.append(handles(cache.view(layer), cache.plan(layer), options))
            slots.append(cache.slots(layer).data_ptr())
        _native.run_layers(self._blocks, given, slots, num_rows, *table, hidden.data_ptr())
        cache.num_attended += len(self._layers)
        if step.logits_rows.numel() != num_rows:
            hidden = hidden[step.logits_rows]
        return self._head(self._norm(hidden))


def match_decoder(model: nn.Module, fused: Fused) -> FusedDecoder | None:
    """The model as a fused decoder, to be proved; None if it is something else, or if not all of it is fused."""
    name = getattr(model, "base_model_prefix", "")
    base = model._modules.get(name)
    if (
        base is None
        or set(model._modules) != {name, "lm_head"}
        or set(base._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}
        or not _names_only(model, _HEAD_NAMES | {name})
        or not _names_only(base, _BASE_NAMES)
    ):
        return None
    layers = [fused.part_of(layer) for layer in base.get_submodule("layers").children()]
    norm, head = fused.part_of(base.get_submodule("norm")), model.get_submodule("lm_head")
    if not isinstance(norm, RowNorm) or packed_layer(head) is None:
        return None
    found = [layer for layer in layers if isinstance(layer, FusedLayer)]
    if len(found) != len(layers) or not found:
        return None
    return FusedDecoder(
        base.get_submodule("embed_tokens"), base.get_submodule("rotary_emb"), found, norm, head
    )


def _names_only(module: nn.Module, known: frozenset[str]) -> bool:
    return all(name in known or name.endswith(_OUTPUTS) for name in forward_names(module))
