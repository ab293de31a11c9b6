"""`Swap`: preempted sequences are swapped out to host memory, or their tokens are computed again.

Swapped: the bytes of all computed tokens, the partial block included, are copied out before the sequence is closed;
those that the prefix tree has lost meanwhile are copied back when it is opened again: the same bits. Recomputed: prompt
and output become one prompt, of which the tree may still have a part. `mode` selects: "swap", "recompute", or "auto",
the faster one by measured throughputs of copying and computing.

If a sequence's windows have given up blocks, only the rest is swapped out and restored (`Cache.restore`). If the memory
for swapped out sequences is full, the sequence is computed again. For a model with state layers the state is swapped
with K and V; a sequence whose state has no slot yet is computed again.

Invariants
    K1  swapped out bytes never exceed `max_bytes`; a sequence that runs or has ended has none.
    K2  a sequence that cannot be restored is computed again: no token is lost, no sequence waits for ever.

Cost: one copy of the sequence's bytes each way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.cache.protocol import CacheSequence, KVCache
from quire.cache.states.state_cache import StateCache
from quire.errors import CapacityError
from quire.memory.block_bytes import BlockStorage, node_table
from quire.offload.offloaded_sequence import OffloadedSequence
from quire.offload.throughputs import Throughputs
from quire.spec.payload import PayloadLayout

__all__ = ["MODES", "Mode", "Swap", "Swapped"]

Mode = Literal["auto", "swap", "recompute"]
MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, eq=False)
class Swapped:
    """The payload of a sequence's first `num_tokens` tokens, in each group from its origin on.

    state: for a model with state layers, the state behind them, see `quire.spec.state_payload`.
    """

    num_tokens: int
    origins: tuple[int, ...]
    payload: np.ndarray
    state: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        return self.payload.nbytes + (0 if self.state is None else self.state.nbytes)


class Swap:
    """Host memory for the bytes of preempted sequences.

    storage: None if its blocks cannot be read (rows): every sequence is computed again. on_reserved: called between a
    reservation and the writing of bytes into it.
    """

    def __init__(
        self,
        cache: KVCache,
        storage: BlockStorage | None = None,
        *,
        mode: Mode = "auto",
        max_bytes: int = 0,
        speeds: Throughputs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._storage = storage
        self._layout = PayloadLayout.from_spec(cache.spec)
        self._mode = mode
        self.max_bytes = max_bytes
        self._speeds = speeds or Throughputs()
        self._clock = clock
        self.on_reserved: Callable[[], None] = lambda: None
        self.num_bytes = 0
        self.num_swapped = 0  # since the start
        self.num_restored_tokens = 0

    def swap_out(self, sequence: OffloadedSequence) -> bool:
        """Copies the sequence's bytes out, if possible and worth it; True if so. Its cache sequence must be open."""
        if self._storage is None or self._mode == "recompute" or not sequence.num_computed:
            return False
        origins = self._origins(sequence.num_computed)
        num_bytes = self._layout.num_bytes(sequence.num_computed, origins)
        states, slot = None, None
        if isinstance(self._cache, StateCache):
            states, slot = self._storage.states, self._cache.readable_slot(sequence.cache_sequence)
            if states is None or slot is None:
                return False
            num_bytes += states.bytes_per_slot
        if self.num_bytes + num_bytes > self.max_bytes:
            return False
        if self._mode == "auto":
            there_and_back = self._speeds.copy_s(2 * num_bytes)
            if there_and_back > self._speeds.compute_s(sequence.num_computed):
                return False
        block_ids = self._block_ids(sequence.cache_sequence)
        began = self._clock()
        if self._cache.spec.stores_kv:
            payload = self._storage.read_blocks(block_ids, sequence.num_computed, origins=origins)
        else:
            payload = np.empty(0, np.uint8)
        state = None if states is None or slot is None else states.read(slot)
        self._speeds.add_copy(num_bytes, self._clock() - began)
        sequence.swapped = Swapped(sequence.num_computed, origins, payload, state)
        self.num_bytes += num_bytes
        self.num_swapped += 1
        return True

    def num_tokens(self, sequence: OffloadedSequence) -> int:
        """Tokens that `restore` could bring back."""
        return 0 if sequence.swapped is None else sequence.swapped.num_tokens

    def num_blocks_needed(
        self, sequence: OffloadedSequence, cache_sequence: CacheSequence, num_more: int
    ) -> int:
        """Blocks that `restore` and a reservation of `num_more` tokens after it would take now."""
        known = self.num_tokens(sequence)
        now = self._cache.num_blocks_to_restore(cache_sequence, known)
        sizes = [group.tokens_per_block(self._cache.block_size) for group in self._cache.spec.groups]
        return now + sum(-(-(known + num_more) // size) - -(-known // size) for size in sizes)

    def restore(self, sequence: OffloadedSequence, cache_sequence: CacheSequence) -> int | None:
        """Copies back the tokens that the just opened sequence lacks; returns its computed tokens.

        None: the system has no memory for the blocks. Close the sequence then: it may have blocks without their bytes.
        """
        found, swapped = cache_sequence.num_computed_tokens, sequence.swapped
        if swapped is None or found >= swapped.num_tokens:
            return found
        assert self._storage is not None
        plan = self._cache.restore(cache_sequence, swapped.num_tokens)
        if plan is None:
            return found
        self.on_reserved()
        began = self._clock()
        states = plan.states
        if states is not None and self._storage.states is not None:
            self._storage.states.apply(states.operations)
        try:
            self._storage.run_copies(plan)
        except CapacityError:  # K2
            return None
        # Blocks before an origin, which belong to a shared hit, are not written.
        block_ids, origins = self._block_ids(cache_sequence), swapped.origins
        if self._cache.spec.stores_kv:
            self._storage.write_blocks(
                block_ids, swapped.payload, swapped.num_tokens, first=found, origins=origins
            )
        if states is not None and self._storage.states is not None:
            self._storage.states.write(int(states.slots[0]), swapped.state)
        num_restored = swapped.num_tokens - found
        num_bytes = self._layout.num_bytes(swapped.num_tokens, [max(found, origin) for origin in origins])
        num_bytes += 0 if swapped.state is None else swapped.state.nbytes
        self._speeds.add_copy(num_bytes, self._clock() - began)
        self._cache.commit(cache_sequence, swapped.num_tokens)
        self.num_restored_tokens += num_restored
        return swapped.num_tokens

    def drop(self, sequence: OffloadedSequence) -> None:
        """Drops the sequence's swapped out bytes."""
        if sequence.swapped is not None:
            self.num_bytes -= sequence.swapped.num_bytes
            sequence.swapped = None

    def _origins(self, num_tokens: int) -> tuple[int, ...]:
        """By group, the beginning of the first block of a sequence with `num_tokens` tokens."""
        sizes = [
            (group.span, group.tokens_per_block(self._cache.block_size)) for group in self._cache.spec.groups
        ]
        return tuple(span.first_needed(num_tokens) // size * size for span, size in sizes)

    def _block_ids(self, cache_sequence: CacheSequence) -> np.ndarray:
        tables = [cache_sequence.block_table(group) for group in range(self._cache.num_groups)]
        return node_table(self._cache.spec, tables)
