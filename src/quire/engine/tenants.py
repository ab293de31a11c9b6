"""Tenants: who may find what, and how much of the memory each may have.

A tenant's namespace is an HMAC of its name under a secret of the server's, so no request can name it; a cache salt that
a request brings divides it further, and leads nowhere else. What has no tenant is the tenant nobody, without limits.

A *published* prefix is everybody's: prompts that go on behind one live in the public namespace, with the tenant's own
key at the first token behind it. Keys set apart everything from their position on and nothing before it: so all share
the published tokens, and none finds anything of another's behind them. What is published is pinned in nobody's account;
it is never missing, so that finding it says nothing about who was here before. A prompt that is a published prefix and
no more is served in the tenant's own namespace.

Not here: enforcing (`quire.cache.accounts`, `fair_share`). Cost: `place` O(published prefixes) comparisons.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quire.cache.backend import DISCARD, KEEP, MAX_ACCOUNT, NORMAL
from quire.cache.pins import Pin
from quire.engine.fair_share import FairShare, Limits
from quire.errors import ArgumentError, CapacityError
from quire.sizes import format_size, parse_size

__all__ = ["RETENTIONS", "Place", "Retention", "Tenant", "Tenants", "check_secret", "retention_number"]

Retention = Literal["keep", "normal", "discard"]
RETENTIONS: dict[str, int] = {"keep": KEEP, "normal": NORMAL, "discard": DISCARD}
_LEAST_SECRET = 16  # bytes
_MAX_OWNERS = 4096


@dataclass(frozen=True)
class Tenant:
    """quota_bytes: None for none. priority: added to that of its requests; smaller is served first."""

    name: str
    account: int
    quota_bytes: int | None
    floor_bytes: int
    priority: int


@dataclass(frozen=True)
class Place:
    """Where a prompt's content lives: what the cache is asked with."""

    namespace: bytes
    extra_keys: Mapping[int, bytes] | None
    account: int = 0
    priority: int = 0
    num_published: int = 0  # tokens of it that are everybody's


