"""States on their way between their slots and the tiers: what a checkpoint is there, and when it is stored.

In the tiers a state is a value beside the segments of keys and values, under a root of its own (`state_root`). Its key
is that of the blocks of all tokens it is of. So it depends on model, namespace, tokens and extra keys as theirs does.
Its payload is the state's bytes (`quire.spec.state_payload`). Its name ends where the state does.

Only states at a block's end are stored: tiers have no K and V of a partial block, and a hit ends where there are both.
So a cache with tiers leaves a checkpoint at a prompt's last block boundary as well (`StateCache.keeps_boundaries`).

A state is stored when its checkpoint goes for want of room, with the K and V before it, which memory alone may have; by
`hand_over`; and with policy "through" once it is there.

Cost: a state's bytes are copied by the engine's thread, and its tokens are hashed, some 1 us a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.cache.block_hash import root_key
from quire.cache.checkpoints import Checkpoint
from quire.cache.protocol import DISCARD
from quire.cache.state_cache import StateCache
from quire.memory.state_slots import StateSlots
from quire.spec.state_payload import StatePayloadLayout
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack

__all__ = ["StateStores", "state_names", "state_root"]

_Keys = tuple[tuple[int, bytes], ...]


def state_root(root: bytes) -> bytes:
    """The root of the states of a namespace, from that of its keys and values (`block_hash.root_key`)."""
    return hashlib.sha256(b"quire states\0" + root).digest()


def state_names(root: bytes, tokens: np.ndarray, block_size: int, extra_keys: _Keys) -> list[SegmentKey]:
    """Of the state at the end of each full block of `tokens`, in order. root: of the keys and values."""
    full = tokens[: len(tokens) // block_size * block_size]
    return segment_keys(state_root(root), full, block_size, extra_keys=extra_keys)


class _Stores(Protocol):
    """What is needed of `TierStores`, which has the states stored."""

    is_trusted: Callable[[float], bool]
    owner_of: Callable[[bytes], str]
    spared: tuple[str, ...]

    def save_path(self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys) -> None: ...


class StateStores:
    """The states of one cache, for `TierStores`. See the module's text. Of the engine's thread."""

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

    def renew(self, fingerprint: bytes) -> None:
        """Name what is stored from now on by another model. Memory holds nothing then."""
        self._fingerprint = fingerprint

    def follow(self, stores: _Stores) -> None:
        """Has what goes stored as these stores say."""
        self._cache.keeps_boundaries = True
        self._cache.on_going = lambda checkpoint: self._going(stores, checkpoint)

    def names(self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys) -> list[SegmentKey]:
        """See `state_names`."""
        root = root_key(self._fingerprint, namespace)
        return state_names(root, tokens, self._cache.node_tokens, extra_keys)

    def deepest(
        self, namespace: bytes, tokens: np.ndarray, extra_keys: _Keys, most: int
    ) -> tuple[int, np.ndarray] | None:
        """Of how many of these tokens, at most `most`, memory has a state that tiers can keep; and the state."""
        found = self._cache.deepest_boundary(namespace, tokens, extra_keys, most)
        return None if found is None else (found.num_tokens, self.slots.read(found.slot))

    def hand_over(self, stores: _Stores) -> tuple[int, bool]:
        """Hands what is not stored yet to the tiers: how many states, and whether all; see `TierStores.hand_over`."""
        results = [self._save(stores, one, must=True) for one in list(self._cache.checkpoints)]
        return sum(num for num, _ in results), all(is_done for _, is_done in results)

    def _going(self, stores: _Stores, checkpoint: Checkpoint) -> None:
        num, _ = self._save(stores, checkpoint)
        if num:
            stores.save_path(checkpoint.namespace, *checkpoint.decoded())

    def _save(self, stores: _Stores, one: Checkpoint, *, must: bool = False) -> tuple[int, bool]:
        """Stores it, unless that was done: 1 where some tier has queued it now, and whether nothing is left to do."""
        if (
            one.num_tokens % self._cache.node_tokens
            or one.cache_priority == DISCARD
            or one.stored_as >= one.cache_priority
            or not stores.is_trusted(0.0)
            or not self._cache.has_state_of(one)
            or not self._stack.has_others(stores.spared)
        ):
            return 0, True
        name = self.names(one.namespace, *one.decoded())[-1]
        num = self._stack.store(
            [(name, self.slots.read(one.slot))],
            cache_priority=one.cache_priority,
            owner=stores.owner_of(one.namespace),
            layout=self.layout,
            spared=stores.spared,
        )
        if must and not num:
            return 0, False
        one.stored_as = one.cache_priority
        return num, True
