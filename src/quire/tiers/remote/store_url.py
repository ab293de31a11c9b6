"""Splits the URL of a store: `SCHEME://PLACE?option=value`. Options of every store are read here, in one place.

    ttl_s         seconds that a value is kept after its last store; not given: until the store evicts it
    timeout_s     seconds of one exchange; not given: the store's own
    value_limit   larger values are not stored; not given: the store's own

Messages never show a value of a URL: it may be a part of a password.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote

from quire.errors import ArgumentError
from quire.sizes import parse_size

__all__ = ["StoreUrl", "split_url", "take_options"]

_COMMON = ("ttl_s", "timeout_s", "value_limit")


@dataclass(frozen=True)
class StoreUrl:
    """url: without the options below. ttl_s, timeout_s, value_limit_bytes: None: not given."""

    url: str
    ttl_s: float | None = None
    timeout_s: float | None = None
    value_limit_bytes: int | None = None


def split_url(url: str) -> StoreUrl:
    """*raises:* ArgumentError: an option has a wrong value, or is given twice."""
    place, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    ours = _unique((name, value) for name, value in pairs if name in _COMMON)
    if not ours:
        return StoreUrl(url)
    rest = "&".join(f"{quote(name)}={quote(value, safe='')}" for name, value in pairs if name not in _COMMON)
    return StoreUrl(
        f"{place}?{rest}" if rest else place,
        _seconds(ours, "ttl_s"),
        _seconds(ours, "timeout_s"),
        parse_option_size(ours, "value_limit"),
    )


def take_options(url: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(scheme and place, options) of a URL. *raises:* ArgumentError: an option that the store does not have."""
    place, _, query = url.partition("?")
    options = _unique(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(names))
    if unknown:
        raise ArgumentError(
            f"expected options {', '.join([*names, *_COMMON])} in the URL of {place.partition(':')[0]}, got "
            f"{', '.join(unknown)} - in `remote_cache`"
        )
    return place, options


def parse_option_size(options: dict[str, str], name: str) -> int | None:
    if name not in options:
        return None
    try:
        num_bytes = parse_size(options[name])
    except ArgumentError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ArgumentError(
            f'expected a size such as "16MiB" for {name}, got another value - in `remote_cache`'
        )
    return num_bytes


def _unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise ArgumentError(f"expected {name} once, got it twice - in `remote_cache`")
        found[name] = value
    return found


def _seconds(options: dict[str, str], name: str) -> float | None:
    if name not in options:
        return None
    try:
        seconds = float(options[name])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"expected seconds above 0 for {name}, got another value - in `remote_cache`")
    return seconds
