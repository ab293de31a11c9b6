"""Pins: content that stays in memory on request. A pin is an open sequence that is never computed further.

Tables refer to its blocks, so the pool counts them as held and never evicts them. `Cache.stats` counts a block that a
pin refers to as *pinned*, even if other sequences refer to it too.

Invariants
    N1  pinned blocks are held, and `match` finds all of a pin's tokens.
    N2  together they are at most `max_blocks`; a pin that would exceed it is refused, and nothing has changed.
    N3  a pin ends `ttl_s` seconds after it was made or last hit, by a clock that never goes back.

Cost: add and remove O(blocks of all pins), touch and `num_tokens_with_room` O(pins in the namespace), expire O(1) while
no pin is due.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.cache.arguments import extra_key_arrays, token_array
from quire.cache.results import Match
from quire.cache.steady_clock import SteadyClock
from quire.cache.types import NORMAL, Int32Array
from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.sizes import format_size

__all__ = ["Pin", "Pins"]


class PinSequence(Protocol):
    """The part of a sequence (`protocol.CacheSequence`) that a pin uses."""

    id: int

    @property
    def num_cached_tokens(self) -> int: ...

    def block_table(self, group: int = 0) -> Int32Array: ...


class PinnedCache(Protocol):
    """The part of a cache that pins use. Each call is that of `protocol.KVCache`."""

    block_name: str
    block_bytes: int
    node_tokens: int
    num_groups: int

    @property
    def num_possible_blocks(self) -> int: ...

    def match(self, token_ids: Any, *, namespace: bytes, extra_keys: Mapping[int, bytes] | None) -> Match: ...

    def open(
        self,
        token_ids: Any,
        *,
        namespace: bytes,
        extra_keys: Mapping[int, bytes] | None,
        owner_id: int,
        cache_priority: int,
    ) -> PinSequence: ...

    def close(self, sequence: int) -> None: ...

    def num_blocks_for(self, num_tokens: int) -> int: ...

    def blocks_later(self, num_tokens: int, num_reserved: int) -> int: ...

    def stats(self) -> dict[str, int]: ...


@dataclass(eq=False, repr=False)
class Pin:
    """One pin.

    owner: the tenant, or the name that its maker gave. tokens: int32 [n], those pinned. ttl_s: seconds that it stays
    after its last use; None for good. made_at: a time of `Pins.now`, in seconds. expires_at: another; None for never.
    num_hits: prompts that began with all of its tokens.

    Its `repr` shows neither tokens nor namespace: it may stand in a log.
    """

    owner: str
    namespace: bytes
    tokens: Int32Array
    extra_keys: dict[int, bytes]
    owner_id: int
    ttl_s: float | None
    made_at: float
    expires_at: float | None
    sequence: PinSequence
    block_ids: frozenset[int]
    num_hits: int = 0

    def __repr__(self) -> str:
        return f"Pin(owner={self.owner!r}, num_tokens={len(self.tokens)}, ttl_s={self.ttl_s}, num_hits={self.num_hits})"

    def num_common(self, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> int:
        """Length of the common prefix of the pin and a prompt in tokens, extra keys considered."""
        n = min(len(tokens), len(self.tokens))
        same = tokens[:n] == self.tokens[:n]
        n = n if same.all() else int(same.argmin())
        keys = extra_keys or {}
        different = [at for at in {*keys, *self.extra_keys} if keys.get(at) != self.extra_keys.get(at)]
        return min([n, *different])

    def is_prefix_of(self, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> bool:
        """Whether a prompt begins with all of the pin's tokens."""
        n = len(self.tokens)
        keys = {at: key for at, key in (extra_keys or {}).items() if at < n}
        return len(tokens) >= n and keys == self.extra_keys and np.array_equal(tokens[:n], self.tokens)


