"""Whose keys are whose. A tenant is a name, limits, and a tenant of the engine (`quire.scheduler.tenants`).

The engine derives namespaces from its secret and the tenant's name, and enforces quota, floor and priority; here a key
leads to a name and nothing more. Keys are kept as SHA-256 digests and compared in constant time, all of them each time;
no key is ever logged, shown or kept in the clear. Requests without keys, and those of --api-key-file, are nobody's in
the engine's eyes: they share the namespace that the library uses, which a disk cache has after a restart as well.

Cost: `find` one digest and one comparison for each key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cache.prefix_key import NamespaceKeywords
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.engine.llm_tenants import LLMTenants

__all__ = ["ADMIN", "ANYBODY", "ApiTenant", "KeyRing", "digest_of_key", "install", "name_of_owner"]


@dataclass(frozen=True)
class ApiTenant:
    """Who asks.

    priority: smaller is served first; a request's own is added to it, and may not be smaller than 0. quota_bytes,
    floor_bytes: memory of keys and values it may have, and that others cannot take from it; None: as the server has it.
    max_requests: of its requests that may wait or run at once. requests_per_minute: None for no limit.
    """

    name: str
    priority: int = 0
    quota_bytes: int | None = None
    floor_bytes: int = 0
    max_requests: int | None = None
    requests_per_minute: int | None = None
    is_admin: bool = False

    @property
    def in_engine(self) -> str | None:
        """What the engine calls it; None: nobody."""
        return None if self.name == ANYBODY.name else self.name

    def key(self, cache_salt: str | None) -> NamespaceKeywords:
        """Whose content a request of this tenant's is, with the salt that it brings."""
        return {"tenant": self.in_engine, "cache_salt": cache_salt or None}


ANYBODY = ApiTenant("default")
ADMIN = ApiTenant("admin", is_admin=True)


def name_of_owner(owner: str | None) -> str:
    """A tenant's name from what the engine calls it."""
    return owner or ANYBODY.name


def install(there: LLMTenants, tenants: Sequence[ApiTenant]) -> None:
    """Makes the engine's tenants these and no others; those that stay as they were keep their content.

    For the engine's thread. *raises:* ArgumentError, CapacityError: limits that cannot be, or a tenant to be removed or
    changed that has requests.
    """
    wanted = {tenant.name: tenant for tenant in tenants if tenant.in_engine is not None}
    for old in there:
        new = wanted.get(old.name)
        if new is not None and (new.quota_bytes, new.floor_bytes, new.priority) == (
            old.quota_bytes,
            old.floor_bytes,
            old.priority,
        ):
            del wanted[old.name]
        else:
            there.remove(old.name)
    for tenant in wanted.values():
        there.add(tenant.name, quota=tenant.quota_bytes, floor=tenant.floor_bytes, priority=tenant.priority)


def digest_of_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyRing:
    """The keys there are. None at all: everybody is `ANYBODY`."""

    def __init__(self, keys: Sequence[tuple[bytes, ApiTenant]] = ()) -> None:
        digests = [digest for digest, _ in keys]
        if len(set(digests)) != len(digests):
            raise ArgumentError(
                "expected every API key once, got one that belongs to two tenants or stands twice"
            )
        self._keys = tuple(keys)

    @property
    def tenants(self) -> list[ApiTenant]:
        """Those who have keys, each once."""
        return list(dict.fromkeys(tenant for _, tenant in self._keys))

    @property
    def is_empty(self) -> bool:
        """Whether no tenant has a key: then none is asked for."""
        return all(tenant.is_admin for _, tenant in self._keys)

    @property
    def has_admin(self) -> bool:
        return any(tenant.is_admin for _, tenant in self._keys)

    def find(self, key: str) -> ApiTenant | None:
        """Whose key it is."""
        digest = digest_of_key(key)
        found = None
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found
