"""The cache that is given to a transformers model: writes K and V to their slots and keeps no history of its own.

`update()` scatters the new keys and values into the paged storage and returns its very arguments, tagged with their
layer; `attention_function` finds the tag on its arguments and reads the pages. By the tag a layer finds K and V that it
shares with another layer, and a model that alters K or V in between is detected. Not an owner of blocks: each step
brings its slots.

Invariants
    M1  between `begin` and `end` there is exactly one step; outside of it `update` refuses.
    M2  only layers that store KV are written, with the shape the spec states.

Cost: one back end write per layer and forward.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from quire.attention import AttentionBackend, AttentionOptions
from quire.devices import Device
from quire.errors import ArgumentError, UnsupportedModelError
from quire.memory.state_slots import StateSlots
from quire.memory.storage import Storage
from quire.memory.view import KVView
from quire.spec import KVSpec, LayerSpec
from quire.step import AttentionBatch, ForwardStep, RecurrenceStep

__all__ = [
    "KVTag",
    "PagedCache",
    "empty_model_cache",
    "model_cache_class",
    "paged_cache_class",
    "rows_to_store",
    "tag_of",
]

_TAG = "_quire_kv"


@dataclass(frozen=True, eq=False)
class KVTag:
    """The cache and layer of a K or V tensor."""

    cache: PagedCache
    layer: int


def tag_of(tensor: torch.Tensor) -> KVTag | None:
    """The tag `PagedCache.update` left on this very tensor object; None on any other, a view of it included."""
    return getattr(tensor, _TAG, None)


def rows_to_store(layer: LayerSpec, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The K and V that a model gives its cache, [1, heads, T, width] each, in the layout of the back ends' `write`: [T,
    heads, width].

    For a latent layer: the latent with its rotary part behind it, and the latent as a view of the same rows.
    """
    if layer.latent:
        rows = torch.cat((k, v), dim=-1)[0].transpose(0, 1)
        return rows, rows[..., : layer.v_head_dim]
    return k[0].transpose(0, 1), v[0].transpose(0, 1)


class _PagedLayer:
    """A layer's empty entry in transformers' list of layers: its K and V lie in pages."""

    is_initialized = False
    keys = values = None


