"""Layers of a cache that stay transformers' own, so that `kv_memory` does not bind what they keep: told once.

Not a refusal: they hold what a DynamicCache's would, and the tokens are the same.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from quire.hf.layers import RowLayer
from quire.hf.state_layers import BoundStates
from quire.spec import layer_ranges

__all__ = ["import_modelling", "tell_unbound"]

_log = logging.getLogger("quire")
_told: set[str] = set()  # in this process


def import_modelling(config: PreTrainedConfig) -> bool:
    """Import the modelling code beside the config's class, which may register kinds of layers; False without any."""
    package, _, module = type(config).__module__.rpartition(".")
    try:
        importlib.import_module(f"{package}.{module.replace('configuration_', 'modeling_')}")
    except ImportError:
        return False
    return True


def tell_unbound(layers: Sequence[Any], config: PreTrainedConfig) -> None:
    """A warning, once for what it says, that names the layers which keep more than rows and states."""
    kinds: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if (what := _unbound(layer)) is not None:
            kinds.setdefault(what, []).append(index)
    if not kinds:
        return
    said = f"{config.model_type}: kv_memory does not bind all of this QuireCache: " + "; ".join(
        f"{what} (layer{'s' * (len(indices) > 1)} {layer_ranges(indices, ' to ')})"
        for what, indices in kinds.items()
    )
    if said not in _told:
        _told.add(said)
        _log.warning("%s; these stay transformers' own", said)


def _unbound(layer: Any) -> str | None:
    """What of the layer is neither on rows nor a state."""
    if isinstance(layer, RowLayer | BoundStates) or not isinstance(
        layer, CacheLayerMixin | LinearAttentionCacheLayerMixin
    ):
        return None
    if hasattr(layer, "update_indexer"):
        return "keys, values and an indexer's keys, which grow with every token"
    return f"what {type(layer).__name__} keeps"
