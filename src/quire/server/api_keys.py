"""API keys and their tenants. A tenant has a name, limits, and a tenant of the engine (`quire.scheduler.tenants`).

The engine derives namespaces from its secret and the tenant's name, and enforces quota, floor and priority; here a
key only leads to a name. Keys are held as SHA-256 digests; a key is compared with each digest in constant time, and
never logged, shown or held in the clear. Requests without keys, and those with keys of --api-key-file, have no tenant
in the engine: they share the library's namespace, which a disk cache still knows after a restart.

Cost: `find` computes one digest and one comparison for each key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from quire.cache.prefix_key import NamespaceKeywords, PrefixKey
from quire.errors import ArgumentError
from quire.scheduler.known_texts import owner_of

if TYPE_CHECKING:
    from quire.scheduler.tenants import Tenants

__all__ = ["ADMIN", "ANYBODY", "ApiKey", "ApiTenant", "KeyRing", "digest_of_key", "install", "name_of_owner"]


@dataclass(frozen=True)
class ApiKey:
    """A key of a tenant, without the key itself. name: its number among the tenant's keys, from 1, in their order."""

    tenant: ApiTenant
    name: str


@dataclass(frozen=True)
class ApiTenant:
    """The tenant of a request.

    priority: smaller is served first; a request's own, at least 0, is added to it. quota_bytes: largest memory of its
    keys and values; None: the server's. floor_bytes: memory that other tenants cannot take from it. weight: of its
    share of the computed tokens, while tenants compete. max_requests: largest number of its requests that wait or run.
    requests_per_minute: None for no limit.
    """

    name: str
    priority: int = 0
    quota_bytes: int | None = None
    floor_bytes: int = 0
    weight: float = 1.0
    max_requests: int | None = None
    requests_per_minute: int | None = None
    is_admin: bool = False

    @property
    def in_engine(self) -> str | None:
        """The engine's name of the tenant; None for the default tenant."""
        return None if self.name == ANYBODY.name else self.name

    def key(self, cache_salt: str | None) -> NamespaceKeywords:
        """The namespace of a request of this tenant, with the request's salt."""
        return {"tenant": self.in_engine, "cache_salt": cache_salt or None}

    def texts_of(self, cache_salt: str | None) -> Hashable:
        """The owner of the texts of a request with this salt."""
        return owner_of(PrefixKey.of(**self.key(cache_salt)))


ANYBODY = ApiTenant("default")
ADMIN = ApiTenant("admin", is_admin=True)


def name_of_owner(owner: str | None) -> str:
    """The tenant's name for a name of the engine."""
    return owner or ANYBODY.name


def install(engine_tenants: Tenants, tenants: Sequence[ApiTenant], user: Any) -> None:
    """Adds the tenants that the engine lacks, for the service `user`. Unchanged tenants keep their content.

    Of the engine's other tenants it removes those that services added which have since closed, never the caller's.
    Runs in the engine's thread. *raises:* ArgumentError, CapacityError: impossible limits, other limits than those of
    a tenant in use, or open requests of a tenant that is to be removed.
    """
    missing = {tenant.name: tenant for tenant in tenants if tenant.in_engine is not None}
    names, unused, users = set(missing), [], engine_tenants.users
    for old in engine_tenants:
        new = missing.get(old.name)
        if new is not None and (new.quota_bytes, new.floor_bytes, new.priority, new.weight) == (
            old.quota_bytes,
            old.floor_bytes,
            old.priority,
            old.weight,
        ):
            del missing[old.name]
        elif old.name in users and all(other.draining for other in users[old.name]):
            unused.append(old.name)
        elif new is not None:
            raise ArgumentError(
                f"expected the limits that tenant {old.name!r} has in the open engine, got others; give the same "
                "limits or another name, or remove the engine's tenant first (`LLM.tenants.remove`)"
            )
    for name in unused:
        engine_tenants.remove(name)
    added: list[str] = []
    try:
        for tenant in missing.values():
            engine_tenants.add(
                tenant.name,
                quota=tenant.quota_bytes,
                floor=tenant.floor_bytes,
                priority=tenant.priority,
                weight=tenant.weight,
            )
            added.append(tenant.name)
    except BaseException:
        for name in added:
            engine_tenants.remove(name)
        raise
    users.update((name, WeakSet()) for name in added)
    for name in names & users.keys():
        users[name].add(user)


def digest_of_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyRing:
    """The server's API keys. Without any, every request is of the tenant `ANYBODY`."""

    def __init__(self, keys: Sequence[tuple[bytes, ApiTenant]] = ()) -> None:
        digests = [digest for digest, _ in keys]
        if len(set(digests)) != len(digests):
            raise ArgumentError(
                "expected every API key once, got one that two tenants have or that is listed twice"
            )
        numbers: Counter[str] = Counter()
        found = []
        for digest, tenant in keys:
            numbers[tenant.name] += 1
            found.append((digest, ApiKey(tenant, str(numbers[tenant.name]))))
        self._keys = tuple(found)

    @property
    def tenants(self) -> list[ApiTenant]:
        """The tenants that have keys, each once."""
        return list(dict.fromkeys(key.tenant for _, key in self._keys))

    @property
    def is_empty(self) -> bool:
        """Whether no tenant has a key; the server then asks for none."""
        return all(key.tenant.is_admin for _, key in self._keys)

    @property
    def has_admin(self) -> bool:
        return any(key.tenant.is_admin for _, key in self._keys)

    def find(self, key: str) -> ApiKey | None:
        """None for an unknown key."""
        digest = digest_of_key(key)
        found = None
        for known, one in self._keys:  # all of them: the time tells nothing of a match
            if hmac.compare_digest(known, digest):
                found = one
        return found
