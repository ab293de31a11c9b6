"""`Tenants`: the namespaces of tenants, and their quotas, floors and priorities.

A tenant's namespace is an HMAC of its name under a secret of the server, so that no request can name it; a request's
cache salt divides it further and reaches no other namespace. A request without a tenant has owner 0 and no limits.

All tenants share a *published* prefix: a prompt that continues one lives in the public namespace, with its tenant's key
at the first token after the prefix. A key separates all content from its position on and none before it, so tenants
share the published tokens and never find each other's content after them. Published content is pinned in owner 0; it is
always there, so that a hit on it tells nothing about earlier requests. A prompt that is exactly a published prefix is
served in the tenant's own namespace.

Not here: enforcement (`quire.cache.manager.owners`, `tenant_quotas`).
Cost: `resolve` O(published prefixes) comparisons; `remove` O(blocks of the tenant).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from quire.cache.pins import Pin
from quire.cache.prefix_key import PrefixKey, ResolvedKey
from quire.cache.protocol import MAX_OWNER, KVCache
from quire.config import check_secret, check_weight
from quire.errors import ArgumentError, CapacityError
from quire.scheduler.request import Request
from quire.scheduler.tenant_quotas import Limits, MemoryLimits
from quire.sizes import format_size, parse_size

__all__ = ["Tenant", "Tenants", "namespace_of_tenant"]

_MAX_OWNERS = 4096


def _derived_key(secret: bytes, *parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, framed, "sha256")


def namespace_of_tenant(secret: bytes, name: str, cache_salt: str = "", base: bytes = b"") -> bytes:
    """The namespace of a tenant's content under the server's secret: `Tenants.namespace`, without an engine."""
    return _derived_key(secret, b"tenant", name.encode(), cache_salt.encode(), base)


@dataclass(frozen=True)
class Tenant:
    """quota_bytes: None without a quota. priority: added to that of its requests; the smallest is served first.

    weight: of its share of the computed tokens, while tenants compete.
    """

    name: str
    owner_id: int
    quota_bytes: int | None
    floor_bytes: int
    priority: int
    weight: float


class Tenants:
    """The tenants of one cache. secret: the server's, at least 16 bytes; None: a random one per process."""

    def __init__(self, cache: KVCache, memory_limits: MemoryLimits, secret: bytes | None = None) -> None:
        check_secret(secret)
        self._cache = cache
        self._memory_limits = memory_limits
        self._secret = secret or os.urandom(32)
        self._by_name: dict[str, Tenant] = {}
        self._published: list[Pin] = []  # the longest first
        self._owners: dict[bytes, str] = {}  # by namespace
        self._max_owners = _MAX_OWNERS
        self.requests: Mapping[str, Request] = {}
        """The engine's requests; a tenant that has some cannot be removed."""
        self.check_requests: Callable[[], None] = lambda: None
        """Raises CapacityError if a queued request no longer fits, after a change of limits."""
        self.users: dict[str, WeakSet[Any]] = {}
        self.on_removed: Callable[[str], None] = lambda name: None
        """Called with the name of each tenant that was removed."""
        """The services that use a tenant; only of tenants that a service added."""
        self.public = self._derive_key(b"public")
        self._owners[self.public] = "(public)"

    def __iter__(self) -> Iterator[Tenant]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Tenant:
        """*raises:* ArgumentError: no tenant has this name."""
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise ArgumentError(
                f"expected a tenant that was added, got {name!r} (known: {known}); see `LLM.tenants.add`"
            )
        return self._by_name[name]

    def add(
        self,
        name: str,
        *,
        quota: str | int | None = None,
        floor: str | int | None = None,
        priority: int = 0,
        weight: float = 1,
    ) -> Tenant:
        """Adds a tenant for `generate(..., tenant=name)`.

        quota: the most bytes of KV memory that it may take; floor: bytes of its content that are never evicted for
        others; both in whole blocks. priority: added to that of its requests, smaller is served first. weight: a
        tenant of weight 2 gets twice the computed tokens of one of weight 1 while both have requests waiting.
        *raises:* ArgumentError, CapacityError: impossible limits, with the numbers; nothing was changed.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"expected a tenant's name, got {name!r}")
        if name in self._by_name:
            raise ArgumentError(
                f"expected a new tenant, got {name!r}, which exists; `LLM.tenants.remove` removes it"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ArgumentError(f"expected an integer priority, got {priority!r} - of tenant {name!r}")
        check_weight(weight, f"of tenant {name!r}")
        limits, quota_bytes, floor_bytes = self._limits(name, quota, floor)
        taken = {tenant.owner_id for tenant in self}
        free = (
            number
            for number in range(1, MAX_OWNER + 1)
            if number not in taken and not any(self._cache.owner_counts(number))
        )
        owner_id = next(free, None)
        if owner_id is None:
            raise ArgumentError(f"expected at most {MAX_OWNER} tenants, got one more: {name!r}")
        self._memory_limits.set(owner_id, limits, self.check_requests)
        tenant = Tenant(name, owner_id, quota_bytes, floor_bytes, priority, float(weight))
        self._by_name[name] = tenant
        self._owners[self.namespace(name)] = name
        return tenant

    def _limits(
        self, name: str, quota: str | int | None, floor: str | int | None
    ) -> tuple[Limits, int | None, int]:
        """The limits in blocks (quota rounded down, floor rounded up), and both in bytes."""
        cache, where = self._cache, f"of tenant {name!r}"
        size = cache.block_bytes
        quota_bytes = None if quota is None else _bytes(quota, f"the quota {where}")
        floor_bytes = 0 if floor in (None, 0) else _bytes(floor, f"the floor {where}")  # type: ignore[arg-type]
        if (quota_bytes is not None or floor_bytes) and not cache.can_fork:
            raise ArgumentError(
                "expected neither quota nor floor in a storage that keeps each sequence in one piece, got "
                f"{'a quota' if quota_bytes is not None else 'a floor'} {where}; use storage paged or virtual"
            )
        min_blocks = cache.num_blocks_for(1)
        if quota_bytes is not None and quota_bytes // size < min_blocks:
            raise ArgumentError(
                f"expected a quota of at least {format_size(min_blocks * size)} ({min_blocks} {cache.block_name}s), "
                f"got {quota!r} - {where}; a smaller one has no room for a single token"
            )
        if quota_bytes is not None and quota_bytes < floor_bytes:
            raise ArgumentError(
                f"expected a floor of at most the quota of {format_size(quota_bytes)}, got {floor!r} - {where}"
            )
        floor_blocks = -(-floor_bytes // size)
        quota_blocks = -1 if quota_bytes is None else max(quota_bytes // size, floor_blocks)
        others = self._memory_limits.sum_of_floors()
        possible = cache.num_possible_blocks
        room = possible - others - cache.pins.num_blocks
        if floor_blocks > room:
            raise ArgumentError(
                f"expected floors and pins that fit in the cache of {format_size(possible * size)}, got "
                f"{floor!r} where {format_size(others * size)} are other tenants' floors and "
                f"{format_size(cache.pins.num_blocks * size)} pinned - {where}; raise kv_memory or lower a floor"
            )
        return Limits(name, floor_blocks, quota_blocks), quota_bytes, floor_bytes

    def remove(self, name: str) -> None:
        """Removes a tenant, its pins and its content in memory. Its content in lower tiers becomes unreachable.

        *raises:* ArgumentError: it has requests.
        """
        tenant = self[name]
        open_ids = [request.request_id for request in self.requests.values() if request.tenant == name]
        if open_ids:
            raise ArgumentError(
                f"expected a tenant without requests, got {name!r} with {len(open_ids)} ({open_ids[0]!r} is one)"
            )
        for pin in self._cache.pins:
            if pin.owner_id == tenant.owner_id:
                self._cache.pins.remove(pin)
        for namespace in self.namespaces_of(name):
            self._cache.drop([], namespace=namespace)
            del self._owners[namespace]
        self._memory_limits.set(tenant.owner_id, None)
        del self._by_name[name]
        self.users.pop(name, None)
        self.on_removed(name)

    # -- places of content ---------------------------------------------------------------------------

    def _derive_key(self, *parts: bytes) -> bytes:
        return _derived_key(self._secret, *parts)

    def namespace(self, name: str, cache_salt: str = "", base: bytes = b"") -> bytes:
        """The namespace of a tenant's content, for a salt and a request's own namespace."""
        return namespace_of_tenant(self._secret, name, cache_salt, base)

    def namespace_of(self, key: PrefixKey) -> bytes:
        """The namespace of a request's content; its own without tenant and salt. Any thread may call it."""
        if key.tenant is None and key.cache_salt is None:
            return key.namespace
        return self.namespace(key.tenant or "", key.cache_salt or "", key.namespace)

    def _record_owner(self, namespace: bytes, name: str) -> None:
        """Records a namespace's tenant; forgets namespaces without content if there are many (salts are unbounded)."""
        if len(self._owners) >= self._max_owners:
            used = {*self._cache.namespaces(), *(self.namespace(name) for name in self._by_name), self.public}
            self._owners = {known: owner for known, owner in self._owners.items() if known in used}
            self._max_owners = max(_MAX_OWNERS, 2 * len(self._owners))
        self._owners[namespace] = name

    def owner_tag(self, name: str | None) -> bytes:
        """A digest that stands for a tenant's name outside of this process; b"" without a tenant."""
        return b"" if name is None else self._derive_key(b"tag", name.encode())[:16]

    def owner_of(self, namespace: bytes) -> str:
        """The name of a namespace's tenant; "" without one."""
        return self._owners.get(namespace, "")

    def namespaces_of(self, name: str | None) -> list[bytes]:
        """The used namespaces of a tenant; None: of all tenants."""
        return [namespace for namespace, owner in self._owners.items() if name is None or owner == name]

    def resolve(self, key: PrefixKey, tokens: np.ndarray) -> ResolvedKey:
        """The place of a prompt's content: namespace, keys and owner.

        *raises:* ArgumentError: an unknown tenant, or a salt that is no text.
        """
        if key.cache_salt is not None and (not isinstance(key.cache_salt, str) or not key.cache_salt):
            raise ArgumentError(f"expected text as cache_salt, got {key.cache_salt!r}")
        tenant = None if key.tenant is None else self[key.tenant]
        namespace = self.namespace_of(key)
        if namespace != key.namespace and namespace not in self._owners:
            self._record_owner(namespace, key.tenant or "")
        owner_id, priority, weight = (
            (0, 0, 1.0) if tenant is None else (tenant.owner_id, tenant.priority, tenant.weight)
        )
        num_published = 0 if key.namespace else self._num_published(tokens, key.extra_keys)
        if num_published:
            keys = {**(key.extra_keys or {})}
            keys[num_published] = self._derive_key(b"behind", namespace) + keys.get(num_published, b"")
            return ResolvedKey(self.public, keys, owner_id, priority, num_published, weight)
        return ResolvedKey(namespace, key.extra_keys, owner_id, priority, weight=weight)

    def _num_published(self, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> int:
        for pin in self._published:
            if len(tokens) > len(pin.tokens) and pin.is_prefix_of(tokens, extra_keys):
                return len(pin.tokens)
        return 0

    def publish(self, pin: Pin) -> None:
        """Makes a pin of the public namespace a published prefix."""
        self._published.append(pin)
        self._published.sort(key=lambda published: -len(published.tokens))

    def withdraw(self, pin: Pin) -> None:
        """Makes a published prefix an ordinary pin again; does nothing for any other pin."""
        if pin in self._published:
            self._published.remove(pin)

    def is_published(self, pin: Pin) -> bool:
        """Whether the pin is a prefix that all tenants share."""
        return pin in self._published

    def check_resize(self, num_blocks: int) -> None:
        """*raises:* CapacityError: floors and pins would no longer fit."""
        cache = self._cache
        floors, pinned, size = self._memory_limits.sum_of_floors(), cache.pins.num_blocks, cache.block_bytes
        if floors + pinned and num_blocks < floors + pinned:
            raise CapacityError(
                f"expected a kv_memory of at least {format_size((floors + pinned) * size)}: "
                f"{format_size(pinned * size)} are pinned, {format_size(floors * size)} are tenants' floors; got "
                f"{format_size(num_blocks * size)}; "
                "unpin something or lower a floor first"
            )


def _bytes(size: str | int, where: str) -> int:
    return parse_size(size, where=where)
