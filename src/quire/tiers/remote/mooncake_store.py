"""The store in a pool of Mooncake: memory of several processes, which a master allocates (mooncake_master).

    mooncake://HOST:PORT/PREFIX?segment=4GiB&buffer=512MiB&protocol=tcp&devices=&host=&metadata=&metrics=9003

    <prefix>/quire:kv:1:<key, hex>    an object: the record, see `record`

The memory is that of `mooncake_client` processes, or of engines: `segment` is what this engine adds, 0 if it is not
given. The values in a process's memory end with it. The master knows which values there are: they end with it, too.

    segment    bytes that this engine adds to the pool          buffer     bytes through which values pass
    protocol   tcp or rdma, with `devices`                      host       this machine's address, for the others
    metadata   a metadata server; not given: none is needed     metrics    the master's HTTP port, for lists

The client is a process of its own (`mooncake_process`), started at the first call and again after it has ended.
Mooncake evicts by itself, about the least recently used; for 10 s after a look-up, a load or a refresh a value stays
(its lease). It has no time to live by key and no login: `ttl_s` and a password in the URL are refused. A removal does
not wait for leases, and a transfer may outlast one: the checksum finds memory that another value has by then. A writer
that dies halfway leaves nothing to read; its key is stored by none for 30 s.

Cost: a call is one round trip to the client, and one to the master or two; a value crosses a socket once more.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, build_opener

import numpy as np

from quire.errors import ArgumentError, BackendError
from quire.tiers.peers.peer_wire import WireError, receive, receive_into
from quire.tiers.remote import mooncake_process
from quire.tiers.remote.connection_pool import ConnectionPool
from quire.tiers.remote.limited_socket import Allowance, LimitedSocket
from quire.tiers.remote.mooncake_process import (
    DELETE,
    EXISTS,
    GET,
    HEALTH,
    OBJECT_NOT_FOUND,
    PUT,
    QUESTION,
    TEXT,
)
from quire.tiers.remote.record import pack, unpack
from quire.tiers.remote.store_protocol import Record, StoredItem
from quire.tiers.remote.store_url import parse_option_size, take_options

__all__ = ["MooncakeStore"]

_FOLDER = "quire:kv:1:"
_PORT, _METRICS_PORT = 50051, 9003
_BUFFER_BYTES, _MIN_BUFFER_BYTES = 512 << 20, 16 << 20
_VALUES_AT_ONCE = 4  # of the largest size, in the buffer
_PROTOCOLS = ("tcp", "rdma")
_NO_SPACE = -200
_LIST_S, _NUM_LISTED = 30.0, 100  # of one page of a list
_CLOSE_S = 5.0
_CAUSES = {
    _NO_SPACE: "no memory is free; give a URL segment=SIZE, or start one more mooncake_client",
    -600: "the value does not fit into the client's buffer; give the URL a larger one, buffer=SIZE",
    -800: "the value was not read: the process with its memory has ended, or its lease during the transfer",
    -900: "the master does not answer; start mooncake_master",
}

_log = logging.getLogger("quire")


class _StatusError(Exception):
    """An answer of Mooncake below 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}: {_CAUSES.get(status, 'see the error codes of Mooncake')}")
        self.status = status


