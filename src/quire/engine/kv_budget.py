"""`KVBudget`: the memory budget of one `LLM`'s KV cache, its capacity, and its changes.

The engine's cache and its storage have the blocks; this class keeps their numbers of blocks equal, also when blocks
and state slots exchange memory (`quire.cache.states.memory_split`), and limits pins to their share. Not thread-safe:
call it between two steps.

Cost: `resize`, `trim`, `release_unused`, `evict_cached` O(blocks); `prefault` a page fault a page; figures O(1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cache.states.state_cache import StateCache
from quire.config import EngineConfig
from quire.engine.kv_capacity import KVFit, KVLayout
from quire.engine.open_storage import OpenStorage, exchange_bytes_within, num_blocks_within
from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.memory.device_memory import HOST
from quire.sizes import format_size, parse_share

if TYPE_CHECKING:
    from quire.engine.engine import Engine

__all__ = ["KVBudget"]

_SPARE_SHARE = 16  # at most one in so many blocks is withheld


class KVBudget:
    """config: that of the open storage."""

    def __init__(
        self,
        opened: OpenStorage,
        engine: Engine,
        config: EngineConfig,
        *,
        max_model_len: int,
    ) -> None:
        self._name = opened.name
        self._storage = opened.storage
        self._cache: Any = opened.cache
        self._states = opened.storage.states
        self._engine = engine
        # The blocks of "virtual" follow from its pieces.
        self.block_size = opened.cache.block_size if opened.name == "virtual" else config.block_size
        self._config = config
        self._max_model_len = max_model_len
        self._exchange = opened.cache.exchange
        self._resize_reason = "space"  # why content is lost when blocks become fewer
        self._wanted_spare = self._num_spare = 0  # blocks that `withhold` asked for, and those withheld
        if self._exchange is not None:
            self._exchange.resize_blocks = self._resize_blocks
            self._exchange.give_back_slots = self._release_slots
            self._exchange.on_more_slots = self._add_slots
        self._layout = KVLayout(
            opened.name,
            opened.cache.spec,
            self.block_size,
            opened.cache.block_bytes if opened.cache.spec.stores_kv else 0,
            opened.cache.block_name,
            opened.cache.num_blocks_for,
            shares_blocks=opened.storage.capabilities.shares_prefix,
        )
        self._limit_pins()

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache has now."""
        return self._cache.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and states."""
        return (self.num_blocks + self._num_spare) * self._layout.block_bytes + self._state_bytes

    @property
    def max_num_full_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at once, with their states, if any."""
        return self.fit.max_num_sequences(self._max_model_len)

    @property
    def fit(self) -> KVFit:
        """The capacity, by the arithmetic of a plan."""
        exchange_bytes = 0 if self._exchange is None else self._exchange.num_bytes
        if self._states is None:
            return KVFit(self._layout, self.num_blocks, 0, exchange_bytes)
        num_slots, num_draft_slots = self._cache.num_state_slots, self._cache.num_draft_slots
        return KVFit(self._layout, self.num_blocks, num_slots, exchange_bytes, num_draft_slots)

    @property
    def max_num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of at most `max_model_len`."""
        num_alone = self._cache.num_blocks_for(self._max_model_len)
        num_blocks = self._cache.num_possible_blocks
        if num_blocks < num_alone:
            return self._cache.max_sequence_tokens()
        return num_blocks * self._max_model_len // num_alone

    def __str__(self) -> str:
        """The capacity in one line."""
        blocks = f"{self.num_blocks} {self._cache.block_name}s"
        if self._name in ("paged", "virtual"):
            blocks += f" of {self.block_size} tokens"
        if self._states is not None:
            num_slots, size = self._cache.num_state_slots, format_size(self._states.bytes_per_slot)
            drafts = f" ({self._cache.num_draft_slots} for drafts)" * bool(self._cache.num_draft_slots)
            blocks += f" and {num_slots} states of {size}{drafts}"
            blocks += ", which exchange memory" if self._exchange is not None else ""
        spec = self._cache.spec
        kept = f" in {spec.kv_dtype_by_layers}" if spec.kv_dtype != spec.dtype else ""
        return (
            f"KV cache of {format_size(self.num_bytes)}{kept}, {self._name}, {blocks}; "
            f"holds {self.max_num_tokens} tokens, {self.max_num_full_sequences} sequences of the maximum of "
            f"{self._max_model_len} tokens"
        )

    def resize(self, kv_memory: str | int) -> None:
        """See `LLM.resize`. *raises:* ArgumentError, CapacityError: nothing was changed."""
        self._require_elastic()
        config, exchange, states = replace(self._config, kv_memory=kv_memory), self._exchange, self._states
        storage, cache = self._storage, self._cache
        cache_bytes = storage.bytes_committed + (0 if states is None else states.bytes_committed)
        state_bytes = 0 if exchange is None else cache.least_state_slots * exchange.slot_bytes
        num_whole = num_blocks_within(
            config,
            cache.spec,
            self._max_model_len,
            block_size=self.block_size,
            block_bytes=storage.block_bytes,
            cache_bytes=cache_bytes,
            state_bytes=state_bytes,
        )
        num_spare = self._spare_of(num_whole)
        num_blocks = num_whole - num_spare
        self._engine.tenants.check_resize(num_blocks)
        self._check_pins(num_blocks, kv_memory)
        num_bytes = (
            exchange_bytes_within(config, self._layout, self._max_model_len, cache_bytes) if exchange else 0
        )
        if num_bytes < state_bytes:
            raise ArgumentError(
                f"expected a kv_memory of at least {state_bytes} bytes for {cache.least_state_slots} states, got "
                f"{kv_memory!r}, {num_bytes} bytes - in `kv_memory`"
            )
        self._resize_reason = "resize"
        try:
            if exchange is None:
                self._engine.scheduler.preempt_to(num_blocks)
                self._resize_blocks(num_blocks)
                self._num_spare = num_spare
            else:
                self._engine.scheduler.preempt_until(lambda: exchange.fits_in(num_bytes))
                exchange.resize(num_bytes)
        finally:
            self._resize_reason = "space"
        self._limit_pins()

    def withhold(self, num_blocks: int) -> None:
        """Takes blocks of the budget from the cache, for work that may evict nothing (`lend`). None of a small budget,
        nor if blocks and state slots exchange memory, or the storage's size is fixed. For an idle engine without
        content."""
        self._wanted_spare = num_blocks
        if num_spare := self._spare_of(self.num_blocks):
            self._resize_blocks(self.num_blocks - num_spare)
            self._num_spare = num_spare
            self._limit_pins()

    def _spare_of(self, num_blocks: int) -> int:
        """Blocks to withhold of so many."""
        is_fixed = self._exchange is not None or not self._storage.capabilities.elastic
        is_small = self._wanted_spare * _SPARE_SHARE > num_blocks
        return 0 if is_fixed or is_small else self._wanted_spare

    def lend(self) -> None:
        """Adds the withheld blocks to the cache, until `take_back`."""
        self._cache.resize(self.num_blocks + self._num_spare)

    def take_back(self) -> None:
        """Undoes `lend`. As many blocks must be free as were withheld: no content is lost then."""
        self._cache.resize(self.num_blocks - self._num_spare)

    def _resize_blocks(self, num_blocks: int) -> None:
        """Gives storage and cache `num_blocks` blocks; no more may be in use. *raises:* CapacityError: the system
        refuses; both have as many as before."""
        storage, num_before = self._storage, self.num_blocks
        if num_blocks > storage.num_blocks:
            storage.resize(num_blocks)
        given_up = self._engine.resize(num_blocks, reason=self._resize_reason)
        try:
            storage.give_back(given_up)
        except BaseException:
            self._cache.resize(num_before)
            raise

    def _release_slots(self, slots: list[int]) -> None:
        """Called by the memory split: frees slots that the cache has given up."""
        if self._states is not None:
            self._states.give_back(slots, self._cache.idle_state_slots())

    def _add_slots(self, num_ids: int) -> None:
        """Called by the memory split: adds slots for ids below `num_ids`."""
        if self._states is not None and num_ids > self._states.num_slots:
            self._states.resize(num_ids)

    def trim(self) -> None:
        """See `LLM.trim`. *raises:* ArgumentError, CapacityError: the system refuses; the budget stays."""
        self._release(0.0, "dropped")

    def release_unused(self) -> None:
        """Frees the memory of unused blocks and state slots; all content stays. *raises:* as `trim`."""
        self._release(1.0, "idle")

    def evict_cached(self, num_bytes: int) -> None:
        """`release_unused`, and evicts `num_bytes` of cached content, or all, in the order of eviction. *raises:*
        as `trim`."""
        cached = self.cached_bytes
        self._release(max(0.0, 1.0 - num_bytes / cached) if cached else 1.0, "idle")

    def _release(self, share_kept: float, reason: str) -> None:
        self._require_elastic()
        self._storage.give_back(self._engine.trim(share_kept, reason=reason))
        if self._states is not None and isinstance(self._cache, StateCache):
            self._states.give_back(self._cache.idle_state_slots())

    @property
    def cached_bytes(self) -> int:
        """Bytes of this machine's memory with content that no request and no pin holds."""
        if not getattr(self._storage, "device", HOST).is_host:
            return 0
        state_bytes = 0
        if self._states is not None and isinstance(self._cache, StateCache):
            state_bytes = self._cache.checkpoints.num_free_to_go * self._states.bytes_per_slot
        return self._cache.num_cached_blocks * self._cache.block_bytes + state_bytes

    @property
    def usage(self) -> tuple[int, int]:
        """A pair that changes whenever blocks may have been used, or have become free."""
        return self._engine.scheduler.num_steps, self._cache.num_free_blocks - self._cache.num_cached_blocks

    @property
    def idle_trim_s(self) -> float:
        """Seconds without a step after which an `IdleTrim` is due; 0: never, also if memory was taken to be kept."""
        keeps = self._config.prefault or not self._storage.capabilities.elastic
        return 0.0 if keeps else self._config.idle_trim

    def prefault(self) -> bool:
        """See `LLM.prefault`."""
        if self._name != "paged":
            raise ArgumentError(
                f'expected storage="paged" to prefault, got {self._name}, which takes memory as sequences need it'
            )
        return self._storage.commit_ahead(0, self._storage.num_blocks)

    @property
    def _state_bytes(self) -> int:
        return 0 if self._states is None else self._cache.num_state_slots * self._states.bytes_per_slot

    def check(self) -> None:
        """Checks that every block and slot of the cache has storage. *raises:* InvariantError."""
        cache, storage, states = self._cache, self._storage, self._states
        if storage.capabilities.elastic and cache.num_block_ids > storage.num_blocks:
            raise InvariantError(
                f"expected ids of blocks below {storage.num_blocks}, got {cache.num_block_ids}"
            )
        if states is not None and cache.num_slot_ids > states.num_slots:
            raise InvariantError(
                f"expected ids of state slots below {states.num_slots}, got {cache.num_slot_ids}"
            )

    def _limit_pins(self) -> None:
        self._cache.pins.max_blocks = self._max_pinned(self._cache.num_possible_blocks)

    def _max_pinned(self, num_blocks: int) -> int:
        """Blocks that pins may take of `num_blocks`."""
        block_bytes = self._cache.block_bytes
        return parse_share("pin_memory", self._config.pin_memory, num_blocks * block_bytes) // block_bytes

    def _check_pins(self, num_blocks: int, kv_memory: str | int) -> None:
        """*raises:* CapacityError: more blocks are pinned than may be of `num_blocks`."""
        size, pinned, limit = (
            self._cache.block_bytes,
            self._cache.pins.num_blocks,
            self._max_pinned(num_blocks),
        )
        if pinned > limit:
            raise CapacityError(
                f"expected a kv_memory in whose pin_memory of {self._config.pin_memory!r} fits what is pinned, "
                f"{format_size(pinned * size)}, got {kv_memory!r}, of which {format_size(limit * size)} may be pinned; "
                "unpin something first"
            )

    def _require_elastic(self) -> None:
        if not self._storage.capabilities.elastic:
            raise ArgumentError(
                f'expected a storage whose memory can be resized, got {self._name}; use storage="paged" or "virtual"'
            )
