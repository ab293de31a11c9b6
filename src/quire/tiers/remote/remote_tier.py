"""The remote tier: values on a Redis server, or a compatible one, shared by all engines with its address.

    quire:kv:1:<key, hex>    a hash: v the value, x its XXH3-64 (seeded with the key), i the `SegmentInfo` as JSON

The server needs no installation and no script; its `maxmemory` and `maxmemory-policy` (`allkeys-lru` fits) decide what
it keeps; `ttl_s` lets values expire. One command writes a value, so that no reader sees half of one, and a value never
changes: engines do not disturb each other.

The server is not trusted. One exchange with it takes at most `timeout` seconds and `max_value_bytes` (`limited_socket`;
resolving a host name is the system's and not counted). A value is the one that was stored under this key, or it is
refused and removed. After a failure the server is left alone (`circuit_breaker`), and a thread of the tier checks
whether it is
back (PING), so that no request waits for that: a server that is down costs the time-out once, not once per request. A
server that only refuses to store (full, read-only) is still read.

Invariants (T1 to T3, and)
    R1  T1 holds against damage by the server and on the way: `load` raises DamagedError then.
    R2  a call during the pause after a failure raises UnavailableError at once.

Cost: `contains` one round trip for all keys; `load` one, with three copies of the value in redis-py (one with hiredis);
`store` two, the second only if the value is not there yet, with one copy.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import xxhash

from quire.errors import ArgumentError, BackendError
from quire.tiers.circuit_breaker import CircuitBreaker
from quire.tiers.remote.limited_socket import Allowance, LimitedSocket
from quire.tiers.tier import DamagedError, Reason, SegmentInfo, TierError, TierStats, UnavailableError

if TYPE_CHECKING:
    import redis

__all__ = ["RemoteTier"]

_PREFIX = b"quire:kv:1:"
# Of an answer without values: enough for more than a thousand keys.
_SMALL_BYTES = 1 << 20


class RemoteTier:
    """See the module's text. Connects at the first call.

    url: redis://[[user]:password@]host[:port][/db], rediss:// for TLS, unix:///path. timeout: seconds of one exchange.
    max_value_bytes: larger values are neither stored nor accepted. ttl_s: seconds a value is kept after its last store;
    None: until the server evicts it. probe_in_background: False: the first call after a pause probes, and waits.
    connect: makes a connected socket in place of the URL's host, for tests without a network.

    *raises:* BackendError: redis-py is not installed. ArgumentError: an invalid URL.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 1.0,
        max_value_bytes: int = 64 << 20,
        ttl_s: float | None = None,
        first_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        probe_in_background: bool = True,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        if timeout <= 0 or max_value_bytes <= 0 or (ttl_s is not None and ttl_s <= 0):
            raise ArgumentError(
                "expected timeout, max_value_bytes and ttl_s above 0, "
                f"got {timeout}, {max_value_bytes} and {ttl_s}"
            )
        self._timeout = timeout
        self._max_value_bytes = max_value_bytes
        self._ttl_ms = None if ttl_s is None else max(1, round(1000 * ttl_s))
        self._allowance = Allowance(clock)
        self._pool, self.where = _make_pool(url, self._allowance, connect)
        self._client = _redis().Redis(connection_pool=self._pool)
        self._server = CircuitBreaker(first_pause_s=first_pause_s, max_pause_s=max_pause_s, clock=clock)
        self._stores = CircuitBreaker(first_pause_s=first_pause_s, max_pause_s=max_pause_s, clock=clock)
        self._probe_in_background = probe_in_background
        self._probe: threading.Thread | None = None
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {"hits": 0, "misses": 0, "stored": 0, "failures": 0}
        self._closed = False
        # Never called: the server does not report its evictions.
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None

    def ping(self) -> None:
        """Checks that the server answers and accepts the login. *raises:* TierError: it does not; calls pause."""
        with self._exchange("a greeting"):
            if self._client.ping() is not True:
                raise ValueError("an answer of the wrong form")

    def raise_max_value_bytes(self, num_bytes: int) -> None:
        """Has values of up to `num_bytes` stored and accepted from now on."""
        self._max_value_bytes = max(self._max_value_bytes, num_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._exchange("a look-up"):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(_PREFIX + key.hex().encode())
            answers = [_number(answer) == 1 for answer in pipeline.execute()]
            if len(answers) != len(keys):
                raise ValueError("an answer of the wrong form")
            return answers

    def load(self, key: bytes) -> memoryview | None:
        name = _PREFIX + key.hex().encode()
        with self._exchange("a load", self._max_value_bytes):
            answer: Any = self._client.hmget(name, [b"v", b"x"])
            if not isinstance(answer, list) or len(answer) != 2:
                raise ValueError("an answer of the wrong form")
            if answer == [None, None]:
                self._count("misses")
                return None
            value, checksum = answer
            if type(value) is not bytes or checksum != _checksum(key, [value]):
                self._client.delete(name)
                raise DamagedError(f"the server at {self.where} gave other bytes than were stored")
            self._count("hits")
            return memoryview(value)

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
            raise UnavailableError(f"the server at {self.where} refused to store a short time ago")
        done = False
        try:
            with self._exchange("a store", refusal=self._stores, number=number):
                stored = self._store(_PREFIX + key.hex().encode(), key, value, info)
            done = True
        finally:
            if trial:
                (self._stores.record_success if done else self._stores.record_failure)(number)
        self._count("stored", int(stored))
        return True

    def evict(self, key: bytes) -> bool:
        with self._exchange("a removal"):
            return _number(self._client.delete(_PREFIX + key.hex().encode())) == 1

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        return []  # a shared server is not scanned

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(num_values=-1, num_bytes=-1, **self._counts)

    def close(self) -> None:
        self._closed = True
        self._pool.disconnect()
        probe = self._probe
        if probe is not None and probe is not threading.current_thread():
            probe.join(self._timeout + 1)

    def _store(self, name: bytes, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        """Stores a value; False if it was there already."""
        if self._touch(name):
            return False
        fields: Any = {b"v": b"".join(value), b"x": _checksum(key, value), b"i": _index_entry(info)}
        if self._ttl_ms is None:
            _number(self._client.hset(name, mapping=fields))
        else:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hset(name, mapping=fields)
            pipeline.pexpire(name, self._ttl_ms)
            _number(pipeline.execute()[0])
        return True

    def _touch(self, name: bytes) -> bool:
        """Notes a use of a value; True if it is there."""
        if self._ttl_ms is None:
            return _number(self._client.touch(name)) == 1
        pipeline = self._client.pipeline(transaction=False)
        pipeline.touch(name)
        pipeline.pexpire(name, self._ttl_ms)
        return _number(pipeline.execute()[0]) == 1

    @contextmanager
    def _exchange(
        self,
        operation: str,
        num_bytes: int = 0,
        *,
        refusal: CircuitBreaker | None = None,
        number: int = 0,
    ) -> Iterator[None]:
        """Guards one exchange. refusal: the breaker for an error reply of the server, in place of that of all calls."""
        call = self._begin_call()
        try:
            with self._allowance.exchange(self._timeout, num_bytes + _SMALL_BYTES):
                yield
        except Exception as error:
            refused = isinstance(error, _redis().ResponseError)
            if refusal is not None and refused:
                refusal.record_failure(number)
            else:
                self._server.record_failure(call)
            if not refused:
                self._pool.disconnect(inuse_connections=False)  # their next bytes may belong to this exchange
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
            raise UnavailableError(f"the server at {self.where} failed a short time ago")
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
                is_up = self._client.ping() is True
        except Exception:
            self._pool.disconnect(inuse_connections=False)
        finally:
            (self._server.record_success if is_up else self._server.record_failure)(trial)

    def _reason(self, error: Exception) -> str:
        return _reason(error, self._timeout, self._pool.connection_kwargs.get("password"))

    def _count(self, counter: str, by: int = 1) -> None:
        with self._lock:
            self._counts[counter] += by


def _number(answer: Any) -> int:
    """*raises:* ValueError: no integer, so that this is no Redis server."""
    if type(answer) is not int:
        raise ValueError("an answer of the wrong form")
    return answer


def _checksum(key: bytes, parts: Sequence[Any]) -> bytes:
    digest = xxhash.xxh3_64(seed=int.from_bytes(key[:8], "little"))
    for part in parts:
        digest.update(part)
    return digest.digest()


def _index_entry(info: SegmentInfo) -> bytes:
    return json.dumps(
        {
            "root": info.root.hex(),
            "parent": info.parent.hex(),
            "start": info.start,
            "tokens": base64.b64encode(info.tokens).decode(),
            "extra_keys": [[position, key.hex()] for position, key in info.extra_keys],
            "cache_priority": info.cache_priority,
            "owner": info.owner,
        }
    ).encode()


def _reason(error: Exception, timeout: float, password: str | None) -> str:
    """One line with the cause and what to do. A server without AUTH repeats its argument, the password: not shown."""
    told = str(error).replace(password, "***") if password else str(error)
    text = "".join(c if c.isprintable() else "?" for c in told[:200]).rstrip(".") or type(error).__name__
    if isinstance(error, TimeoutError | _redis().TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, _redis().AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        return f"{text}; give the password in the URL, redis://:PASSWORD@HOST"
    if isinstance(error, _redis().OutOfMemoryError) or text.startswith("OOM"):
        return f"{text}; give the server a maxmemory-policy such as allkeys-lru, or more maxmemory"
    return text


def _make_pool(
    url: str, allowance: Allowance, connect: Callable[[], Any] | None
) -> tuple[redis.ConnectionPool, str]:
    """(pool of connections within the allowance, the server's address without the password)."""
    connection = _redis().connection
    kind, _, rest = url.partition("://")
    try:
        options: dict[str, Any] = connection.parse_url(url)
        # If a password ends early its rest parses as a port, a path or a query, and would be shown.
        host = re.split(r"[/?#]", rest, maxsplit=1)[0]
        if kind != "unix" and "@" in rest[len(host) :]:
            raise ValueError
    except ValueError:  # its text may have a part of the password
        raise ArgumentError(
            "expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// or unix://, got another URL; in a "
            "password write / as %2F, # as %23, ? as %3F and @ as %40"
        ) from None
    base: Any = options.pop("connection_class", connection.Connection)

    class LimitedConnection(base):
        @property
        def socket_connect_timeout(self) -> float:
            return allowance.seconds_left()  # read for each address of the host

        @socket_connect_timeout.setter
        def socket_connect_timeout(self, value: float | None) -> None:
            pass

        @property
        def socket_timeout(self) -> float:
            return allowance.seconds_left()

        @socket_timeout.setter
        def socket_timeout(self, value: float | None) -> None:
            pass

        def _connect(self) -> LimitedSocket:
            return LimitedSocket(super()._connect() if connect is None else connect(), allowance)

    # No retry: the next tier is asked, or the tokens are computed. The parser reads whole values at once.
    ours = {
        "retry": _redis().retry.Retry(_redis().backoff.NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": False,
        "socket_read_size": 1 << 20,
        "health_check_interval": 0,
    }
    pool = _redis().ConnectionPool(connection_class=LimitedConnection, **(options | ours))
    place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return pool, place


def _redis() -> Any:
    try:
        import redis.backoff
        import redis.connection
        import redis.retry
    except ImportError:
        raise BackendError(
            'expected redis-py for a remote cache, it is not installed: pip install "quire-kv[redis]"'
        ) from None
    return redis
