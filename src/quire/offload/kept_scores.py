"""`KeptScores`: the scores of tokens (`sampling.prompt_scores`), kept beside their keys and values.

A block of the cache's mirror has the scores of its tokens, where they were computed; they go when the block goes.
Tiers have them as values of their own (`score_stores`). Nothing is recorded before the first score is kept.

Invariants
    K1  a kept score is that of the very tokens, extra keys and namespace before it: it is found by their hash.
    K2  a score that is known is never replaced: every computation gives the same bits.

Cost: 4 bytes a token and some 150 a block; `fill` and `keep` hash the tokens, 1 us a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quire.cache.event_dispatcher import Forgotten
from quire.cache.events import CacheEvent
from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import DISCARD
from quire.observe.tree_mirror import Block, TreeMirror
from quire.offload.score_stores import ScoreStores, loaded_scores

__all__ = ["KeptScores"]


class _KeptRequest(Protocol):
    scores: Any  # `quire.sampling.prompt_scores.PromptScores`, or None

    @property
    def key(self) -> ResolvedKey: ...
    @property
    def cache_priority(self) -> int: ...


class KeptSequence(Protocol):
    """The part of a request's sequence that keeping scores needs. search: of the tiers, see `tier_load.Search`."""

    search: Any

    @property
    def request(self) -> _KeptRequest: ...
    def token_ids(self) -> np.ndarray: ...
    def known_scores(self) -> np.ndarray:
        """float32 [tokens], NaN where no score is known."""
        ...


class KeptScores:
    """See the module's text. collect: brings the mirror up to date. stores: the tiers', None without tiers."""

    def __init__(
        self, mirror: TreeMirror, collect: Callable[[], None], stores: ScoreStores | None = None
    ) -> None:
        self._mirror = mirror
        self._collect = collect
        self._stores = stores
        self._by_node: dict[int, np.ndarray] = {}  # float32 [node_tokens]
        self._is_recording = False

    def fill(self, sequence: KeptSequence) -> None:
        """Gives a sequence's `PromptScores` the scores that are kept for its tokens."""
        tokens, scores = sequence.token_ids(), sequence.request.scores
        if self._by_node:
            kept = np.full(len(tokens), np.nan, np.float32)
            size = self._mirror.node_tokens
            for index, block in enumerate(self._path(sequence, tokens)):
                if (known := self._by_node.get(block.node_id)) is not None:
                    kept[index * size : (index + 1) * size] = known
            scores.add_kept(kept)
        load = getattr(sequence.search, "scores", None)
        if load is not None and load.done.is_set():
            scores.add_kept(loaded_scores(load, len(tokens)))

    def keep(self, sequence: KeptSequence) -> None:
        """Keeps the scores of a sequence's tokens whose blocks the cache has, and stores them in the tiers."""
        scores = sequence.known_scores()
        if np.isnan(scores).all():
            return
        if not self._is_recording:
            self._is_recording = True
            self._mirror.recorders.append(self)
        tokens, size = sequence.token_ids(), self._mirror.node_tokens
        is_new = np.ones(len(tokens), bool)
        for index, block in enumerate(self._path(sequence, tokens)):
            part = slice(index * size, (index + 1) * size)
            kept = self._by_node.get(block.node_id)
            if kept is None:
                if not np.isnan(scores[part]).all():
                    self._by_node[block.node_id] = scores[part].copy()
                continue
            is_new[part] = np.isnan(kept)
            np.copyto(kept, scores[part], where=np.isnan(kept))
            np.copyto(scores[part], kept, where=np.isnan(scores[part]))
        request = sequence.request
        if self._stores is not None and request.cache_priority != DISCARD:
            extra_keys = tuple(sorted((request.key.extra_keys or {}).items()))
            self._stores.store(
                request.key.namespace, tokens, extra_keys, scores, is_new, request.cache_priority
            )

    def _path(self, sequence: KeptSequence, tokens: np.ndarray) -> list[Block]:
        self._collect()
        key, mirror = sequence.request.key, self._mirror
        return mirror.path(mirror.hashes(key.namespace, tokens, key.extra_keys))

    @property
    def num_bytes(self) -> int:
        """Bytes of the scores in memory."""
        return 4 * self._mirror.node_tokens * len(self._by_node)

    # -- called by the mirror (`BlockRecorder`) ----------------------------------------------------------

    def record_stored(self, block: Block, event: CacheEvent) -> None:
        pass

    def record_loss(self, block: Block, event: CacheEvent, forgotten: Forgotten) -> None:
        pass

    def record_removed(self, block: Block) -> None:
        self._by_node.pop(block.node_id, None)

    def record_cleared(self) -> None:
        self._by_node.clear()
