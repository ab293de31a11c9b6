"""The tier of a URL: `remote_cache="redis://host"` is a Redis server; other schemes are registered.

Cost: a look-up in a dictionary, once for each engine.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.registry import Registry
from quire.secret_text import resolve_secret
from quire.tiers.tier import Tier

__all__ = ["register", "tier_from_url", "unregister"]


def _redis(url: str) -> Tier:
    from quire.tiers.remote.remote_tier import RemoteTier

    return RemoteTier(url)


_MAKERS: Registry[Callable[[str], Tier]] = Registry(
    "a tier's scheme", "remote_cache", {"redis": _redis, "rediss": _redis, "unix": _redis}
)
unregister = _MAKERS.unregister


def register(scheme: str, make: Callable[[str], Tier]) -> None:
    """Registers a scheme: `remote_cache="SCHEME://..."` uses the tier that `make` returns for the whole URL.

    The tier's `name` is "remote". If `make` raises TierError the engine goes on without the tier, and logs it once.

    *raises:* ArgumentError: the scheme is registered already.
    """
    _MAKERS.register(scheme, make)


def tier_from_url(url: str) -> Tier:
    """url: a URL, or `env:NAME`, a variable that holds one. *raises:* ArgumentError: no tier for the scheme."""
    url = resolve_secret(url, "remote_cache")
    scheme = url[: max(0, url.find("://"))]  # without a scheme the text may be a password: not shown
    return _MAKERS[scheme](url)
