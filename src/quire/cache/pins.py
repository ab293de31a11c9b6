"""Pins: content that stays in memory because somebody said so. A pin is an open sequence nobody computes with.

Its units are referred to, so the pool counts them as held and never evicts them; `Cache.stats` counts a unit that a
pin refers to as *pinned*, whoever else refers to it.

Invariants
    N1  pinned units are held, and what `match` finds for a pin's tokens is all of them.
    N2  together they are at most `max_units`; what would be more is refused, and nothing has changed.
    N3  a pin ends `ttl_s` seconds after it was made or last hit, by a clock that never goes back.

Cost: add and remove O(blocks of all pins), touch O(pins in the namespace), expire O(1) while nothing is due.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache.arguments import extra_key_arrays, token_array
from quire.cache.backend import NORMAL, Int32Array
from quire.cache.steady_clock import SteadyClock
from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.cache.cache import Cache, Sequence

__all__ = ["Pin", "Pins"]


@dataclass(eq=False, repr=False)
class Pin:
    """One of them. expires_at: of `Pins.now`, None for never; num_hits: prompts that began with all of its tokens.

    Its `repr` shows neither tokens nor namespace: it may stand in a log.
    """

    owner: str
    namespace: bytes
    tokens: Int32Array
    extra_keys: dict[int, bytes]
    account: int
    ttl_s: float | None
    made_at: float
    expires_at: float | None
    sequence: Sequence
    units: frozenset[int]
    num_hits: int = 0

    def __repr__(self) -> str:
        return f"Pin(owner={self.owner!r}, num_tokens={len(self.tokens)}, ttl_s={self.ttl_s}, num_hits={self.num_hits})"

    def num_common(self, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> int:
        """Tokens that it and a prompt have in common, from the beginning on, keys counted."""
        n = min(len(tokens), len(self.tokens))
        same = tokens[:n] == self.tokens[:n]
        n = n if same.all() else int(same.argmin())
        keys = extra_keys or {}
        different = [at for at in {*keys, *self.extra_keys} if keys.get(at) != self.extra_keys.get(at)]
        return min([n, *different])

    def is_prefix_of(self, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> bool:
        """Whether a prompt begins with all that is pinned."""
        n = len(self.tokens)
        keys = {at: key for at, key in (extra_keys or {}).items() if at < n}
        return len(tokens) >= n and keys == self.extra_keys and np.array_equal(tokens[:n], self.tokens)


class Pins:
    """The pins of one cache, see the module's text. max_units: None is no limit but the pool."""

    def __init__(self, cache: Cache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self.now = SteadyClock(clock)
        self.max_units: int | None = None
        self.on_expired: Callable[[Pin], None] = lambda _: None
        self._pins: list[Pin] = []
        self._num_references: Counter[int] = Counter()
        self._by_account: Counter[int] = Counter()
        self._next_expiry: float | None = None

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Seconds by another clock from now on, while there are no pins."""
        if self._pins:
            raise ArgumentError(f"expected a clock before the first pin, got one after {len(self)} of them")
        self.now = SteadyClock(clock)

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Any:
        return iter(tuple(self._pins))

    @property
    def num_units(self) -> int:
        """Distinct units that pins refer to."""
        return len(self._num_references)

    @property
    def units(self) -> Int32Array:
        """Those units."""
        return np.fromiter(self._num_references, np.int32, len(self._num_references))

    def units_of(self, account: int) -> int:
        """Those referred to by the pins of one account, a unit once for each of its pins."""
        return self._by_account[account]

    @property
    def accounts(self) -> list[int]:
        return [account for account, count in self._by_account.items() if count]

    def check(
        self,
        tokens: np.ndarray,
        ttl_s: float | None,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> None:
        """*raises:* ArgumentError, CapacityError where such a pin cannot be had, before anything is computed for it."""
        if ttl_s is not None and (
            isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s < float("inf")
        ):
            raise ArgumentError(f"expected a ttl of more than 0 seconds, or None for no end, got {ttl_s!r}")
        self.expire()
        shared = self.units_shared(tokens, namespace=namespace, extra_keys=extra_keys)
        self._require_room(self._cache.units_alone(len(tokens)) - shared, self.num_units)

    def _require_room(self, num_new: int, num_others: int) -> None:
        cache = self._cache
        most = cache.num_blocks if self.max_units is None else self.max_units
        if num_others + num_new > most:
            size = cache.unit_bytes
            raise CapacityError(
                f"expected a pin within the budget of {format_size(most * size)} ({most} {cache.unit}s), got one that "
                f"needs {num_new} {cache.unit}s more ({format_size(num_new * size)}) where {num_others} are pinned; "
                "unpin something or raise pin_memory"
            )

    def add(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        account: int = 0,
        owner: str = "",
        ttl_s: float | None = None,
    ) -> Pin:
        """Pins tokens that are in the cache, the last partial block too.

        *raises:* ArgumentError: no tokens, a ttl that is not positive, or content that is not there. CapacityError:
        over the budget.
        """
        tokens = token_array(token_ids)
        extra_key_arrays(extra_keys, len(tokens))
        if not len(tokens):
            raise ArgumentError("expected tokens to pin, got none")
        self.check(tokens, ttl_s, namespace=namespace, extra_keys=extra_keys)
        cache = self._cache
        # The last token of a prompt is never taken from the cache: one more, so that all of these are.
        probe = np.append(tokens, np.int32(0))
        # Looked up before it is opened: what a sequence referred to and gave back may be leased to the running step.
        found = min(cache.match(probe, namespace=namespace, extra_keys=extra_keys).num_tokens, len(tokens))
        if found < len(tokens):
            raise ArgumentError(
                f"expected {len(tokens)} tokens that are in the cache, of these it has {found}; compute them first"
            )
        sequence = cache.open(
            probe, namespace=namespace, extra_keys=extra_keys, account=account, retention=NORMAL
        )
        tables = [sequence.block_table(group) for group in range(cache.num_groups)]
        units = frozenset(unit for table in tables for unit in table.tolist() if unit >= 0)
        now = self.now()
        pin = Pin(
            owner, namespace, tokens.copy(), dict(extra_keys or {}), account, ttl_s, now,
            None if ttl_s is None else now + ttl_s, sequence, units,
        )  # fmt: skip
        self._pins.append(pin)
        self._num_references.update(units)
        self._by_account[account] += len(units)
        self._note_expiry()
        return pin

    def remove(self, pin: Pin) -> None:
        """Its content stays findable until the room is needed. Twice does nothing."""
        if pin not in self._pins:
            return
        self._pins.remove(pin)
        self._num_references -= Counter(pin.units)
        self._by_account[pin.account] -= len(pin.units)
        self._cache.close(pin.sequence)
        self._note_expiry()

    def touch(
        self, tokens: np.ndarray, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> None:
        """A prompt is about to be served: the pins that it begins with live on for their whole ttl."""
        self.expire()
        for pin in self._pins:
            if pin.namespace == namespace and pin.is_prefix_of(tokens, extra_keys):
                pin.num_hits += 1
                if pin.ttl_s is not None:
                    pin.expires_at = self.now() + pin.ttl_s
        self._note_expiry()

    def prolong(self, pin: Pin, ttl_s: float) -> None:
        """Has it live for that long from now on, where its own time would be over before; one without end stays so."""
        end = self.now() + ttl_s
        if pin.expires_at is not None and pin.expires_at < end:
            pin.ttl_s, pin.expires_at = ttl_s, end
            self._note_expiry()

    def units_shared(
        self, tokens: np.ndarray, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """Pinned units of whole blocks that a prompt begins with, at least: it needs none of its own for them."""
        size = self._cache.block_size
        same = [pin.num_common(tokens, extra_keys) for pin in self._pins if pin.namespace == namespace]
        return self._cache.units_later(max(same, default=0) // size * size, 0)

    def expire(self) -> None:
        """Ends the pins whose time is over."""
        if self._next_expiry is None or (now := self.now()) < self._next_expiry:
            return
        for pin in self:
            if pin.expires_at is not None and pin.expires_at <= now:
                self.remove(pin)
                self.on_expired(pin)

    def _note_expiry(self) -> None:
        self._next_expiry = min(
            (pin.expires_at for pin in self._pins if pin.expires_at is not None), default=None
        )

    def prove(self) -> None:
        """N1 and N2. *raises:* InvariantError."""
        held = self._cache.num_held_blocks
        if self.num_units > held:
            raise InvariantError(f"N1 broken: {self.num_units} units pinned, {held} held")
        if self.max_units is not None and self.num_units > self.max_units:
            raise InvariantError(f"N2 broken: {self.num_units} units pinned of {self.max_units}")
        named: Counter[int] = Counter()
        for pin in self._pins:
            tables = [pin.sequence.block_table(group) for group in range(self._cache.num_groups)]
            units = frozenset(unit for table in tables for unit in table.tolist() if unit >= 0)
            if units != pin.units:
                raise InvariantError(
                    f"N1 broken: pin {pin} names {sorted(pin.units)}, its table {sorted(units)}"
                )
            named.update(units)
            probe = np.append(pin.tokens, np.int32(0))
            found = self._cache.match(probe, namespace=pin.namespace, extra_keys=pin.extra_keys).num_tokens
            if found < len(pin.tokens):
                raise InvariantError(f"N1 broken: {found} of {len(pin.tokens)} pinned tokens found")
        if named != self._num_references:
            raise InvariantError("N1 broken: units are counted that no pin names")
