"""`Tier`, the contract of a tier: values by key, in one place. Four tiers implement it: host, disk, peers, remote.

A tier knows no models and no tokens: a value is bytes that `segment` checks, `info` the fields for its index. Its
calls block for as long as its medium takes and come from the worker threads of `stack.TierStack`, never from a step.

Invariants
    T1  `load` returns the very bytes that `store` was given for this key, or None; a value whose writing was cut
        off is not there. (`segment.decode` finds damage of the medium.)
    T2  the values of a tier never take more than its cap. It makes room by evicting: of the values that no other value
        of the tier continues, those of the lowest cache priority, of those the one unused for longest; it evicts no
        value for one of lower cache priority. (A shared server has its own order.)
    T3  a call that fails raises TierError, and leaves the tier as it was or without the value concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from quire.errors import QuireError

__all__ = [
    "DamagedError",
    "LoadsInPlace",
    "LoadsMany",
    "Reason",
    "SegmentInfo",
    "Tier",
    "TierError",
    "TierStats",
    "UnavailableError",
]

Reason: TypeAlias = Literal["evicted", "damaged", "missing", "dropped", "cleared"]
"""Why a value is gone. "evicted": for room; "damaged": it failed its check; "missing": it was not found (a server, or
another process with the same folder, removed it); "dropped": on request; "cleared": the tier has lost all values."""


class TierError(QuireError):
    """A failed call of a tier: a full disk, a lost connection, a time-out; one clear line.

    The stack logs the first of each kind: operation, class, class and errno of the `__cause__`.
    """


class UnavailableError(TierError):
    """A call that was not made, because the last one failed a short time ago. Costs nothing; not a failure itself."""


class DamagedError(TierError):
    """The tier itself found a damaged value, and has removed it."""


@dataclass(frozen=True)
class SegmentInfo:
    """The fields of a value that a tier may index; enough to rebuild the tree of stored segments without the values.

    root: `block_hash.root_key`. parent: the key of the segment before it, or the root. tokens: the segment's, int32
    little endian. extra_keys: (position, key) within it. cache_priority: 0 discard, 1 normal, 2 keep. owner: the
    tenant's name, for lists; may be "".
    """

    root: bytes
    parent: bytes
    start: int
    tokens: bytes
    extra_keys: tuple[tuple[int, bytes], ...] = ()
    cache_priority: int = 1
    owner: str = ""


@dataclass(frozen=True)
class TierStats:
    """num_values, num_bytes: now, -1 for a shared server. The others: counts since the start."""

    num_values: int
    num_bytes: int
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    failures: int = 0


class Tier(Protocol):
    """See the module's text. Several threads may call at once."""

    name: str
    """"host", "disk", "peers" or "remote"."""

    on_removed: Callable[[Sequence[bytes], Reason], None]
    """Called with the keys of values that the tier has removed by itself ("evicted" for room, "damaged", "cleared" when
    it is closed and keeps no value), as far as it knows. Runs in any thread, with locks held: it must be quick, and not
    call the tier. The initial one does nothing."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key True if its value is there, in one round trip. Does not count as a use."""
        ...

    def load(self, key: bytes) -> memoryview | None:
        """The value, or None. It stays valid while it is referred to, even if it is evicted."""
        ...

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        """Stores the parts of `value` one after the other under `key`; on return it is as durable as the medium can be.

        False: it is not stored (larger than the cap, or no other value may be evicted). An existing key is only
        refreshed.
        """
        ...

    def evict(self, key: bytes) -> bool:
        """Removes a value; True if it was there."""
        ...

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        """Key and info of every value under these roots, from an index alone; empty if the tier has none."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Closes files and connections, frees memory. A second call does nothing."""
        ...


@runtime_checkable
class LoadsMany(Protocol):
    """An optional part of the contract: several values in one call, for a tier where that is cheaper."""

    def load_many(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The values of the leading keys that are there; fewer, or none, if it cannot load more at once.

        `load` of the next key gives the reason.
        """
        ...


@runtime_checkable
class LoadsInPlace(Protocol):
    """An optional part of the contract: values read straight into the caller's buffers, if that needs no waiting.

    Call `locate`, then `read_now`, then `confirm`: only the confirmed values are those that were stored.
    """

    def locate(self, keys: Sequence[bytes]) -> list[Any]:
        """The places of the leading values that are there."""
        ...

    def read_now(self, places: Sequence[Any], parts: Sequence[Sequence[Any]]) -> list[tuple[memoryview, int]]:
        """Reads the last bytes of each leading value into its buffers; returns its first bytes, and the XXH3-64 of the
        last ones.

        Ends before the first value that would have to wait, or is smaller than its buffers; its buffers and the later
        ones are undefined.
        """
        ...

    def confirm(self, keys: Sequence[bytes], places: Sequence[Any]) -> int:
        """How many of the leading values still have their places; these count as used."""
        ...
