"""Sends botocore's requests within an exchange: the seconds and bytes of an `Allowance`, whatever the server does.

botocore's own transport has a time-out for each packet and reads an answer of any length. A handler of its event
`before-send` sends the request instead: the same urllib3, over `LimitedSocket`s. Proxies come from the environment.

Cost: as urllib3; connections are kept.
"""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
import urllib3.connection
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from quire.tiers.remote.limited_socket import Allowance, LimitedSocket

__all__ = ["LimitedHttp"]

_NUM_CONNECTIONS = 16
_BUFFER_BYTES = 1 << 16


class LimitedHttp:
    """See the module's text. endpoint: the server's URL. ca_bundle: a file of certificates; None: the system's."""

    def __init__(self, endpoint: str, allowance: Allowance, ca_bundle: str | None = None) -> None:
        class LimitedHttpConnection(urllib3.connection.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                self.sock: Any = _HttpSocket(self.sock, allowance)

        class LimitedTlsConnection(urllib3.connection.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                self.sock: Any = _HttpSocket(self.sock, allowance)

        class HttpPool(urllib3.HTTPConnectionPool):
            ConnectionCls: Any = LimitedHttpConnection

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls: Any = LimitedTlsConnection

        self._make_response = import_module("botocore.awsrequest").AWSResponse
        self._allowance = allowance
        options: dict[str, Any] = {"maxsize": _NUM_CONNECTIONS, "ca_certs": ca_bundle}
        parts = urlsplit(endpoint)
        proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
        self._pools: urllib3.PoolManager = (
            urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
        )
        self._pools.pool_classes_by_scheme = {"http": HttpPool, "https": TlsPool}

    def send(self, request: Any, **_: Any) -> Any:
        """A handler of `before-send`. request: botocore's prepared request. Returns its response."""
        seconds = self._allowance.seconds_left()
        headers = {name: _text(value) for name, value in request.headers.items() if name.lower() != "expect"}
        try:
            answer = self._pools.urlopen(
                request.method,
                request.url,
                body=request.body,
                headers=headers,
                timeout=urllib3.Timeout(connect=seconds, read=seconds),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except ConnectTimeoutError as error:
            if isinstance(error, NewConnectionError):  # refused, not late
                raise
            raise TimeoutError from error
        response = self._make_response(request.url, answer.status, answer.headers, answer)
        if not request.stream_output or answer.status >= 300:
            _ = response.content  # read now, within the exchange
            answer.release_conn()
        return response

    def reset(self) -> None:
        names = self._pools.pools.keys()  # a container that refuses to be iterated
        for key in names:
            pool = self._pools.pools.get(key)
            if pool is not None:
                pool.close()
        self._pools.clear()


class _HttpSocket(LimitedSocket):
    """A socket that http.client reads from as from a file."""

    def makefile(self, mode: str, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_LimitedReader(self), _BUFFER_BYTES)


class _LimitedReader(io.RawIOBase):
    """Keeps the socket open until it is closed itself, as a socket's own file does."""

    def __init__(self, sock: LimitedSocket) -> None:
        self._sock = sock
        self._file = sock._inner.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock._set_timeout()
        num_bytes = self._file.readinto(buffer) or 0
        self._sock._allowance.count_bytes(num_bytes)
        return num_bytes

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
