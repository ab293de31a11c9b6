"""`quire cache ls`, `verify` and `rm` of a shared store, given by its URL or as `env:NAME`.

Keys are hashes: a store's values have no names of models. Cost: one list of all keys; `verify` reads every value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from quire.errors import ArgumentError
from quire.secret_text import resolve_secret
from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.tiers.remote.remote_tier import RemoteTier

__all__ = ["age_text", "clear_store", "is_store", "list_store", "verify_store"]


def is_store(place: str) -> bool:
    """Whether an argument is a URL, or names a variable with one, and not a folder."""
    return "://" in place or place.startswith("env:")


def list_store(url: str, *, as_json: bool) -> None:
    with _opened(url) as tier:
        items = list(tier.items())
        ages = [item.age_s for item in items if item.age_s is not None]
        num_bytes = sum(item.num_bytes for item in items)
        if as_json:
            oldest_s, newest_s = (max(ages), min(ages)) if ages else (None, None)
            fields = {"segments": len(items), "bytes": num_bytes, "oldest_s": oldest_s, "newest_s": newest_s}
            print(json.dumps({"store": tier.where, **fields}))
            return
        times = f", stored {age_text(max(ages))} to {age_text(min(ages))}" if ages else ""
        print(f"{len(items)} segments, {format_size(num_bytes)} in {tier.where}{times}")


def verify_store(url: str, *, repair: bool, as_json: bool) -> int:
    with _opened(url) as tier:
        keys = [item.key for item in tier.items()]
        damaged = [key for key in keys if tier.is_damaged(key)]
        num_removed = sum(tier.evict(key) for key in damaged) if repair else 0
    if as_json:
        entries = [{"key": key.hex()} for key in damaged]
        print(json.dumps({"segments": len(keys), "damaged": entries, "removed": num_removed}))
    else:
        for key in damaged:
            print(f"{key.hex()[:12]}: other bytes than were stored")
        print(
            f"{len(keys)} segments, {len(damaged)} damaged" + (f", {num_removed} removed" if repair else "")
        )
    return 1 if damaged else 0


def clear_store(url: str, *, yes: bool) -> None:
    with _opened(url) as tier:
        keys = [item.key for item in tier.items()]
        if not yes:
            typer.confirm(
                f"Remove {len(keys)} segments of all engines from {tier.where}?", abort=True, err=True
            )
        print(f"{sum(tier.evict(key) for key in keys)} segments removed")


@contextmanager
def _opened(url: str) -> Iterator[RemoteTier]:
    """*raises:* ArgumentError: no store, or one that does not answer."""
    from quire.tiers.remote.remote_tier import RemoteTier
    from quire.tiers.tier import TierError

    tier: RemoteTier | None = None
    try:
        tier = RemoteTier(resolve_secret(url, "DIR"), max_value_bytes=sys.maxsize >> 1)
        tier.ping()
        yield tier
    except TierError as error:
        raise ArgumentError(f"expected a store that answers, got: {error}") from None
    finally:
        if tier is not None:
            tier.close()


def age_text(seconds: float) -> str:
    """A past time in words; "0 s ago" where the clock went back."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
