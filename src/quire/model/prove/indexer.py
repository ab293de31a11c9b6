"""Indexers (DSA) limited to a few tokens during a proof.

An indexer reads a prompt shorter than its number of chosen tokens whole: the proof's few tokens would test neither its
stored keys nor its choice. So during the proof each chooses few tokens, in the model's own forward and in ours.

Cost: one pass over the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["NUM_CHOSEN_TOKENS", "limited_indexers"]

NUM_CHOSEN_TOKENS = 4  # tokens; the proof's sequences have more
_NAME = "index_topk"


@contextmanager
def limited_indexers(model: nn.Module) -> Iterator[None]:
    """Within it the indexers of `model` choose at most NUM_CHOSEN_TOKENS tokens."""
    original_numbers = {
        module: value
        for module in model.modules()
        if isinstance(value := module.__dict__.get(_NAME), int) and value > NUM_CHOSEN_TOKENS
    }
    for module in original_numbers:
        setattr(module, _NAME, NUM_CHOSEN_TOKENS)
    try:
        yield
    finally:
        for module, value in original_numbers.items():
            setattr(module, _NAME, value)
