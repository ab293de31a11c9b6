"""What a tier is to those who use one: values by key, in one place. Three of them implement it.

A tier knows no models and no tokens: a value is bytes that `segment` checks, `info` what an index may say about it. Its
calls block for as long as its medium takes and come from the worker threads of `stack.TierStack`, never from a step.

Invariants
    T1  `load` returns the very bytes that `store` was given for this key, or None; a value whose writing was cut
        off is not there. (Damage of the medium is found by `segment.decode`.)
    T2  the values of a tier never take more than its cap, at no moment; what it needs room for, it makes room for by
        evicting: of the values that none of its others continues, those of the lowest cache priority, of those the
        one used longest ago; none for a value of lower cache priority. (A server that others share has its own order.)
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
"""Why a value is gone: for want of room; it was not what had been stored; it was not found any more (a server, or
another process with the same folder, has given it up); it was asked to go; the tier has given up all it had."""


class TierError(QuireError):
    """A tier that could not do what was asked: a full disk, a lost connection, a time-out; one clear line.

    The stack logs the first of each kind: operation, class, class and errno of the `__cause__`.
    """


class UnavailableError(TierError):
    """Not tried, as the last attempt failed a short time ago: costs nothing, and is no failure of its own."""


class DamagedError(TierError):
    """The tier found out by itself that a value is not what was stored, and has removed it."""


@dataclass(frozen=True)
class SegmentInfo:
    """What a tier may index beside a value; enough to rebuild the tree of what is stored without reading values.

    root: `keys.root_key`. parent: the key of the segment before it, or the root. tokens: its own, int32 little
    endian. extra_keys: (position, key) within it. cache_priority: 0 discard, 1 normal, 2 keep. owner: whose it is, for
    lists; may be "".
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
    """Counts since the start, but for the first two, which are now (-1: only a server that others share knows)."""

    num_values: int
    num_bytes: int
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    failures: int = 0


class Tier(Protocol):
    """See the module's text. Calls may come from several threads at once."""

    name: str
    """"host", "disk" or "remote"."""

    on_removed: Callable[[Sequence[bytes], Reason], None]
    """Called with the keys of values that the tier has given up by itself ("evicted" for want of room, "damaged",
    "cleared" when it is closed and nothing of it stays), as far as it knows; does nothing at first. In any thread, with
    locks held: it has to be quick, and not to call the tier."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these values are there, in one round trip. Counts as no use of them."""
        ...

    def load(self, key: bytes) -> memoryview | None:
        """The value, None where it is not. It stays valid while it is referred to, whatever is evicted."""
        ...

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        """Keeps the parts of `value` one after the other under `key`: for good, as far as the medium can, on return.

        False: it is not kept (larger than the cap, or all else has to stay); a key that is there is only refreshed.
        """
        ...

    def evict(self, key: bytes) -> bool:
        """Removes a value; whether it was there."""
        ...

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        """Key and info of every value under these roots, from an index alone; nothing where the tier has none."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Lets go of files, connections and memory. Twice does nothing."""
        ...


@runtime_checkable
class LoadsMany(Protocol):
    """What a tier may have beside the contract: several values in one call, where that is cheaper than one by one."""

    def load_many(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The values of the leading keys that are there; fewer, or none, where it cannot give more at once.

        Whoever wants to know why asks `load` for the next one.
        """
        ...


@runtime_checkable
class LoadsInPlace(Protocol):
    """What a tier may have beside the contract: values read to where they are wanted, without a copy between, as long
    as that waits for nothing.

    `locate`, then `read_now` for some, then `confirm`: what was read is what was stored only for those confirmed.
    """

    def locate(self, keys: Sequence[bytes]) -> list[Any]:
        """Where the leading values lie, as far as they are there."""
        ...

    def read_now(self, places: Sequence[Any], parts: Sequence[Sequence[Any]]) -> list[tuple[memoryview, int]]:
        """Of the leading values the first bytes of each, and the XXH3-64 of its last ones, which were read into its
        buffers, one after the other.

        It ends before the first that would have to wait, or is smaller than its buffers; what is in them, and in those
        behind, then says nothing.
        """
        ...

    def confirm(self, keys: Sequence[bytes], places: Sequence[Any]) -> int:
        """How many of the leading values still lie where they did; these count as used."""
        ...
