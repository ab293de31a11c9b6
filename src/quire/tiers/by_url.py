"""Which tier a URL means: `remote_cache="redis://host"` is a Redis server, another scheme what was registered for it.

Cost: a look-up in a dictionary, once for each engine.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.registry import Registry
from quire.secret_text import resolve_secret
from quire.tiers.tier import Tier

__all__ = ["register", "tier_of", "unregister"]


def _redis(url: str) -> Tier:
    from quire.tiers.remote import RemoteTier

    return RemoteTier(url)


_MAKERS: Registry[Callable[[str], Tier]] = Registry(
    "a tier's scheme", "remote_cache", {"redis": _redis, "rediss": _redis, "unix": _redis}
)
unregister = _MAKERS.unregister


def register(scheme: str, make: Callable[[str], Tier]) -> None:
    """Have `remote_cache="SCHEME://..."` use the tier that `make` returns for the whole URL; its `name` is "remote".

    `make` may raise TierError: the engine goes on without the tier, and says so once.

    *raises:* ArgumentError: the scheme is taken by another.
    """
    _MAKERS.register(scheme, make)


def tier_of(url: str) -> Tier:
    """Of a URL, or of `env:NAME`, whose value is one. *raises:* ArgumentError: a URL that no tier is for."""
    url = resolve_secret(url, "remote_cache")
    scheme = url[: max(0, url.find("://"))]  # a URL without one may hold a password, which no error shows
    return _MAKERS[scheme](url)
