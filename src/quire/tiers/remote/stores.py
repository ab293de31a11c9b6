"""The stores by the scheme of their URL. `by_url.register_store` adds one: a file with a class of
`store_protocol.Store`.

Cost: a look-up in a dictionary, once for each engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from quire.registry import Registry
from quire.tiers.remote.limited_socket import Allowance
from quire.tiers.remote.store_protocol import Store

__all__ = ["STORES", "MakeStore", "open_store"]

MakeStore: TypeAlias = Callable[[str, Allowance, float | None], Store]
"""Makes the store of a URL; its waits end with the allowance; a value lives so many seconds after its last store (None:
until it is evicted)."""


def _redis(url: str, allowance: Allowance, ttl_s: float | None) -> Store:
    from quire.tiers.remote.redis_store import RedisStore

    return RedisStore(url, allowance, ttl_s)


def _s3(url: str, allowance: Allowance, ttl_s: float | None) -> Store:
    from quire.tiers.remote.s3_store import S3Store

    return S3Store(url, allowance, ttl_s)


def _folder(url: str, allowance: Allowance, ttl_s: float | None) -> Store:
    from quire.tiers.remote.folder_store import FolderStore

    return FolderStore(url, allowance, ttl_s)


def _mooncake(url: str, allowance: Allowance, ttl_s: float | None) -> Store:
    from quire.tiers.remote.mooncake_store import MooncakeStore

    return MooncakeStore(url, allowance, ttl_s)


STORES: Registry[MakeStore] = Registry(
    "a store's scheme",
    "remote_cache",
    {
        "redis": _redis, "rediss": _redis, "unix": _redis, "valkey": _redis, "valkeys": _redis, "s3": _s3,
        "folder": _folder, "mooncake": _mooncake,
    },
)  # fmt: skip


def open_store(url: str, allowance: Allowance, ttl_s: float | None) -> Store:
    """*raises:* ArgumentError: no store for the scheme, or a wrong URL. BackendError: a package is missing."""
    return STORES[url[: max(0, url.find("://"))]](url, allowance, ttl_s)
