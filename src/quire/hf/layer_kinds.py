"""The kinds of transformers' cache layers, with keys and values on rows and states counted.

full        all tokens
sliding     tokens that a window (or a chunk) can still see; more while the past is recorded for `crop`
state       only a state (Mamba, convolutions, delta-net)
and state   full or sliding, and a state
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol, cast

from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from quire.errors import ArgumentError
from quire.hf.layers import LayerOwner, RowLayer
from quire.hf.state_layers import BoundStates, StateOwner

__all__ = ["bound_layer"]


class _Owner(LayerOwner, StateOwner, Protocol):
    """A cache of all kinds of layers."""


class FullRowLayer(RowLayer, DynamicLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`DynamicLayer` on rows."""


class SlidingRowLayer(RowLayer, DynamicSlidingWindowLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`DynamicSlidingWindowLayer` on rows."""


class StateLayer(BoundStates, LinearAttentionLayer):
    """`LinearAttentionLayer`, counted."""

    def attach(self, cache: StateOwner, index: int, window: int) -> None:
        """Makes it layer `index` of `cache`; a state has no window."""
        self.attach_states(cache, index)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        self.open_states(*args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop_states(tokens_to_remove)
        self.crop_states(tokens_to_remove)

    def reset(self) -> None:
        self.reset_states()

    def reorder_cache(self, beam_idx: Any) -> NoReturn:
        raise ArgumentError(
            "expected reorder_cache of the whole QuireCache: its layers share one memory; got one layer"
        )

    def offload(self) -> NoReturn:
        raise ArgumentError("expected a cache that stays where it is; QuireCache cannot be offloaded")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ArgumentError(
            "expected a copy of the whole QuireCache: a layer's memory belongs to its cache; use fork()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentError("expected no pickling of a QuireCache's layers; use QuireCache.save and load")


class StateAndRows(BoundStates, RowLayer):
    """A layer with a state in addition to its keys and values."""

    def attach(self, cache: _Owner, index: int, window: int) -> None:  # type: ignore[override]
        RowLayer.attach(self, cache, index, window)
        self.attach_states(cache, index)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if len(args) == 2:  # keys and values
            RowLayer.lazy_initialization(self, *args)
        else:
            self.open_states(**kwargs)

    def activate_past_recording(self) -> None:
        RowLayer.activate_past_recording(self)

    def check_crop(self, tokens_to_remove: int) -> None:
        self.check_crop_states(tokens_to_remove)
        RowLayer.check_crop(self, tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        RowLayer.crop(self, tokens_to_remove)
        self.crop_states(tokens_to_remove)

    def reset(self) -> None:
        self.reset_states()
        RowLayer.reset(self)


class FullRowAndStateLayer(StateAndRows, LinearAttentionAndFullAttentionLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`LinearAttentionAndFullAttentionLayer` on rows, its state counted."""


class SlidingRowAndStateLayer(StateAndRows, LinearAttentionAndSlidingWindowAttentionLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`LinearAttentionAndSlidingWindowAttentionLayer` on rows, its state counted."""


_KINDS: dict[type, Any] = {
    DynamicLayer: FullRowLayer,
    DynamicSlidingWindowLayer: SlidingRowLayer,
    LinearAttentionLayer: StateLayer,
    LinearAttentionAndFullAttentionLayer: FullRowAndStateLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: SlidingRowAndStateLayer,
}


def bound_layer(layer: Any, cache: _Owner, index: int) -> Any:
    """The replacement of `layer` of a DynamicCache: a layer of these kinds, or `layer` itself if its kind is unknown.

    For a layer of these kinds, an empty layer with the same recording of the past.
    """
    kind: Any = type(layer) if isinstance(layer, RowLayer | BoundStates) else _KINDS.get(type(layer))
    if kind is None:
        return layer
    options: dict[str, Any] = {}
    if issubclass(kind, StateLayer | StateAndRows):
        options["number_of_states"] = cast(Any, layer).number_of_states
    window = int(getattr(layer, "sliding_window", 0) or 0)
    if window:
        options["sliding_window"] = window
    new = kind(**options)
    new.attach(cache, index, window)
    new.record_past = getattr(layer, "record_past", False)
    return new
