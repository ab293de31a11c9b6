"""Indexers (DSA) made to choose while a model is proved.

A prompt shorter than what an indexer chooses is attended to whole: the proof's few tokens would show neither the keys
that it keeps nor its choice. So each chooses few tokens meanwhile, in the model's own forward and in ours.

Cost: a look at every module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["FEW", "choosing"]

FEW = 4  # tokens; the proof's sequences have more
_NAME = "index_topk"


@contextmanager
def choosing(model: nn.Module) -> Iterator[None]:
    """Within it the indexers of `model` choose at most FEW tokens."""
    found = {
        module: value
        for module in model.modules()
        if isinstance(value := module.__dict__.get(_NAME), int) and value > FEW
    }
    for module in found:
        setattr(module, _NAME, FEW)
    try:
        yield
    finally:
        for module, value in found.items():
            setattr(module, _NAME, value)
