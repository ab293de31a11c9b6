"""The calls of `LLM` that say who may have what: tenants, pins, published prefixes.

A part of `LLM`, which has the lock, the engine and the tokenizer; kept apart for the reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache.pins import Pin
from quire.engine.prompts import Prompt, encode
from quire.engine.sampling_params import SamplingParams
from quire.engine.tenants import Place, Tenant
from quire.errors import ArgumentError, CapacityError

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.turns import Turns

__all__ = ["Sharing"]


class Sharing:
    """See the module's text."""

    _lock: threading.RLock  # pyright: ignore[reportGeneralTypeIssues]
    engine: Engine
    cache: Any
    tokenizer: Any

    _turns: Turns
    _require_open: Callable[[], Any]

    def add_tenant(
        self,
        name: str,
        *,
        quota: str | int | None = None,
        floor: str | int | None = None,
        priority: int = 0,
    ) -> Tenant:
        """From now on requests may be the tenant's: `generate(..., tenant=name)`.

        quota: bytes of KV memory it may take at most; floor: bytes of what it has that are never evicted for others;
        both in whole blocks. priority: added to that of its requests, smaller is served first.
        *raises:* ArgumentError, CapacityError: limits that cannot be, with the numbers; nothing was changed.
        """
        with self._lock:
            self._require_open()
            tenant = self.engine.tenants.add(name, quota=quota, floor=floor, priority=priority)
            try:
                self._require_that_all_fit()
            except CapacityError:
                self.engine.tenants.remove(name)
                raise
            return tenant

    def remove_tenant(self, name: str) -> None:
        """Forgets the tenant, its pins and what memory has of it; what lower tiers have nobody finds any more.

        *raises:* ArgumentError while requests of it are there.
        """
        with self._lock:
            self._require_open()
            live = [r.request_id for r in self.engine.scheduler.requests.values() if r.tenant == name]
            if live:
                raise ArgumentError(
                    f"expected a tenant without requests, got {name!r} with {len(live)} ({live[0]!r} is one)"
                )
            self.engine.tenants.remove(name)

    def pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        owner: str | None = None,
        compute: bool = True,
    ) -> Pin:
        """Computes a prompt where it is not in memory yet, and keeps it there until `unpin`, or `ttl` seconds after the
        last prompt that began with it. prompt: as for `generate`. owner: for lists; the tenant if not given.
        compute: False: nothing is computed, so that no step is run.

        *raises:* what `generate` raises; CapacityError over the budget `pin_memory`, or where a request that waits
        would never fit again: nothing is pinned. ArgumentError: without `compute`, where memory lacks some of it.
        """
        with self._lock:
            self._require_prefixes()
            tokens = encode(prompt, self.tokenizer).token_ids
            checked, _, _, place = self.engine.check(
                tokens, SamplingParams(max_tokens=1), tenant=tenant, cache_salt=cache_salt
            )
            request = {"tenant": tenant, "cache_salt": cache_salt} if compute else None
            return self._pin(checked, place, owner or tenant or "", ttl, request)

    def keep_for(
        self, prompt: Any, seconds: float, *, tenant: str | None = None, cache_salt: str | None = None
    ) -> Pin:
        """Pins a prompt that is in memory for that long after its last use; the pin there is of it lives on instead.

        *raises:* as `pin` without `compute`.
        """
        with self._lock:
            self._require_prefixes()
            tokens = encode(prompt, self.tokenizer).token_ids
            checked, _, _, place = self.engine.check(
                tokens, SamplingParams(max_tokens=1), tenant=tenant, cache_salt=cache_salt
            )
            for pin in self.engine.pins:
                same = len(pin.tokens) == len(checked) and pin.is_prefix_of(checked, place.extra_keys)
                if same and pin.namespace == place.namespace and pin.owner == (tenant or ""):
                    self.engine.pins.prolong(pin, seconds)
                    return pin
            return self._pin(checked, place, tenant or "", seconds, None)

    def check_pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """*raises:* what `pin` would without computing anything: arguments that cannot be, a budget used up."""
        with self._lock:
            self._require_prefixes()
            checked, _, _, place = self.engine.check(
                encode(prompt, self.tokenizer).token_ids,
                SamplingParams(max_tokens=1),
                tenant=tenant,
                cache_salt=cache_salt,
            )
            self.engine.pins.check(checked, ttl, namespace=place.namespace, extra_keys=place.extra_keys)

    def publish(self, prompt: Any, *, compute: bool = True) -> Pin:
        """Computes a prompt and makes its tokens everybody's: whatever tenant a prompt that goes on behind them is of,
        it finds them, and counts them in no quota. They stay until `unpin`. compute: as in `pin`.

        *raises:* as `pin`.
        """
        with self._lock:
            self._require_prefixes()
            tokens = encode(prompt, self.tokenizer).token_ids
            checked, *_ = self.engine.check(tokens, SamplingParams(max_tokens=1))
            tenants = self.engine.tenants
            pin = self._pin(
                checked,
                Place(tenants.public, None),
                "(public)",
                None,
                {"namespace": tenants.public} if compute else None,
            )
            tenants.publish(pin)
            return pin

    def unpin(self, pin: Pin) -> None:
        """Its content may be evicted from now on; what was published is so no more. Twice does nothing."""
        with self._lock:
            self.engine.tenants.withdraw(pin)
            self.engine.pins.remove(pin)

    @property
    def pins(self) -> list[Pin]:
        """Those there are, the oldest first."""
        with self._lock:
            self.engine.pins.expire()
            return list(self.engine.pins)

    def _pin(
        self, tokens: np.ndarray, place: Place, owner: str, ttl: float | None, request: dict[str, Any] | None
    ) -> Pin:
        """request: what makes the engine compute them in that very place; None: they are there."""
        pins = self.engine.pins
        where: dict[str, Any] = {"namespace": place.namespace, "extra_keys": place.extra_keys}
        pins.check(tokens, ttl, **where)
        if request is not None:
            self._compute(tokens, request)
        pin = pins.add(tokens, account=place.account, owner=owner, ttl_s=ttl, **where)
        try:
            self._require_that_all_fit()
        except CapacityError:
            pins.remove(pin)
            raise
        return pin

    def _compute(self, tokens: np.ndarray, request: dict[str, Any]) -> None:
        """Has all of them in memory, where nobody holds them yet."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        (output,) = self._turns.run([(Prompt(None, tokens), params)], **request)
        if output is not None and output.error is not None:
            raise output.error

    def _require_that_all_fit(self) -> None:
        """*raises:* CapacityError where a request that is here could not end any more."""
        scheduler = self.engine.scheduler
        for request in scheduler.requests.values():
            scheduler.check_request(request)

    def _require_prefixes(self) -> None:
        self._require_open()
        if not self.cache.prefix_caching:
            raise ArgumentError(
                "expected a cache that shares prefixes to pin in, got one that does not; use storage paged or virtual, "
                "with prefix_caching"
            )
