"""`ScoreStores`: the scores of tokens (`sampling.prompt_scores`) as values of the tiers.

In the tiers scores are values under a root of their own (`score_root`): one for each `SEGMENT_TOKENS` tokens of a text,
and a shorter one for the rest. Its key is that of the tokens, as for a segment of keys and values. So stores written
without scores stay readable, and a reader that knows no scores never asks for them.

Cost: 4 bytes a token, and hashing, some 1 us for 16 tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.cache.block_hash import root_key
from quire.spec.score_payload import ScorePayloadLayout
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack
from quire.tiers.transfer import Load

__all__ = ["ScoreStores", "score_root"]

SEGMENT_TOKENS = 256
_Keys = tuple[tuple[int, bytes], ...]


def score_root(root: bytes) -> bytes:
    """The root of the scores of a namespace, from that of its keys and values (`block_hash.root_key`)."""
    return hashlib.sha256(b"quire scores\0" + root).digest()


class _StoreRules(Protocol):
    """The part of `TierStores` that `ScoreStores` needs."""

    is_trusted: Callable[[float], bool]
    owner_of: Callable[[bytes], str]
    excluded: tuple[str, ...]


class ScoreStores:
    """The scores of one engine's texts in its tiers. See the module's text."""

    def __init__(self, stack: TierStack, fingerprint: bytes, stores: _StoreRules) -> None:
        self._stack = stack
        self._fingerprint = fingerprint
        self._stores = stores
        self.layout = ScorePayloadLayout()

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Names scores by another model from now on."""
        self._fingerprint = fingerprint

    def keys(self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys) -> list[SegmentKey]:
        """The keys of the scores of `tokens`, in order."""
        root = score_root(root_key(self._fingerprint, namespace))
        return segment_keys(root, tokens, SEGMENT_TOKENS, extra_keys=extra_keys)

    def store(
        self,
        namespace: bytes,
        tokens: np.ndarray,
        extra_keys: _Keys,
        scores: np.ndarray,
        is_new: np.ndarray,
        cache_priority: int,
    ) -> None:
        """Stores the segments whose scores are all known, and one of them new.

        scores: float32 [len(tokens)], NaN where none is known. is_new: bool [len(tokens)].
        """
        known = np.isfinite(scores)
        known[:1] = True
        if not known.any() or not self._stores.is_trusted(0.0):
            return
        stop = len(known) - int(known[::-1].argmax())
        values = np.nan_to_num(scores[:stop], nan=0.0)
        segments = [
            (key, values[key.start : key.end].astype("<f4").view(np.uint8))
            for key in self.keys(namespace, tokens[:stop], extra_keys)
            if known[key.start : key.end].all() and is_new[key.start : key.end].any()
        ]
        if segments:
            self._stack.store(
                segments,
                cache_priority=cache_priority,
                owner=self._stores.owner_of(namespace),
                layout=self.layout,
                excluded=self._stores.excluded,
            )

    def load(
        self,
        namespace: bytes,
        tokens: np.ndarray,
        extra_keys: _Keys,
        start: int,
        on_done: Callable[[Load], None],
        cache_priority: int,
    ) -> Load:
        """Begins to load the scores of `tokens` from the segment of token `start` on, up to the first one missing."""
        keys = self.keys(namespace, tokens, extra_keys)[start // SEGMENT_TOKENS :]
        return self._stack.load(keys, on_done=on_done, cache_priority=cache_priority, layout=self.layout)


def loaded_scores(load: Load, num_tokens: int) -> np.ndarray:
    """float32 [num_tokens]: the scores that a load brought, NaN elsewhere."""
    scores = np.full(num_tokens, np.nan, np.float32)
    for key, payload in zip(load.chain, load.payloads, strict=False):
        scores[key.start : key.end] = payload.view("<f4")
    return scores
