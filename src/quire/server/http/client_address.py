"""Whose requests are whose where nobody has a key: by the address that a request comes from.

Behind a proxy all requests come from the proxy's. `X-Forwarded-For` says where each came from, and anybody can send
that header: it is believed of proxies that the configuration names (`trusted_proxies`), and of nobody else. It is read
from its end, as proxies write it: the first address there that is no trusted proxy's is the client's.

An address of IPv6 counts as its network of 64 bits: who has one has all of that.

Not here: who is the administrator; no header makes anybody that (`origin_check`).

Cost: a look at the peer's address, kept for those seen last; the header's entries behind a trusted proxy.
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
    """named: addresses and networks, such as "10.0.0.7" or "10.0.0.0/8". *raises:* ArgumentError for another text."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._networks = []
        for text in named:
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ArgumentError(
                    f"expected an address or a network such as 10.0.0.7 or 10.0.0.0/8, got {text!r}: {error} - in "
                    "`trusted_proxies`"
                ) from error

    def has(self, address: str) -> bool:
        """Whether it is a trusted proxy's."""
        found = _address(address) if self._networks else None
        return found is not None and any(found in network for network in self._networks)

    def client_of(self, scope: Any) -> str:
        """The client's address of an HTTP scope, as its requests are counted; "" where there is none."""
        peer = scope["client"][0] if scope.get("client") else ""
        if self.has(peer):
            values = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
            for entry in reversed(b",".join(values).decode("latin-1").split(",")):
                if _address(entry.strip()) is None:  # nothing, or what no proxy writes
                    break
                peer = entry.strip()
                if not self.has(peer):
                    break
        return _counted_as(peer)


@lru_cache(4096)
def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    found = _WITH_PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address(text if found is None else found[1] or found[2])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(4096)
def _counted_as(text: str) -> str:
    address = _address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return text if address is None else str(address)
