"""Warns once about layers of a cache that stay transformers' own, whose memory `kv_memory` does not limit.

Not a refusal: these layers hold the same as in a DynamicCache, and the tokens are the same.
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

__all__ = ["import_modelling", "warn_unbound"]

_log = logging.getLogger("quire")
_warned: set[str] = set()  # warnings given in this process


def import_modelling(config: PreTrainedConfig) -> bool:
    """Import the modelling code of the config's class, which may register kinds of layers; False without such a
    module."""
    package, _, module = type(config).__module__.rpartition(".")
    try:
        importlib.import_module(f"{package}.{module.replace('configuration_', 'modeling_')}")
    except ImportError:
        return False
    return True


def warn_unbound(layers: Sequence[Any], config: PreTrainedConfig) -> None:
    """Warn about the layers that store more than rows and states; once for each text."""
    kinds: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if (description := _unbound(layer)) is not None:
            kinds.setdefault(description, []).append(index)
    if not kinds:
        return
    warning = f"{config.model_type}: kv_memory does not bind all of this QuireCache: " + "; ".join(
        f"{description} (layer{'s' * (len(indices) > 1)} {layer_ranges(indices, ' to ')})"
        for description, indices in kinds.items()
    )
    if warning not in _warned:
        _warned.add(warning)
        _log.warning("%s; these stay transformers' own", warning)


def _unbound(layer: Any) -> str | None:
    """Description of the layer's data that is neither on rows nor a state; None without such data."""
    if isinstance(layer, RowLayer | BoundStates) or not isinstance(
        layer, CacheLayerMixin | LinearAttentionCacheLayerMixin
    ):
        return None
    if hasattr(layer, "update_indexer"):
        return "keys, values and an indexer's keys, which grow with every token"
    return f"the data of {type(layer).__name__}"
