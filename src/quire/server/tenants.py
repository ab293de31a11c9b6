"""Whose keys are whose. A tenant is a name, a namespace of its own and its share of the memory.

Keys are kept as SHA-256 digests and compared in constant time, all of them each time; no key is ever logged, shown or
kept in the clear.

Cost: `find` one digest and one comparison for each key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ArgumentError

__all__ = ["ADMIN", "ANYBODY", "KeyRing", "Tenant", "digest_of_key", "tenant_of_namespace"]


_MARK = b"tenant"


@dataclass(frozen=True)
class Tenant:
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

    def namespace(self, cache_salt: str | None) -> bytes:
        """The namespace of its content: nobody else's requests can name it, whatever salt they send."""
        name = self.name.encode()
        salt = b"" if cache_salt is None else cache_salt.encode()
        return _MARK + len(name).to_bytes(4, "little") + name + salt


def tenant_of_namespace(namespace: bytes) -> str:
    """The name of the tenant whose namespace it is; never the salt. Content that no tenant asked for: "-"."""
    head = len(_MARK) + 4
    if not namespace.startswith(_MARK) or len(namespace) < head:
        return "-"
    size = int.from_bytes(namespace[len(_MARK) : head], "little")
    return namespace[head : head + size].decode("utf-8", "replace")


ANYBODY = Tenant("default")
ADMIN = Tenant("admin", is_admin=True)


def digest_of_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyRing:
    """The keys there are. None at all: everybody is `ANYBODY`."""

    def __init__(self, keys: Sequence[tuple[bytes, Tenant]] = ()) -> None:
        digests = [digest for digest, _ in keys]
        if len(set(digests)) != len(digests):
            raise ArgumentError(
                "expected every API key once, got one that belongs to two tenants or stands twice"
            )
        self._keys = tuple(keys)

    @property
    def is_empty(self) -> bool:
        """Whether no tenant has a key: then none is asked for."""
        return all(tenant.is_admin for _, tenant in self._keys)

    @property
    def has_admin(self) -> bool:
        return any(tenant.is_admin for _, tenant in self._keys)

    def find(self, key: str) -> Tenant | None:
        """Whose key it is."""
        digest = digest_of_key(key)
        found = None
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found
