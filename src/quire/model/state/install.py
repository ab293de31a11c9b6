"""Adapters installed on the mixers of a model: they serve only calls with the engine's cache.

A call with any other cache, or without one, runs the module's own forward.

Cost: some us a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import ArgumentError
from quire.model.cache_keyword import cache_keyword, given_cache
from quire.model.state.adapter import StateAdapter
from quire.model.state.state_source import state_source
from quire.modules.module_patch import current_method, patch_methods

__all__ = ["install_states"]


def install_states(adapters: Mapping[int, StateAdapter]) -> Callable[[], None]:
    """Have each adapter serve its module's calls with a `StateSource`; returns a function that undoes it.

    adapters: by layer, from `state_adapters`. The returned function may be called twice.
    """
    undo = [_install(adapter, layer) for layer, adapter in adapters.items()]

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all


def _install(adapter: StateAdapter, layer: int) -> Callable[[], None]:
    original = current_method(adapter.module, "forward")
    keyword = cache_keyword(original) or "cache"  # a block that takes any keyword is given it by that name
    keyword = cache_keyword(original) or "cache"  # the keyword for a block that accepts any

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = state_source(given_cache(keyword, kwargs) or kwargs.get("cache_params"))
        if cache is None and len(args) > 1:
            cache = state_source(args[1])
        if cache is None:
            return original(*args, **kwargs)
        step = cache.state_step
        hidden = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_states"))
        if step is None or hidden is None or hidden.dim() != 3 or hidden.shape[0] != 1:
            raise ArgumentError(
                f"expected hidden states [1, num_rows, hidden_size] and a step that runs, for the mixer of layer "
                f"{layer}, got {None if hidden is None else list(hidden.shape)} and {step}"
            )
        return adapter.wrap_output(adapter.forward(hidden[0], cache.state_of(layer), step)[None])

    return patch_methods(adapter.module, forward=forward)
