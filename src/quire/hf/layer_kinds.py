"""Each kind of transformers' attention layers, with its keys and values on rows.

full        all tokens
sliding     those a window (or a chunk) can still see; more while the past is recorded for `crop`
and state   either of them, beside a state (Mamba, convolutions, delta-net), which stays transformers' own
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from quire.hf.layers import LayerOwner, RowLayer

__all__ = ["StateAndRows", "row_layer"]

# What `LinearAttentionLayer` keeps, beside its number of states.
_STATE_FIELDS = (
    "conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized",
    "has_previous_state", "conv_kernel_size", "device", "dtype", "record_past",
)  # fmt: skip


class FullRowLayer(RowLayer, DynamicLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`DynamicLayer` on rows."""


class SlidingRowLayer(RowLayer, DynamicSlidingWindowLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`DynamicSlidingWindowLayer` on rows."""


class StateAndRows(RowLayer):
    """A layer that keeps a state beside its keys and values: the state is `LinearAttentionLayer`'s."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if len(args) == 2:  # keys and values
            RowLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]

    def activate_past_recording(self) -> None:
        RowLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)  # type: ignore[arg-type]
        RowLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)  # type: ignore[arg-type]
        RowLayer.reset(self)

    def reorder_states(self, beam_idx: torch.LongTensor) -> None:
        """`reorder_cache` of the states alone."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]

    def copy_states(self, other: StateAndRows) -> None:
        """Have copies of the states of `other`."""
        for name in _STATE_FIELDS:
            setattr(self, name, copy.deepcopy(getattr(other, name)))


class FullRowAndStateLayer(StateAndRows, LinearAttentionAndFullAttentionLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`LinearAttentionAndFullAttentionLayer` on rows."""


class SlidingRowAndStateLayer(StateAndRows, LinearAttentionAndSlidingWindowAttentionLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`LinearAttentionAndSlidingWindowAttentionLayer` on rows."""


_KINDS: dict[type, Any] = {
    DynamicLayer: FullRowLayer,
    DynamicSlidingWindowLayer: SlidingRowLayer,
    LinearAttentionAndFullAttentionLayer: FullRowAndStateLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: SlidingRowAndStateLayer,
}


def row_layer(layer: Any, cache: LayerOwner, index: int) -> Any:
    """What serves in the place of `layer` of a DynamicCache: on rows where it keeps keys and values, else itself.

    Given a layer on rows, another empty one of its kind.
    """
    kind = type(layer) if isinstance(layer, RowLayer) else _KINDS.get(type(layer))
    if kind is None:
        return layer
    options: dict[str, Any] = {}
    if issubclass(kind, StateAndRows):
        options["number_of_states"] = cast(Any, layer).number_of_states
    window = int(getattr(layer, "sliding_window", 0) or 0)
    if window:
        options["sliding_window"] = window
    new = kind(**options)
    new.attach(cache, index, window)
    return new
