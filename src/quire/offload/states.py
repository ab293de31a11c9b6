"""Stores states of recurrent layers in the tiers: the key and value of a checkpoint, and when it is stored.

In the tiers a state is a value under a root of its own (`state_root`). Its key is that of the blocks of all its tokens,
so that it depends on model, namespace, tokens and extra keys as theirs does. Its payload is the state's bytes
(`quire.spec.state_payload`). Its `SegmentKey` ends at the state's position.

Only states at a block's end are stored: tiers have no K and V of a partial block, and a hit needs both at its end.
So a cache with tiers leaves a checkpoint at a prompt's last block boundary as well (`StateCache.keeps_boundaries`).

A state is stored when its checkpoint is evicted, with the K and V before it, which only memory may have; by
`store_all`; and with policy "through" once it exists.

Cost: a state's bytes are copied by the engine's thread, and its tokens are hashed, some 1 us a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.cache.block_hash import root_key
from quire.cache.protocol import DISCARD
from quire.cache.states.checkpoints import Checkpoint
from quire.cache.states.state_cache import StateCache
from quire.memory.state_slots import StateSlots
from quire.spec.state_payload import StatePayloadLayout
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack

__all__ = ["StateStores", "state_keys", "state_root"]

_Keys = tuple[tuple[int, bytes], ...]


def state_root(root: bytes) -> bytes:
    """The root of the states of a namespace, from that of its keys and values (`block_hash.root_key`)."""
    return hashlib.sha256(b"quire states\0" + root).digest()


def state_keys(root: bytes, tokens: np.ndarray, block_size: int, extra_keys: _Keys) -> list[SegmentKey]:
    """Keys of the states at the ends of the full blocks of `tokens`, in order. root: of the keys and values."""
    full = tokens[: len(tokens) // block_size * block_size]
    return segment_keys(state_root(root), full, block_size, extra_keys=extra_keys)


class _Stores(Protocol):
    """The part of `TierStores` that `StateStores` needs."""

    is_trusted: Callable[[float], bool]
    owner_of: Callable[[bytes], str]
    excluded: tuple[str, ...]

    def save_path(self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys) -> None: ...


class StateStores:
    """The states of one cache, for `TierStores`. See the module's text. For the engine's thread only."""

    def __init__(
        self,
        cache: StateCache,
        slots: StateSlots,
        stack: TierStack,
        fingerprint: bytes,
    ) -> None:
        self._cache = cache
        self.slots = slots
        self.layout = StatePayloadLayout.from_spec(cache.spec)
        self._stack = stack
        self._fingerprint = fingerprint

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Names states by another model from now on. Memory must hold no content."""
        self._fingerprint = fingerprint

    def attach(self, stores: _Stores) -> None:
        """Has evicted checkpoints stored by the rules of these stores."""
        self._cache.keeps_boundaries = True
        self._cache.on_going = lambda checkpoint: self._store_lost(stores, checkpoint)

    def keys(self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys) -> list[SegmentKey]:
        """See `state_keys`."""
        root = root_key(self._fingerprint, namespace)
        return state_keys(root, tokens, self._cache.node_tokens, extra_keys)

    def deepest_state(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys, max_tokens: int
    ) -> tuple[int, np.ndarray] | None:
        """(number of tokens, state) of the deepest state in memory that tiers can store, up to `max_tokens` tokens."""
        found = self._cache.deepest_boundary(namespace, tokens, extra_keys, max_tokens)
        return None if found is None else (found.num_tokens, self.slots.read(found.slot))

    def store_all(self, stores: _Stores) -> tuple[int, bool]:
        """Queues the states that are not stored yet: (how many, whether all); see `TierStores.store_all`."""
        results = [
            self._save(stores, checkpoint, must_queue=True) for checkpoint in list(self._cache.checkpoints)
        ]
        return sum(num for num, _ in results), all(is_done for _, is_done in results)

    def _store_lost(self, stores: _Stores, checkpoint: Checkpoint) -> None:
        num, _ = self._save(stores, checkpoint)
        if num:
            stores.save_path(checkpoint.namespace, *checkpoint.decoded())

    def _save(self, stores: _Stores, checkpoint: Checkpoint, *, must_queue: bool = False) -> tuple[int, bool]:
        """Stores a checkpoint that is not stored yet: (1 if some tier queued it now, whether it is done)."""
        if (
            checkpoint.num_tokens % self._cache.node_tokens
            or checkpoint.cache_priority == DISCARD
            or checkpoint.stored_as >= checkpoint.cache_priority
            or not stores.is_trusted(0.0)
            or not self._cache.has_state_of(checkpoint)
            or not self._stack.has_tiers_besides(stores.excluded)
        ):
            return 0, True
        key = self.keys(checkpoint.namespace, *checkpoint.decoded())[-1]
        num = self._stack.store(
            [(key, self.slots.read(checkpoint.slot))],
            cache_priority=checkpoint.cache_priority,
            owner=stores.owner_of(checkpoint.namespace),
            layout=self.layout,
            excluded=stores.excluded,
        )
        if must_queue and not num:
            return 0, False
        checkpoint.stored_as = checkpoint.cache_priority
        return num, True
