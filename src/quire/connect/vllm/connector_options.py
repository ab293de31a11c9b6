"""`ConnectorOptions`: the options of the connector, from vLLM's `kv_connector_extra_config`.

The options of the tiers are those of an engine, with the same names and meanings (`EngineConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.sizes import parse_size

__all__ = ["ConnectorOptions"]

_TIERS = ("host_cache", "disk_cache", "peers", "remote_cache")
_OF_TIERS = (*_TIERS, "disk_cache_size", "disk_cache_min_free", "remote_secret")
_OWN = ("load_memory", "max_wait_s", "model_version", "salt_quota")
_WHERE = "kv_connector_extra_config"


@dataclass(frozen=True)
class ConnectorOptions:
    """tiers: a config with the options of the tiers alone.

    load_memory: most bytes of loaded prefixes that wait for their requests to begin. max_wait_s: most seconds that a
    request waits for a load; it computes what has not arrived. model_version: a text in place of the digest of the
    model's files. salt_quota: most bytes in each tier under one cache salt; None: no limit.
    """

    tiers: EngineConfig
    load_memory: int = 1 << 30
    max_wait_s: float = 10.0
    model_version: str | None = None
    salt_quota: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ConnectorOptions:
        """*raises:* ArgumentError: an unknown option, a wrong value, or no tier."""
        if unknown := sorted(set(given) - {*_OF_TIERS, *_OWN}):
            raise ArgumentError(
                f"expected options among {', '.join((*_OF_TIERS, *_OWN))} in {_WHERE}, got {', '.join(unknown)}"
            )
        if not any(given.get(name) is not None for name in _TIERS):
            raise ArgumentError(f"expected one of {', '.join(_TIERS)} in {_WHERE}, got none of them")
        own: dict[str, Any] = {}
        for name in ("load_memory", "salt_quota"):
            if given.get(name) is not None:
                own[name] = parse_size(given[name], where=name)
        if (wait := given.get("max_wait_s")) is not None:
            if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 < wait < float("inf"):
                raise ArgumentError(f"expected seconds above 0 as max_wait_s in {_WHERE}, got {wait!r}")
            own["max_wait_s"] = float(wait)
        if (version := given.get("model_version")) is not None:
            if not isinstance(version, str) or not version:
                raise ArgumentError(f"expected a text as model_version in {_WHERE}, got {version!r}")
            own["model_version"] = version
        of_tiers = {name: given[name] for name in _OF_TIERS if given.get(name) is not None}
        return cls(EngineConfig(**of_tiers), **own)
