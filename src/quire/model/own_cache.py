"""Which class of cache a model insists on: transformers' DynamicCache, or one that its own file defines (MiniMax).

Cost: a look at the names of one module.
"""

from __future__ import annotations

import sys

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

__all__ = ["own_cache", "own_cache_class"]


def own_cache_class(model: PreTrainedModel) -> type[Cache]:
    """What the model's forward takes for its cache's class."""
    module = sys.modules[type(model).__module__]
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, DynamicCache) and value.__module__ == module.__name__
    ]
    return found[0] if len(found) == 1 else DynamicCache


def own_cache(model: PreTrainedModel) -> Cache:
    """An empty one, as `generate` begins with."""
    found = own_cache_class(model)
    return DynamicCache(config=model.config) if found is DynamicCache else found()
