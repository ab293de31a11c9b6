"""`Store`, the contract of a shared store: records by key, on a server or in a folder that several engines use.

One file has one store; `remote_tier` is written once over it (checks, circuit breakers, counts), `stores` names it by
the scheme of a URL. A store does no checks of its own. It raises any exception; `is_refusal` and `explain_error` say
what it means.

Every call but `scan` runs within an exchange of the tier's `Allowance` and may wait only as long as that allows:
through a `LimitedSocket`, or by `TimedCalls`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Record", "Store", "StoredItem"]


@dataclass(frozen=True, eq=False)
class Record:
    """A value with the fields that go with it. parts: the value, one part after the other. checksum: `record.checksum`
    of key and value. info: the entry for an index, JSON; empty if the store did not read it."""

    parts: Sequence[memoryview]
    checksum: bytes
    info: bytes


@dataclass(frozen=True)
class StoredItem:
    """A value in a list. num_bytes: as the store counts them. age_s: seconds since it was stored; None: unknown."""

    key: bytes
    num_bytes: int
    age_s: float | None


class Store(Protocol):
    """See the module's text. Several threads may call at once."""

    where: str
    """The address, without any secret."""

    timeout_s: float
    """Seconds of an exchange, if the URL does not say."""

    max_value_bytes: int | None
    """The store's own limit; None: none."""

    time_outs: tuple[type[Exception], ...]
    """The exceptions of a call that waited as long as the allowance allows."""

    def ping(self) -> None:
        """Checks that the store answers and accepts the login."""
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key True if its value is there. Does not count as a use."""
        ...

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The record of each key, None where there is none. A malformed record has a wrong checksum."""
        ...

    def refresh(self, key: bytes) -> bool:
        """Notes a use and begins the time to live anew; False: the value is not there, or has to be stored again."""
        ...

    def put(self, key: bytes, record: Record) -> bool:
        """Stores a record whole, or not at all; False: there is no room now."""
        ...

    def delete(self, key: bytes) -> bool:
        """Removes a value; True if it was there."""
        ...

    def scan(self) -> Iterator[StoredItem]:
        """All values, for lists; not within an exchange, and as long as it takes."""
        ...

    def is_refusal(self, error: Exception) -> bool:
        """Whether the store answered and refused (full, read-only), so that its connections are in order."""
        ...

    def explain_error(self, error: Exception) -> str:
        """One line with the cause, and what to do where that is known; no secret."""
        ...

    def reset(self) -> None:
        """Drops idle connections: their next bytes may belong to a failed exchange."""
        ...

    def close(self) -> None:
        """Closes connections, ends threads. A second call does nothing."""
        ...
