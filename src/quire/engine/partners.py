"""Options of `quire.LLM` that say something about another one, and nothing without it: refused where they stand alone.

An option that has its default counts as not given, so that whoever hands all of them on is not refused. `block_size` is
taken with every storage: whoever tries them all in turn says it once, and virtual, contiguous and growing have units of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ArgumentError

__all__ = ["check_partners"]

_TIERS = ("host_cache", "disk_cache", "remote_cache")
_SHARING = ("paged", "virtual", "auto")
# Option: what it is where it is not given, and the storages that it means something to.
_OF_STORAGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "reservation": ("max", ("contiguous",)),
    "growth": ("spread", ("growing",)),
    "piece_size": ("64KiB", ("virtual", "auto")),
    "park_memory": ("auto", _SHARING),
    "pin_memory": ("25%", _SHARING),
    "prefault": (False, ("paged", "auto")),
}


def check_partners(given: Mapping[str, Any]) -> None:
    """given: the options by name. *raises:* ArgumentError naming the option and what it needs."""
    if given["disk_cache_size"] is not None and given["disk_cache"] is None:
        _refuse(given, "disk_cache_size", "disk_cache, the folder that may be so large")
    if given["cache_write"] != "eviction" and all(given[name] is None for name in _TIERS):
        _refuse(given, "cache_write", "host_cache, disk_cache or remote_cache, which are written so")
    if given["park_memory"] != "auto" and given["preemption"] == "recompute":
        _refuse(given, "park_memory", "preemption park or auto: recompute parks nothing")
    for name, (default, storages) in _OF_STORAGES.items():
        if given[name] != default and given["storage"] not in storages:
            _refuse(given, name, f"storage {' or '.join(storages)}; {given['storage']} does not use it")


def _refuse(given: Mapping[str, Any], name: str, needs: str) -> None:
    raise ArgumentError(
        f"expected with {name} also {needs}; got {name} {given[name]!r} without - in `{name}`"
    )
