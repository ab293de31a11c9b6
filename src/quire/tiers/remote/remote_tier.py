"""The remote tier: values in a store (`store_protocol.Store`) shared by all engines with its URL: a server or a folder.

The store decides which values it keeps; `ttl_s` lets them expire. A value never changes: engines do not disturb each
other.

The store is not trusted. One exchange with it takes at most `timeout` seconds and receives at most `max_value_bytes`
a value (resolving a host name is the system's and not counted). A value is the one that was stored under this key, or
it is refused and removed. After a failure the store is left alone (`circuit_breaker`), and a thread of the tier checks
whether it is back (`Store.ping`), so that no request waits for that: a store that is down costs the time-out once, not
once per request. A store that only refuses to store (full, read-only) is still read.

Invariants (T1 to T3, and)
    R1  T1 holds against damage by the store and on the way: `load` raises DamagedError then.
    R2  a call during the pause after a failure raises UnavailableError at once.

Cost: `contains` and `load_many` one call of the store for all keys; `load` one; `store` two, the second only if the
value is not there yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.errors import ArgumentError
from quire.tiers.circuit_breaker import CircuitBreaker
from quire.tiers.remote.limited_socket import Allowance
from quire.tiers.remote.record import checksum, index_entry
from quire.tiers.remote.store_protocol import Record, StoredItem
from quire.tiers.remote.store_url import split_url
from quire.tiers.remote.stores import MakeStore, open_store
from quire.tiers.tier import DamagedError, Reason, SegmentInfo, TierError, TierStats, UnavailableError

__all__ = ["RemoteTier"]

# Of an answer without values: enough for more than a thousand keys.
_SMALL_BYTES = 1 << 20


class RemoteTier:
    """See the module's text. Connects at the first call.

    url: of a store, with the options of `store_url`; these go before timeout, max_value_bytes and ttl_s. timeout:
    seconds of one exchange; None: the store's own. max_value_bytes: larger values are neither stored nor accepted.
    ttl_s: seconds a value is kept after its last store; None: until the store evicts it. probe_in_background: False:
    the first call after a pause probes, and waits. make_store: makes the store, in place of the URL's scheme.

    *raises:* BackendError: the store's package is not installed. ArgumentError: an invalid URL.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        timeout: float | None = None,
        max_value_bytes: int = 64 << 20,
        ttl_s: float | None = None,
        first_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        probe_in_background: bool = True,
        clock: Callable[[], float] = time.monotonic,
        make_store: MakeStore = open_store,
    ) -> None:
        if (
            (timeout is not None and timeout <= 0)
            or max_value_bytes <= 0
            or (ttl_s is not None and ttl_s <= 0)
        ):
            raise ArgumentError(
                "expected timeout, max_value_bytes and ttl_s above 0, "
                f"got {timeout}, {max_value_bytes} and {ttl_s}"
            )
        given = split_url(url)
        self._allowance = Allowance(clock)
        self._store = make_store(given.url, self._allowance, given.ttl_s or ttl_s)
        self._timeout = given.timeout_s or timeout or self._store.timeout_s
        limits = (given.value_limit_bytes, self._store.max_value_bytes)
        self._value_limit = min((limit for limit in limits if limit is not None), default=None)
        self._max_value_bytes = 0
        self.raise_max_value_bytes(max_value_bytes)
        self._server = CircuitBreaker(first_pause_s=first_pause_s, max_pause_s=max_pause_s, clock=clock)
        self._stores = CircuitBreaker(first_pause_s=first_pause_s, max_pause_s=max_pause_s, clock=clock)
        self._probe_in_background = probe_in_background
        self._probe: threading.Thread | None = None
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {"hits": 0, "misses": 0, "stored": 0, "failures": 0}
        self._closed = False
        self._loads_several = True  # until several values take longer than one exchange may
        # Never called: a store does not report its evictions.
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None

    @property
    def where(self) -> str:
        """The store's address, without any secret."""
        return self._store.where

    def ping(self) -> None:
        """Checks that the store answers and accepts the login. *raises:* TierError: it does not; calls pause."""
        with self._exchange("a greeting"):
            self._store.ping()

    def raise_max_value_bytes(self, num_bytes: int) -> None:
        """Has values of up to `num_bytes` stored and accepted from now on, as far as the store's limit allows."""
        limit = num_bytes if self._value_limit is None else min(num_bytes, self._value_limit)
        self._max_value_bytes = max(self._max_value_bytes, limit)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._exchange("a look-up"):
            return self._store.exists(keys)

    def load(self, key: bytes) -> memoryview | None:
        with self._exchange("a load", self._max_value_bytes):
            [record] = self._store.get([key])
            if record is None:
                self._count("misses")
                return None
            value = _checked_value(key, record)
            if value is None:
                self._store.delete(key)
                raise DamagedError(f"the store at {self.where} gave other bytes than were stored")
            self._count("hits")
            return value

    def load_many(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The values of the leading keys that are there, in one call of the store; `load` of the next gives the reason.

        None once several have taken longer than one exchange may: over a slow network `load` gets them one by one.
        """
        if not keys or not self._loads_several:
            return []
        values: list[memoryview] = []
        try:
            with self._exchange("a load", len(keys) * self._max_value_bytes):
                for key, record in zip(keys, self._store.get(keys), strict=True):
                    value = None if record is None else _checked_value(key, record)
                    if value is None:
                        break
                    values.append(value)
        except TierError as error:
            if isinstance(error.__cause__, self._store.time_outs):
                self._loads_several = False
            raise
        self._count("hits", len(values))
        return values

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        num_bytes = sum(part.nbytes for part in value)
        if num_bytes > self._max_value_bytes:
            return False
        # No request waits for a store: the first one after a pause is the trial.
        number = self._stores.begin()
        trial = number is None
        if trial:
            number = self._stores.begin_trial()
        if number is None:
            raise UnavailableError(f"the store at {self.where} refused to store a short time ago")
        done = is_there = is_new = False
        try:
            with self._exchange("a store", refusal=self._stores, number=number):
                is_there = self._store.refresh(key)
                if not is_there:
                    is_new = self._store.put(key, Record(value, checksum(key, value), index_entry(info)))
            done = True
        finally:
            if trial:
                (self._stores.record_success if done else self._stores.record_failure)(number)
        self._count("stored", int(is_new))
        return is_there or is_new

    def evict(self, key: bytes) -> bool:
        with self._exchange("a removal"):
            return self._store.delete(key)

    def items(self) -> Iterator[StoredItem]:
        """All values, for lists; as long as it takes. *raises:* TierError."""
        try:
            yield from self._store.scan()
        except Exception as error:
            raise TierError(f"a list at {self.where}: {self._reason(error)}") from error

    def is_damaged(self, key: bytes) -> bool:
        """Whether there is a value, and it is another than was stored; it stays. *raises:* TierError."""
        with self._exchange("a load", self._max_value_bytes):
            [record] = self._store.get([key])
        return record is not None and record.checksum != checksum(key, record.parts)

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        return []  # a shared store is not scanned

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(num_values=-1, num_bytes=-1, **self._counts)

    def close(self) -> None:
        self._closed = True
        self._store.close()
        probe = self._probe
        if probe is not None and probe is not threading.current_thread():
            probe.join(self._timeout + 1)

    @contextmanager
    def _exchange(
        self,
        operation: str,
        num_bytes: int = 0,
        *,
        refusal: CircuitBreaker | None = None,
        number: int = 0,
    ) -> Iterator[None]:
        """Guards one exchange. refusal: the breaker for a refusal of the store, in place of that of all calls."""
        call = self._begin_call()
        try:
            with self._allowance.exchange(self._timeout, num_bytes + _SMALL_BYTES):
                yield
        except Exception as error:
            refused = self._store.is_refusal(error)
            if refusal is not None and refused:
                refusal.record_failure(number)
            else:
                self._server.record_failure(call)
            if not refused:
                self._store.reset()
            self._count("failures")
            if isinstance(error, DamagedError):
                raise
            raise TierError(f"{operation} at {self.where}: {self._reason(error)}") from error

    def _begin_call(self) -> int:
        if self._closed:
            raise UnavailableError("this tier was closed")
        call = self._server.begin()
        if call is not None:
            return call
        trial = self._server.begin_trial()
        if trial is not None:
            if not self._probe_in_background:
                self._probe_server(trial)
            else:
                self._start_probe(trial)
        call = self._server.begin()
        if call is None:
            raise UnavailableError(f"the store at {self.where} failed a short time ago")
        return call

    def _start_probe(self, trial: int) -> None:
        probe = threading.Thread(
            target=self._probe_server, args=(trial,), name="quire-tier-remote-probe", daemon=True
        )
        try:
            probe.start()
        except RuntimeError:  # no more threads
            self._server.record_failure(trial)
        else:
            self._probe = probe

    def _probe_server(self, trial: int) -> None:
        is_up = False
        try:
            with self._allowance.exchange(self._timeout, _SMALL_BYTES):
                self._store.ping()
            is_up = True
        except Exception:
            self._store.reset()
        finally:
            (self._server.record_success if is_up else self._server.record_failure)(trial)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, self._store.time_outs):
            return f"no answer within {self._timeout:g} s"
        text = self._store.explain_error(error)
        return "".join(c if c.isprintable() else "?" for c in text) or type(error).__name__

    def _count(self, counter: str, by: int = 1) -> None:
        with self._lock:
            self._counts[counter] += by


def _checked_value(key: bytes, record: Record) -> memoryview | None:
    """The value of a record; None: it is another than was stored under the key."""
    [value] = record.parts or [memoryview(b"")]
    return value if record.checksum == checksum(key, [value]) else None
