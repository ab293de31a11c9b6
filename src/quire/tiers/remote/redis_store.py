"""The store on a Redis or Valkey server, with redis-py.

    quire:kv:1:<key, hex>    a hash: v the value, x its checksum, i the entry for an index

The server needs no installation and no script; its `maxmemory` and `maxmemory-policy` (`allkeys-lru` fits) decide which
values it keeps. One command writes a record, so that no reader sees half of one.

Cost: `exists` and `get` one round trip for all keys; a value is copied three times in redis-py (once with hiredis), and
once to send it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import ArgumentError, BackendError
from quire.tiers.remote.limited_socket import Allowance, LimitedSocket
from quire.tiers.remote.store_protocol import Record, StoredItem
from quire.tiers.remote.store_url import take_options

if TYPE_CHECKING:
    import redis

__all__ = ["RedisStore"]

_PREFIX = b"quire:kv:1:"
_MAX_VALUE_BYTES = 512 << 20  # of the protocol
_SCAN_KEYS, _SCAN_S = 500, 30.0
_SCAN_BYTES = 1 << 20
_OPTIONS = {  # of redis-py, by scheme
    "unix": ("db",),
    "rediss": ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"),
}


class RedisStore:
    """See the module's text, and `store_protocol.Store`. Connects at the first call.

    url: redis://[[user]:password@]host[:port][/db], rediss:// for TLS, unix:///path; valkey:// and valkeys:// are the
    same as the first two. It takes the options `_OPTIONS`. connect: makes a connected socket in place of the URL's
    host, for tests without a network.

    *raises:* BackendError: redis-py is not installed. ArgumentError: an invalid URL.
    """

    timeout_s = 1.0
    max_value_bytes: int | None = _MAX_VALUE_BYTES

    def __init__(
        self,
        url: str,
        allowance: Allowance,
        ttl_s: float | None = None,
        *,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        self._allowance = allowance
        self._ttl_ms = None if ttl_s is None else max(1, round(1000 * ttl_s))
        self._pool, self.where = _make_pool(url, allowance, connect)
        self._client = _redis().Redis(connection_pool=self._pool)
        self.time_outs: tuple[type[Exception], ...] = (TimeoutError, _redis().TimeoutError)

    def ping(self) -> None:
        if self._client.ping() is not True:
            raise ValueError("an answer of the wrong form")

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(_name(key))
        answers = [_number(answer) == 1 for answer in pipeline.execute()]
        if len(answers) != len(keys):
            raise ValueError("an answer of the wrong form")
        return answers

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        if len(keys) == 1:
            answers: Any = [self._client.hmget(_name(keys[0]), [b"v", b"x"])]
        else:
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.hmget(_name(key), [b"v", b"x"])
            answers = pipeline.execute()
        if len(answers) != len(keys):
            raise ValueError("an answer of the wrong form")
        return [_record(answer) for answer in answers]

    def refresh(self, key: bytes) -> bool:
        if self._ttl_ms is None:
            return _number(self._client.touch(_name(key))) == 1
        pipeline = self._client.pipeline(transaction=False)
        pipeline.touch(_name(key))
        pipeline.pexpire(_name(key), self._ttl_ms)
        return _number(pipeline.execute()[0]) == 1

    def put(self, key: bytes, record: Record) -> bool:
        fields: Any = {b"v": b"".join(record.parts), b"x": record.checksum, b"i": record.info}
        if self._ttl_ms is None:
            _number(self._client.hset(_name(key), mapping=fields))
        else:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hset(_name(key), mapping=fields)
            pipeline.pexpire(_name(key), self._ttl_ms)
            _number(pipeline.execute()[0])
        return True

    def delete(self, key: bytes) -> bool:
        return _number(self._client.delete(_name(key))) == 1

    def scan(self) -> Iterator[StoredItem]:
        cursor: Any = 0
        while True:
            with self._allowance.exchange(_SCAN_S, _SCAN_BYTES):
                cursor, names = self._client.scan(cursor, match=_PREFIX + b"*", count=_SCAN_KEYS)
                pipeline = self._client.pipeline(transaction=False)
                for name in names:
                    pipeline.hstrlen(name, b"v")
                sizes = pipeline.execute() if names else []
            for name, num_bytes in zip(names, sizes, strict=True):
                yield StoredItem(bytes.fromhex(name[len(_PREFIX) :].decode()), num_bytes, None)
            if not cursor:
                return

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, _redis().ResponseError)

    def explain_error(self, error: Exception) -> str:
        """A server without AUTH repeats its argument, the password, in the error: it is not shown."""
        password = self._pool.connection_kwargs.get("password")
        told = str(error).replace(password, "***") if password else str(error)
        text = told[:200].rstrip(".") or type(error).__name__
        if isinstance(error, _redis().AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
            return f"{text}; give the password in the URL, redis://:PASSWORD@HOST"
        if isinstance(error, _redis().OutOfMemoryError) or text.startswith("OOM"):
            return f"{text}; give the server a maxmemory-policy such as allkeys-lru, or more maxmemory"
        return text

    def reset(self) -> None:
        self._pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        self._pool.disconnect()


def _name(key: bytes) -> bytes:
    return _PREFIX + key.hex().encode()


def _number(answer: Any) -> int:
    """*raises:* ValueError: no integer, so that this is no Redis server."""
    if type(answer) is not int:
        raise ValueError("an answer of the wrong form")
    return answer


def _record(answer: Any) -> Record | None:
    if not isinstance(answer, list) or len(answer) != 2:
        raise ValueError("an answer of the wrong form")
    value, checksum = answer
    if value is None and checksum is None:
        return None
    if type(value) is not bytes or type(checksum) is not bytes:
        return Record([], b"", b"")
    return Record([memoryview(value)], checksum, b"")


def _make_pool(
    url: str, allowance: Allowance, connect: Callable[[], Any] | None
) -> tuple[redis.ConnectionPool, str]:
    """(pool of connections within the allowance, the server's address without the password)."""
    connection = _redis().connection
    kind, _, rest = url.partition("://")
    kind = {"valkey": "redis", "valkeys": "rediss"}.get(kind, kind)
    try:
        options: dict[str, Any] = connection.parse_url(f"{kind}://{rest}")
        # If a password ends early its rest parses as a port, a path or a query, and would be shown. redis-py takes a
        # path that is no number for database 0.
        place, _, query = rest.partition("?")
        path = place.partition("/")[2]
        if "#" in rest or "@" in query or (kind != "unix" and not re.fullmatch("[0-9]*", path)):
            raise ValueError
    except ValueError:  # its text may have a part of the password
        raise ArgumentError(
            "expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// or unix://, got another URL; in a "
            "password write / as %2F, # as %23, ? as %3F and @ as %40"
        ) from None
    take_options(url, _OPTIONS.get(kind, ()))
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
