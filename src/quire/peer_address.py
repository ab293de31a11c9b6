"""`PeerAddress`: an address to which a peer listens, or at which it is asked: "HOST:PORT" or "unix:PATH".

Cost: none; a host's name is resolved by `connect` and `listen`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ArgumentError

__all__ = ["PeerAddress"]

_BACKLOG = 128


@dataclass(frozen=True)
class PeerAddress:
    """host, port: of TCP; host is "" for a Unix socket. path: of a Unix socket."""

    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """*raises:* ArgumentError: another form."""
        kind, _, path = text.partition(":")
        if kind == "unix" and path.removeprefix("//").strip():
            return cls("", 0, path.removeprefix("//"))
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or "/" in host or not port.isdecimal() or int(port) > 65535:
            raise ArgumentError(f"expected HOST:PORT, [IPv6]:PORT or unix:PATH, got {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self, timeout: float) -> socket.socket:
        """A connection. *raises:* OSError."""
        if not self.path:
            made = socket.create_connection((self.host, self.port), timeout)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout)
        try:
            made.connect(self.path)
        except BaseException:
            made.close()
            raise
        return made

    def listen(self) -> socket.socket:
        """A listening socket; port 0 takes a free one. The file of a Unix socket that no process listens to any more
        is replaced, and only its user can connect. *raises:* OSError."""
        if not self.path:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        if Path(self.path).is_socket() and not self._answers():
            Path(self.path).unlink()
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(self.path)
            os.chmod(self.path, 0o600)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
        return made

    def _answers(self) -> bool:
        try:
            self.connect(1.0).close()
        except OSError:
            return False
        return True
