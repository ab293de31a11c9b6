"""The tier of a URL: `remote_cache="redis://host"` is the remote tier over a store; other schemes are registered.

Cost: a look-up in a dictionary, once for each engine.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.registry import Registry
from quire.secret_text import resolve_secret
from quire.tiers.remote.stores import STORES, MakeStore
from quire.tiers.tier import Tier

__all__ = ["register", "register_store", "tier_from_url", "unregister"]


def _remote(url: str) -> Tier:
    from quire.tiers.remote.remote_tier import RemoteTier

    return RemoteTier(url)


_MAKERS: Registry[Callable[[str], Tier]] = Registry(
    "a tier's scheme", "remote_cache", dict.fromkeys(STORES, _remote)
)


def register(scheme: str, make: Callable[[str], Tier]) -> None:
    """Registers a scheme: `remote_cache="SCHEME://..."` uses the tier that `make` returns for the whole URL.

    The tier's `name` is "remote". If `make` raises TierError the engine goes on without the tier, and logs it once.

    *raises:* ArgumentError: the scheme is registered already.
    """
    _MAKERS.register(scheme, make)


def register_store(scheme: str, make: MakeStore) -> None:
    """As `register`, for a store: the remote tier uses it, with its checks, pauses and counts.

    *raises:* ArgumentError: the scheme is registered already.
    """
    _MAKERS.register(scheme, _remote)
    STORES.register(scheme, make)


def unregister(scheme: str) -> None:
    """Undoes `register` or `register_store`; users of the scheme are unaffected. *raises:* ArgumentError: the scheme is
    built in or unknown."""
    _MAKERS.unregister(scheme)
    if scheme in STORES:
        STORES.unregister(scheme)


def tier_from_url(url: str) -> Tier:
    """url: a URL, or `env:NAME`, a variable that holds one. *raises:* ArgumentError: no tier for the scheme."""
    url = resolve_secret(url, "remote_cache")
    scheme = url[: max(0, url.find("://"))]  # without a scheme the text may be a password: not shown
    return _MAKERS[scheme](url)