class MooncakeStore:
    """See the module's text, and `store_protocol.Store`.

    *raises:* BackendError: Mooncake is not installed. ArgumentError: an invalid URL, or a time to live.
    """

    timeout_s = 5.0
    time_outs: tuple[type[Exception], ...] = (TimeoutError,)

    def __init__(self, url: str, allowance: Allowance, ttl_s: float | None = None) -> None:
        if ttl_s is not None:
            raise ArgumentError(
                f"expected no ttl_s, got {ttl_s:g} - in `remote_cache`; Mooncake has no time to live by key: it evicts "
                "the least recently used values"
            )
        self._settings, self._prefix, self._metrics_port = _parse_url(url)
        if find_spec("mooncake") is None:
            raise BackendError(
                'expected Mooncake for a remote cache in it, it is not installed: pip install "quire-kv[mooncake]"'
            )
        self.max_value_bytes: int | None = (
            int(self._settings["setup"]["local_buffer_size"]) // _VALUES_AT_ONCE
        )
        self.where = f"{self._settings['host']}:{self._settings['port']}"
        self._allowance = allowance
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._pool = ConnectionPool(self._connect)

    def ping(self) -> None:
        [status] = self._ask(HEALTH, [""])
        if status != 0:
            raise _StatusError(-900)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """A look-up that finds a value counts as a use, see the module's text."""
        numbers = self._ask(EXISTS, [self._name(key) for key in keys]) if keys else []
        return [_checked(number) == 1 for number in numbers]

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        records: list[Record | None] = []
        if not keys:
            return records
        with self._answered(GET, [self._name(key) for key in keys]) as (connection, sizes):
            if sum(size for size in sizes if size > 0) > self._allowance.bytes_left():
                raise WireError("more bytes than values that this engine stores have")
            for size in sizes:
                if size == OBJECT_NOT_FOUND:
                    records.append(None)
                    continue
                value = np.empty(_checked(size), np.uint8).data
                receive_into(connection, value)
                records.append(unpack(value))
        return records

    def refresh(self, key: bytes) -> bool:
        return self.exists([key]) == [True]

    def put(self, key: bytes, record: Record) -> bool:
        [status] = self._ask(PUT, [self._name(key)], pack(record))
        return _checked(status) == 0

    def delete(self, key: bytes) -> bool:
        [status] = self._ask(DELETE, [self._name(key)])
        return status != OBJECT_NOT_FOUND and _checked(status) == 0

    def scan(self) -> Iterator[StoredItem]:
        """The values in memory, by the master's HTTP port: its clients cannot list. Counts as no use."""
        lines = self._fetch("get_all_keys").decode().split("\n")
        key = re.compile(re.escape(self._prefix) + r"((?:[0-9a-f]{2})+)")
        names = [line for line in lines if key.fullmatch(line)]
        for first in range(0, len(names), _NUM_LISTED):
            some = ",".join(names[first : first + _NUM_LISTED])
            found = json.loads(self._fetch("batch_query_keys?keys=" + quote(some, safe=",")))["data"]
            for name, one in found.items():
                if one["ok"] and (copies := one["values"]):  # else it has gone meanwhile
                    yield StoredItem(bytes.fromhex(name[len(self._prefix) :]), copies[0]["size_"], None)

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, _StatusError) and error.status == _NO_SPACE

    def explain_error(self, error: Exception) -> str:
        return str(error)

    def reset(self) -> None:
        self._pool.close_idle()

    def close(self) -> None:
        """The client's memory leaves the pool, with the values in it."""
        with self._lock:
            self._is_closed = True
            self._pool.close()
            self._end_process(_CLOSE_S)

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _ask(self, operation: int, names: Sequence[str], parts: Sequence[memoryview] = ()) -> list[int]:
        with self._answered(operation, names, parts) as (_, numbers):
            return numbers

    @contextmanager
    def _answered(
        self, operation: int, names: Sequence[str], parts: Sequence[memoryview] = ()
    ) -> Iterator[tuple[LimitedSocket, list[int]]]:
        """Asks the client. Yields the connection, from which values may be read, and the numbers of the answer."""
        told = "\n".join(names).encode()
        with self._pool.connection() as connection:
            connection.sendall(QUESTION.pack(operation, len(told), sum(part.nbytes for part in parts)) + told)
            for part in parts:
                connection.sendall(part)
            numbers = struct.Struct(f"<{len(names)}q")
            yield connection, list(numbers.unpack(receive(connection, numbers.size)))

    def _connect(self) -> LimitedSocket:
        """A connection to the client's process, which is started if none runs."""
        if not self._lock.acquire(timeout=self._allowance.seconds_left()):
            raise TimeoutError("another call starts the client")
        try:
            if self._is_closed:
                raise OSError("this store was closed")
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._start_process()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            return LimitedSocket(ours, self._allowance)
        finally:
            self._lock.release()

    def _start_process(self) -> None:
        self._end_process(0.0)
        self._control, theirs = socket.socketpair()
        settings = json.dumps({**self._settings, "seconds": self._allowance.seconds_left()})
        with theirs:
            self._process = subprocess.Popen(
                # -P: modules beside the file are not importable by short names.
                [sys.executable, "-P", str(Path(mooncake_process.__file__)), str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C is for the engine, which stores its content first
            )
        try:
            control = LimitedSocket(self._control, self._allowance)
            [length] = TEXT.unpack(receive(control, TEXT.size))
            if length:
                raise OSError(receive(control, length).decode())
        except BaseException:
            self._end_process(0.0)
            raise

    def _end_process(self, seconds: float) -> None:
        """Has the process end, by force after so many seconds."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _fetch(self, path: str) -> bytes:
        host = self._settings["host"]
        address = f"http://{f'[{host}]' if ':' in host else host}:{self._metrics_port}"
        try:
            with build_opener(ProxyHandler({})).open(f"{address}/{path}", timeout=_LIST_S) as answer:
                return answer.read()
        except OSError as error:
            raise OSError(
                f"{error} at {address}; give the URL the port of mooncake_master's --metrics_port, metrics=PORT"
            ) from error


def _checked(number: int) -> int:
    """*raises:* _StatusError: it is below 0."""
    if number < 0:
        raise _StatusError(number)
    return number


def _parse_url(url: str) -> tuple[dict[str, Any], str, int]:
    """(settings of `mooncake_process`, prefix of all names, the master's HTTP port)."""
    form = "expected mooncake://HOST[:PORT][/PREFIX]"
    if "@" in url:  # what stands before it may be a part of a password
        raise ArgumentError(
            f"{form} without a user or password, got one - in `remote_cache`; Mooncake has no login"
        )
    names = ("segment", "buffer", "protocol", "devices", "host", "metadata", "metrics")
    place, options = take_options(url, names)
    parts = urlsplit(place)
    prefix = parts.path.strip("/")
    try:
        port = parts.port or _PORT
        metrics_port = int(options.get("metrics", _METRICS_PORT))
    except ValueError:
        port = metrics_port = 0
    if not parts.hostname or not re.fullmatch(r"[A-Za-z0-9._/-]*", prefix) or not 0 < metrics_port < 1 << 16:
        raise ArgumentError(
            f"{form}, of letters, digits, '.', '-' and '_', and ports of 1 to 65535, got {place!r} "
            f"and metrics={options.get('metrics', _METRICS_PORT)} - in `remote_cache`"
        )
    protocol = options.get("protocol", "tcp")
    if protocol not in _PROTOCOLS:
        raise ArgumentError(f"expected protocol of tcp or rdma, got {protocol!r} - in `remote_cache`")
    if "devices" in options and protocol == "tcp":
        raise ArgumentError("expected devices with protocol=rdma, got them with tcp - in `remote_cache`")
    segment = 0 if options.get("segment") == "0" else parse_option_size(options, "segment") or 0
    buffer = parse_option_size(options, "buffer") or _BUFFER_BYTES
    if buffer < _MIN_BUFFER_BYTES or 0 < segment < _MIN_BUFFER_BYTES:
        raise ArgumentError(
            "expected a buffer, and a segment if there is one, of at least 16MiB, got less - in `remote_cache`"
        )
    setup = {
        "metadata_server": options.get("metadata", "P2PHANDSHAKE"),
        "global_segment_size": str(segment),
        "local_buffer_size": str(buffer),
        "protocol": protocol,
        "rdma_devices": options.get("devices", ""),
        "master_server_addr": f"{parts.hostname}:{port}",
    }
    settings = {"host": parts.hostname, "port": port, "own_host": options.get("host", ""), "setup": setup}
    return settings, (f"{prefix}/" if prefix else "") + _FOLDER, metrics_port