class Tenants:
    """The tenants of one cache. secret: of the server's, at least 16 bytes; None: another one in each process."""

    def __init__(self, cache: Any, share: FairShare, secret: bytes | None = None) -> None:
        check_secret(secret)
        self._cache = cache
        self._share = share
        self._secret = secret or os.urandom(32)
        self._by_name: dict[str, Tenant] = {}
        self._published: list[Pin] = []  # the longest first
        self._owners: dict[bytes, str] = {}  # by namespace
        self._max_owners = _MAX_OWNERS
        self.public = self._derived(b"public")
        self._owners[self.public] = "(public)"

    def __iter__(self) -> Any:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Tenant:
        """*raises:* ArgumentError where nobody is called so."""
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise ArgumentError(
                f"expected a tenant that was added, got {name!r} (known: {known}); see add_tenant"
            )
        return self._by_name[name]

    def add(
        self,
        name: str,
        *,
        quota: str | int | None = None,
        floor: str | int | None = None,
        priority: int = 0,
    ) -> Tenant:
        """*raises:* ArgumentError, with the numbers: limits that cannot be. Nothing was changed."""
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"expected a tenant's name, got {name!r}")
        if name in self._by_name:
            raise ArgumentError(
                f"expected a new tenant, got {name!r}, which there is; remove_tenant takes it away"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ArgumentError(f"expected an integer priority, got {priority!r} - of tenant {name!r}")
        limits, quota_bytes, floor_bytes = self._limits(name, quota, floor)
        taken = {tenant.account for tenant in self}
        free = (
            number
            for number in range(1, MAX_ACCOUNT + 1)
            if number not in taken and not any(self._cache.account_counts(number))
        )
        account = next(free, None)
        if account is None:
            raise ArgumentError(f"expected at most {MAX_ACCOUNT} tenants, got one more: {name!r}")
        self._share.set(account, limits)
        tenant = Tenant(name, account, quota_bytes, floor_bytes, priority)
        self._by_name[name] = tenant
        self._owners[self.namespace(name)] = name
        return tenant

    def _limits(
        self, name: str, quota: str | int | None, floor: str | int | None
    ) -> tuple[Limits, int | None, int]:
        """In units: a quota's whole ones, a floor's begun ones."""
        cache, where = self._cache, f"of tenant {name!r}"
        size = cache.unit_bytes
        quota_bytes = None if quota is None else _bytes(quota, f"the quota {where}")
        floor_bytes = 0 if floor in (None, 0) else _bytes(floor, f"the floor {where}")  # type: ignore[arg-type]
        if (quota_bytes is not None or floor_bytes) and not cache.can_fork:
            raise ArgumentError(
                "expected neither quota nor floor in a storage that keeps each sequence in one piece of its own, got "
                f"{'a quota' if quota_bytes is not None else 'a floor'} {where}; use storage paged or virtual"
            )
        least = cache.units_alone(1)
        if quota_bytes is not None and quota_bytes // size < least:
            raise ArgumentError(
                f"expected a quota of at least {format_size(least * size)} ({least} {cache.unit}s), got {quota!r} - "
                f"{where}; with less it could never compute anything"
            )
        if quota_bytes is not None and quota_bytes < floor_bytes:
            raise ArgumentError(
                f"expected a floor of at most the quota of {format_size(quota_bytes)}, got {floor!r} - {where}"
            )
        floor_units = -(-floor_bytes // size)
        quota_units = -1 if quota_bytes is None else max(quota_bytes // size, floor_units)
        others = self._share.sum_of_floors()
        room = cache.num_blocks - others - cache.pins.num_units
        if floor_units > room:
            raise ArgumentError(
                f"expected floors and pins that fit in the cache of {format_size(cache.num_blocks * size)}, got "
                f"{floor!r} where {format_size(others * size)} are other tenants' floors and "
                f"{format_size(cache.pins.num_units * size)} pinned - {where}; raise kv_memory or lower a floor"
            )
        return Limits(name, floor_units, quota_units), quota_bytes, floor_bytes

    def remove(self, name: str) -> int:
        """Forgets a tenant and what is cached of it; units made free. Its requests have ended before."""
        tenant = self[name]
        for pin in self._cache.pins:
            if pin.account == tenant.account:
                self._cache.pins.remove(pin)
        num_free = 0
        for namespace in self.namespaces_of(name):
            num_free += self._cache.drop([], namespace=namespace)
            del self._owners[namespace]
        self._share.set(tenant.account, None)
        del self._by_name[name]
        return num_free

    # -- where content lives ---------------------------------------------------------------------------

    def _derived(self, *parts: bytes) -> bytes:
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, framed, "sha256")

    def namespace(self, name: str, cache_salt: str = "", base: bytes = b"") -> bytes:
        return self._derived(b"tenant", name.encode(), cache_salt.encode(), base)

    def namespace_of(self, tenant: str | None, cache_salt: str | None, base: bytes = b"") -> bytes:
        """The namespace of a request's content; `base` itself where it brings neither."""
        if tenant is None and cache_salt is None:
            return base
        return self.namespace(tenant or "", cache_salt or "", base)

    def _note_owner(self, namespace: bytes, name: str) -> None:
        """Salts come without end: those that nothing in memory is of any more are forgotten now and then."""
        if len(self._owners) >= self._max_owners:
            used = {*self._cache.namespaces(), *(self.namespace(name) for name in self._by_name), self.public}
            self._owners = {known: owner for known, owner in self._owners.items() if known in used}
            self._max_owners = max(_MAX_OWNERS, 2 * len(self._owners))
        self._owners[namespace] = name

    def owner_of(self, namespace: bytes) -> str:
        """Whose a namespace is; "" if nobody's."""
        return self._owners.get(namespace, "")

    def namespaces_of(self, name: str | None) -> list[bytes]:
        """Those of a tenant that a request has used; of None: all."""
        return [namespace for namespace, owner in self._owners.items() if name is None or owner == name]

    def place(
        self,
        tokens: np.ndarray,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> Place:
        """namespace: an adapter's or the like, within the tenant's."""
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ArgumentError(f"expected text as cache_salt, got {cache_salt!r}")
        who = None if tenant is None else self[tenant]
        own = self.namespace_of(tenant, cache_salt, namespace)
        if own != namespace and own not in self._owners:
            self._note_owner(own, tenant or "")
        account, priority = (0, 0) if who is None else (who.account, who.priority)
        num_published = 0 if namespace else self._num_published(tokens, extra_keys)
        if num_published:
            keys = {**(extra_keys or {})}
            keys[num_published] = self._derived(b"behind", own) + keys.get(num_published, b"")
            return Place(self.public, keys, account, priority, num_published)
        return Place(own, extra_keys, account, priority)

    def _num_published(self, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> int:
        for pin in self._published:
            if len(tokens) > len(pin.tokens) and pin.is_prefix_of(tokens, extra_keys):
                return len(pin.tokens)
        return 0

    def publish(self, pin: Pin) -> None:
        """What was pinned in the public namespace is every prompt's that goes on behind it."""
        self._published.append(pin)
        self._published.sort(key=lambda published: -len(published.tokens))

    def withdraw(self, pin: Pin) -> None:
        if pin in self._published:
            self._published.remove(pin)

    def is_published(self, pin: Pin) -> bool:
        return pin in self._published

    def check_resize(self, num_blocks: int) -> None:
        """*raises:* CapacityError where floors and pins would not fit any more."""
        cache = self._cache
        floors, pinned, size = self._share.sum_of_floors(), cache.pins.num_units, cache.unit_bytes
        if floors + pinned and num_blocks < floors + pinned:
            raise CapacityError(
                f"expected a kv_memory of at least {format_size((floors + pinned) * size)}: "
                f"{format_size(pinned * size)} are pinned, {format_size(floors * size)} are tenants' floors; got "
                f"{format_size(num_blocks * size)}; "
                "unpin something or lower a floor first"
            )


def check_secret(secret: Any) -> None:
    """*raises:* ArgumentError for one that is no secret."""
    if secret is not None and not (isinstance(secret, bytes) and len(secret) >= _LEAST_SECRET):
        got = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ArgumentError(
            f"expected at least {_LEAST_SECRET} bytes, got {got} - in `tenant_secret`; secrets.token_bytes makes some"
        )


def retention_number(retention: Any) -> int:
    if retention not in RETENTIONS:
        raise ArgumentError(f"expected keep, normal or discard, got {retention!r} - in `retention`")
    return RETENTIONS[retention]


def _bytes(size: str | int, where: str) -> int:
    return parse_size(size, where=where)