class PagedCache(Cache):
    """The cache of one forward after another, over one storage.

    Args:
        spec: the model's KV shape.
        storage: where K and V go.
        backend: its attention writes and reads them; `self.backend` may be a wrapper of it.
        model_type: for messages.
        states: the states of state layers, for a model that has some.
    """

    def __init__(
        self,
        spec: KVSpec,
        storage: Storage,
        backend: Device,
        model_type: str,
        states: StateSlots | None = None,
    ) -> None:
        Cache.__init__(self, layers=[_PagedLayer() for _ in spec.layers])  # type: ignore[list-item]
        self.spec = spec
        self.storage = storage
        self.backend: AttentionBackend = backend
        self.device = backend
        self.model_type = model_type
        self.states = states
        self.options: dict[tuple[Any, ...], AttentionOptions] = {}  # of `attention_function`
        self.num_attended = 0  # attention calls of the current forward: what the probe counts
        # Layer and settings by module, if a caller wants them recorded.
        self.attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] | None = None
        self.latents: dict[torch.nn.Module, Any] = {}  # of `attention_function`: the heads of latent modules
        self._tags = [KVTag(self, layer) for layer in range(len(spec.layers))]
        self._table_of = {layer: storage.table_of(layer) for group in spec.groups for layer in group.layers}
        self.key_offsets: Mapping[int, torch.Tensor] = {}  # by layer, of keys in codes: see `KVView.k_offset`
        self.compiled: Any = None  # `FusedDecoder`'s data over the views of this cache
        self._views: dict[int, KVView] = {}  # by layer that attends
        self.generation = -1  # another number whenever `view` answers with others than before
        self._step: ForwardStep | None = None

    def begin(self, step: ForwardStep) -> None:
        """Take over the step's batches and slot mappings, one for each of the storage's tables."""
        if len(step.batches) != self.storage.num_tables:
            raise ArgumentError(
                f"expected a batch for each of {self.storage.num_tables} tables, got {len(step.batches)}"
            )
        if not self._views or self.generation != self.storage.generation:
            self.generation = self.storage.generation
            self._views = {
                number: self._with_offset(self.storage.view(number), number)
                for number, layer in enumerate(self.spec.layers)
                if layer.attends
            }
        self._step, self.num_attended = step, 0

    def _with_offset(self, view: KVView, layer: int) -> KVView:
        offset = self.key_offsets.get(self.spec.stored_in(layer)) if view.k_scale is not None else None
        return view if offset is None else replace(view, k_offset=offset)

    def end(self) -> None:
        """Forget the step."""
        self._step = None

    def close(self) -> None:
        """Drop all references to the storage's memory; the object may live on."""
        self._views, self.generation, self.compiled = {}, -1, None

    def view(self, layer: int) -> KVView:
        return self._views[layer]

    def table_of(self, layer: int) -> int:
        """The index among a step's tables of the table of `layer`, which stores KV."""
        return self._table_of[layer]

    def batch(self, layer: int) -> AttentionBatch:
        """The attention batch of the current step for `layer`, a layer that stores KV."""
        assert self._step is not None  # M1
        return self._step.batches[self._table_of[layer]]

    def slots(self, layer: int) -> torch.Tensor:
        """The current step's slots for `layer`, int64 [T]."""
        assert self._step is not None  # M1
        return self._step.slot_mappings[self._table_of[layer]]

    # For state layers (`StateSource`).

    @property
    def state_step(self) -> RecurrenceStep | None:
        return None if self._step is None else self._step.states

    def state_of(self, layer_index: int) -> Mapping[str, torch.Tensor]:
        if self.states is None:
            raise ArgumentError(
                f"expected a storage with state slots for layer {layer_index}, got one without"
            )
        return self.states.layer_fields(layer_index)

    def update(  # type: ignore[override]  # the base class also takes None
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K `[1, Hkv, T, Dk]` and V `[1, Hkv, T, Dv]`; returns them as given, tagged.

        For a latent layer: the latents `[1, 1, T, rank]` and their rotary parts.
        """
        slots = self.check_new(key_states, value_states, layer_idx, None)
        rows = rows_to_store(self.spec.layers[layer_idx], key_states, value_states)
        self.backend.write(self._views[layer_idx], *rows, slots)
        for tensor in (key_states, value_states):
            setattr(tensor, _TAG, self._tags[layer_idx])
        return key_states, value_states

    def check_new(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, num_tokens: int | None
    ) -> torch.Tensor:
        """The step's slots for the layer. num_tokens: the tokens of K and V; None: all of the step. *raises:*
        ArgumentError, UnsupportedModelError: K or V of a layer or shape that the spec does not have."""
        if self._step is None:
            raise ArgumentError("expected a step before PagedCache.update; PreparedModel.forward begins it")
        table = self._table_of.get(layer_idx)
        if table is None:
            raise UnsupportedModelError(
                f"model type {self.model_type}: layer {layer_idx} stores K and V, but by its config it shares another "
                f"layer's, or the model has only {len(self.spec.layers)} layers"
            )
        slots, layer = self._step.slot_mappings[table], self.spec.layers[layer_idx]
        k_width, v_width = layer.input_dims
        expected_k = (1, layer.num_kv_heads, num_tokens or slots.numel(), k_width)
        expected_v = (*expected_k[:3], v_width)
        if key_states.shape != expected_k or value_states.shape != expected_v:
            raise UnsupportedModelError(
                f"model type {self.model_type}: expected K {list(expected_k)} and V {list(expected_v)} in layer "
                f"{layer_idx} from its config, got {list(key_states.shape)} and {list(value_states.shape)}"
                + ("; this transformers expands latents before it stores them" if layer.latent else "")
            )
        return slots

    # Queries of models before they attend: answered as by an empty cache, since positions come with the step.

    def get_seq_length(self, layer_idx: int | None = None) -> Any:  # type: ignore[override]
        """0; if a layer is named, int64 [T]: the difference between each row's position and its index in the step.

        Llama 4's attention computes positions of its own, `arange(T) + get_seq_length(layer)`, for its temperature.
        """
        if layer_idx is None or self._step is None:
            return 0
        positions = self._step.position_ids
        return positions - torch.arange(positions.numel(), device=positions.device)

    def __len__(self) -> int:
        return len(self.layers)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.span.kind != "full" for layer in self.spec.layers]


def paged_cache_class(model: PreTrainedModel) -> type[PagedCache]:
    """`PagedCache`, as a subclass of the model's own cache class too."""
    model_class = model_cache_class(model)
    if model_class is DynamicCache:
        return PagedCache
    return type(PagedCache.__name__, (PagedCache, model_class), {})


def model_cache_class(model: PreTrainedModel) -> type[Cache]:
    """The cache class that the model requires: DynamicCache, or a class that its own file defines (MiniMax)."""
    module = sys.modules[type(model).__module__]
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, DynamicCache) and value.__module__ == module.__name__
    ]
    return classes[0] if len(classes) == 1 else DynamicCache


def empty_model_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of the model's own class, as `generate` begins with."""
    cache_class = model_cache_class(model)
    return DynamicCache(config=model.config) if cache_class is DynamicCache else cache_class()