class Pins:
    """The pins of one cache, see the module's text. max_blocks: None for no limit except the pool."""

    def __init__(self, cache: PinnedCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self.now = SteadyClock(clock)
        self.max_blocks: int | None = None
        self.on_expired: Callable[[Pin], None] = lambda _: None
        self._pins: list[Pin] = []
        self._num_references: Counter[int] = Counter()
        self._by_owner: Counter[int] = Counter()
        self.next_expiry: float | None = None

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Replaces the clock, while there are no pins."""
        if self._pins:
            raise ArgumentError(f"expected a clock before the first pin, got one after {len(self)} of them")
        self.now = SteadyClock(clock)

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Any:
        return iter(tuple(self._pins))

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that pins refer to."""
        return len(self._num_references)

    @property
    def block_ids(self) -> Int32Array:
        """The ids of these blocks."""
        return np.fromiter(self._num_references, np.int32, len(self._num_references))

    def blocks_of(self, owner_id: int) -> int:
        """Blocks that the pins of one owner refer to, each counted once per pin."""
        return self._by_owner[owner_id]

    @property
    def owner_ids(self) -> list[int]:
        return [owner_id for owner_id, count in self._by_owner.items() if count]

    def check(
        self,
        tokens: np.ndarray,
        ttl_s: float | None,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> None:
        """Checks whether such a pin is possible, before anything is computed for it. *raises:* ArgumentError,
        CapacityError."""
        if ttl_s is not None and (
            isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s < float("inf")
        ):
            raise ArgumentError(f"expected a ttl of more than 0 seconds, or None for no end, got {ttl_s!r}")
        self.expire()
        shared = self.blocks_shared(tokens, namespace=namespace, extra_keys=extra_keys)
        self._require_room(self._cache.num_blocks_for(len(tokens)) - shared, self.num_blocks)

    def num_tokens_with_room(
        self,
        tokens: np.ndarray,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> int:
        """How many of the first tokens a new pin may have within the budget: all of them, or those of whole blocks."""
        self.expire()
        cache = self._cache
        budget = cache.num_possible_blocks if self.max_blocks is None else self.max_blocks
        shared = self.blocks_shared(tokens, namespace=namespace, extra_keys=extra_keys)
        room = budget - self.num_blocks + shared
        return bisect_right(range(1, len(tokens) + 1), room, key=cache.num_blocks_for)

    def _require_room(self, num_new: int, num_others: int) -> None:
        cache = self._cache
        budget = cache.num_possible_blocks if self.max_blocks is None else self.max_blocks
        if num_others + num_new > budget:
            size = cache.block_bytes
            raise CapacityError(
                f"expected a pin within the budget of {format_size(budget * size)} ({budget} {cache.block_name}s), "
                f"got one that needs {num_new} {cache.block_name}s more ({format_size(num_new * size)}) where "
                f"{num_others} are pinned; unpin something or raise pin_memory"
            )

    def add(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        owner_id: int = 0,
        owner: str = "",
        ttl_s: float | None = None,
    ) -> Pin:
        """Pins tokens that are in the cache, including the last partial block.

        *raises:* ArgumentError: no tokens, a ttl that is not positive, or content that is not there. CapacityError:
        over the budget, or no state slot for it.
        """
        tokens = token_array(token_ids)
        extra_key_arrays(extra_keys, len(tokens))
        if not len(tokens):
            raise ArgumentError("expected tokens to pin, got none")
        self.check(tokens, ttl_s, namespace=namespace, extra_keys=extra_keys)
        cache = self._cache
        # A hit never has the last token of a prompt: one more token makes it cover all of these.
        probe = np.append(tokens, np.int32(0))
        # Looked up before it is opened: blocks that a sequence referred to and released may be in flight to the running
        # step.
        num_found = min(
            cache.match(probe, namespace=namespace, extra_keys=extra_keys).num_tokens, len(tokens)
        )
        if num_found < len(tokens):
            raise ArgumentError(
                f"expected {len(tokens)} cached tokens to pin, got {num_found}; compute the others first"
            )
        sequence = cache.open(
            probe, namespace=namespace, extra_keys=extra_keys, owner_id=owner_id, cache_priority=NORMAL
        )
        num_held = sequence.num_cached_tokens
        if num_held < len(tokens):  # two state slots stay for sequences that compute
            cache.close(sequence.id)
            raise CapacityError(
                f"expected a state slot for a pin of {len(tokens)} tokens, got one that would hold {num_held} of them: "
                "the slots are pinned, or requests use them; unpin something, raise kv_memory, or pin it once requests "
                "have ended"
            )
        tables = [sequence.block_table(group) for group in range(cache.num_groups)]
        block_ids = frozenset(block_id for table in tables for block_id in table.tolist() if block_id >= 0)
        now = self.now()
        pin = Pin(
            owner, namespace, tokens.copy(), dict(extra_keys or {}), owner_id, ttl_s, now,
            None if ttl_s is None else now + ttl_s, sequence, block_ids,
        )  # fmt: skip
        self._pins.append(pin)
        self._num_references.update(block_ids)
        self._by_owner[owner_id] += len(block_ids)
        self._note_expiry()
        return pin

    def remove(self, pin: Pin) -> None:
        """Ends a pin. Its content stays findable until the room is needed. A second call does nothing."""
        if pin not in self._pins:
            return
        self._pins.remove(pin)
        self._num_references -= Counter(pin.block_ids)
        self._by_owner[pin.owner_id] -= len(pin.block_ids)
        self._cache.close(pin.sequence.id)
        self._note_expiry()

    def touch(
        self, tokens: np.ndarray, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> None:
        """For a prompt about to be served: restarts the ttl of the pins that it begins with."""
        self.expire()
        for pin in self._pins:
            if pin.namespace == namespace and pin.is_prefix_of(tokens, extra_keys):
                pin.num_hits += 1
                if pin.ttl_s is not None:
                    pin.expires_at = self.now() + pin.ttl_s
        self._note_expiry()

    def prolong(self, pin: Pin, ttl_s: float) -> None:
        """Extends the pin's life to at least that long from now; a pin without end stays so."""
        end = self.now() + ttl_s
        if pin.expires_at is not None and pin.expires_at < end:
            pin.ttl_s, pin.expires_at = ttl_s, end
            self._note_expiry()

    def in_what_begins_with(
        self, tokens: np.ndarray, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> list[Pin]:
        """The pins with content that `Cache.drop` of these tokens would forget: they extend beyond the tokens, or end
        within the node in which the tokens end, which they may share."""
        size, num_tokens = self._cache.node_tokens, len(tokens)
        num_before = (num_tokens - 1) // size * size if num_tokens else 0
        pins: list[Pin] = []
        for pin in self._pins:
            num_common = pin.num_common(tokens, extra_keys) if pin.namespace == namespace else -1
            if num_common == num_tokens or num_common == len(pin.tokens) > num_before:
                pins.append(pin)
        return pins

    def blocks_shared(
        self, tokens: np.ndarray, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """A lower bound of the pinned whole blocks that a prompt begins with: it needs no blocks of its own for
        them."""
        size = self._cache.node_tokens
        same = [pin.num_common(tokens, extra_keys) for pin in self._pins if pin.namespace == namespace]
        return self._cache.blocks_later(max(same, default=0) // size * size, 0)

    def expire(self) -> None:
        """Ends the pins whose time is over."""
        if self.next_expiry is None or (now := self.now()) < self.next_expiry:
            return
        for pin in self:
            if pin.expires_at is not None and pin.expires_at <= now:
                self.remove(pin)
                self.on_expired(pin)

    def _note_expiry(self) -> None:
        self.next_expiry = min(
            (pin.expires_at for pin in self._pins if pin.expires_at is not None), default=None
        )

    def prove(self) -> None:
        """N1 and N2. *raises:* InvariantError."""
        others = self._cache.stats()["held"]  # held and not pinned
        if others < 0:
            raise InvariantError(
                f"N1 broken: {self.num_blocks} blocks pinned, {self.num_blocks + others} held"
            )
        if self.max_blocks is not None and self.num_blocks > self.max_blocks:
            raise InvariantError(f"N2 broken: {self.num_blocks} blocks pinned of {self.max_blocks}")
        named: Counter[int] = Counter()
        for pin in self._pins:
            tables = [pin.sequence.block_table(group) for group in range(self._cache.num_groups)]
            block_ids = frozenset(
                block_id for table in tables for block_id in table.tolist() if block_id >= 0
            )
            if block_ids != pin.block_ids:
                raise InvariantError(
                    f"N1 broken: pin {pin} names {sorted(pin.block_ids)}, its table {sorted(block_ids)}"
                )
            named.update(block_ids)
            probe = np.append(pin.tokens, np.int32(0))
            num_found = self._cache.match(
                probe, namespace=pin.namespace, extra_keys=pin.extra_keys
            ).num_tokens
            if num_found < len(pin.tokens):
                raise InvariantError(f"N1 broken: {num_found} of {len(pin.tokens)} pinned tokens found")
        if named != self._num_references:
            raise InvariantError("N1 broken: blocks are counted that no pin names")
