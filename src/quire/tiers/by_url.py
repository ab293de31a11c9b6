"""Which tier a URL means: `remote_cache="redis://host"` is a Redis server, another scheme what was registered for it.

Cost: a look-up in a dictionary, once for each engine.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import ArgumentError
from quire.secret_text import named
from quire.tiers.tier import Tier

__all__ = ["register", "tier_of", "unregister"]


def _redis(url: str) -> Tier:
    from quire.tiers.remote import RemoteTier

    return RemoteTier(url)


_MAKERS: dict[str, Callable[[str], Tier]] = {"redis": _redis, "rediss": _redis, "unix": _redis}


def register(scheme: str, make: Callable[[str], Tier]) -> None:
    """Have `remote_cache="SCHEME://..."` use the tier that `make` returns for the whole URL; its `name` is "remote".

    `make` may raise TierError: the engine goes on without the tier, and says so once.

    Raises:
        ArgumentError: the scheme is taken.
    """
    if _MAKERS.setdefault(scheme, make) is not make:
        raise ArgumentError(f"expected a new scheme for a tier, got {scheme!r}; there are {sorted(_MAKERS)}")


def unregister(scheme: str) -> None:
    """Undo `register`. Engines that use such a tier go on."""
    if _MAKERS.get(scheme) is _redis:
        raise ArgumentError(f"expected a scheme that was registered, got {scheme!r}")
    _MAKERS.pop(scheme, None)


def tier_of(url: str) -> Tier:
    """Of a URL, or of `env:NAME`, whose value is one. *raises:* ArgumentError: a URL that no tier is for."""
    url = named(url, "remote_cache")
    return _MAKERS.get(url.partition("://")[0], _redis)(url)
