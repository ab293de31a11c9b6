"""Identifies a client by its IP address when there is no key.

Behind a proxy all requests come from the proxy's address. `X-Forwarded-For` gives the client's, but any client can
send that header: it is used only if a proxy of `trusted_proxies` sent it. It is read from its end, as proxies write
it: the first address there that is not a trusted proxy's is the client's.

An IPv6 address counts as its /64 network, which one subscriber owns as a whole.

Not here: the administrator's rights, which no header gives (`origin_check`).

Cost: a look-up of the peer's address, cached for recent ones; the header's entries behind a trusted proxy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from quire.errors import ArgumentError

__all__ = ["TrustedProxies"]

_WITH_PORT = re.compile(r"\[(.*)\](?::\d+)?|([0-9.]+):\d+")


class TrustedProxies:
    """addresses: of proxies, or their networks: "10.0.0.7" or "10.0.0.0/8". *raises:* ArgumentError for other
    texts."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._networks = []
        for text in addresses:
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ArgumentError(
                    f"expected an address or a network such as 10.0.0.7 or 10.0.0.0/8, got {text!r}: {error} - in "
                    "`trusted_proxies`"
                ) from error

    def has(self, address: str) -> bool:
        """Whether the address is a trusted proxy's."""
        parsed = _address(address) if self._networks else None
        return parsed is not None and any(parsed in network for network in self._networks)

    def client_of(self, scope: Any) -> str:
        """The client's address in an HTTP scope, as requests are counted by it; "" where it is unknown."""
        peer = scope["client"][0] if scope.get("client") else ""
        if self.has(peer):
            values = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
            for entry in reversed(b",".join(values).decode("latin-1").split(",")):
                if _address(entry.strip()) is None:  # empty, or not written by a proxy
                    break
                peer = entry.strip()
                if not self.has(peer):
                    break
        return _counted_address(peer)


@lru_cache(4096)
def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    match = _WITH_PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address(text if match is None else match[1] or match[2])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(4096)
def _counted_address(text: str) -> str:
    address = _address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return text if address is None else str(address)
