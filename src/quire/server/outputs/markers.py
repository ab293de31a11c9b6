"""Markers: pieces of text that a tokenizer may have as single tokens, special or not.

A model writes `<tool_call>` as one token, so a grammar has to name that token by its id: the same letters in other
tokens are a different text to the model. Decoding omits special tokens, so a special marker has to be shown
explicitly.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["added_tokens", "in_grammar", "shown_token_ids", "special_token_ids"]


def added_tokens(tokenizer: Any) -> Mapping[str, int]:
    """The tokens that were added to the vocabulary, by their text; {} without a tokenizer."""
    return {} if tokenizer is None else _added(tokenizer, _size(tokenizer))[0]


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that decoding omits; empty without a tokenizer."""
    return frozenset() if tokenizer is None else _added(tokenizer, _size(tokenizer))[1]


def _size(tokenizer: Any) -> int:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else -1


@functools.lru_cache(maxsize=16)
def _added(tokenizer: Any, size: int) -> tuple[dict[str, int], frozenset[int]]:
    """size: of the vocabulary; a part of the cache key, as tokens may be added later."""
    try:
        special = [token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special]
        return dict(tokenizer.get_added_vocab()), frozenset(special)
    except (AttributeError, NotImplementedError):  # some tokenizers list only their special tokens
        names = list(getattr(tokenizer, "all_special_tokens", ()))
        if not names:
            return {}, frozenset()
        special = tokenizer.convert_tokens_to_ids(names)
        return dict(zip(names, special, strict=True)), frozenset(special)


def in_grammar(tokenizer: Any, text: str) -> list[str]:
    """A text as symbols of a Lark grammar of llguidance: added tokens by id, the rest as strings."""
    added = added_tokens(tokenizer)
    longest_first = sorted(added, key=len, reverse=True)
    pieces = (
        re.split("|".join(f"({re.escape(marker)})" for marker in longest_first), text) if added else [text]
    )
    return [f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces if piece]


def shown_token_ids(tokenizer: Any, texts: Iterable[str]) -> tuple[int, ...]:
    """The special tokens in these texts, which decoding would omit."""
    added = added_tokens(tokenizer)
    tokens = {added[marker] for text in texts for marker in added if marker in text}
    return tuple(sorted(tokens & special_token_ids(tokenizer)))
