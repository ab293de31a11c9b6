"""Identification of clients by address: forwarding headers are believed only from trusted proxies."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire import LLM
from quire.errors import ArgumentError
from quire.server.api_keys import ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.http.client_address import TrustedProxies
from quire.server.settings import ServerLimits, ServerSettings

PROXIES = TrustedProxies(["10.0.0.0/8", "::1", "fd00::/8"])
BODY = {"prompt": "a", "max_tokens": 1}


def scope(peer: str | None, *forwarded: bytes) -> dict[str, Any]:
    headers = [(b"x-forwarded-for", value) for value in forwarded]
    return {"client": None if peer is None else (peer, 1), "headers": [(b"host", b"a"), *headers]}


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", [b"198.51.100.1"], "192.0.2.1"),
        ("10.1.2.3", [], "10.1.2.3"),
        ("10.1.2.3", [b"198.51.100.1"], "198.51.100.1"),
        ("10.1.2.3", [b"203.0.113.9, 198.51.100.1"], "198.51.100.1"),
        ("10.1.2.3", [b"203.0.113.9", b"198.51.100.1 , 10.9.9.9"], "198.51.100.1"),
        ("10.1.2.3", [b"198.51.100.1:4711"], "198.51.100.1:4711"),
        ("10.1.2.3", [b"10.0.0.1, 10.0.0.2"], "10.0.0.1"),
        ("10.1.2.3", [b"198.51.100.1, unknown"], "10.1.2.3"),
        ("10.1.2.3", [b"198.51.100.1, \xff, 10.0.0.1"], "10.0.0.1"),
        ("::ffff:10.1.2.3", [b"198.51.100.1"], "198.51.100.1"),
        ("::1", [b"2001:db8:1:2:3:4:5:6"], "2001:db8:1:2::/64"),
        ("::1", [b"[2001:db8:1:2::7]:80"], "2001:db8:1:2::/64"),
        ("2001:db8:1:2::8", [], "2001:db8:1:2::/64"),
        ("fe80::1%eth0", [], "fe80::/64"),
        (None, [b"198.51.100.1"], ""),
    ],
)
def test_the_address_that_counts(peer: str | None, forwarded: list[bytes], address: str) -> None:
    assert PROXIES.client_of(scope(peer, *forwarded)) == address.partition(":4711")[0]


@pytest.mark.parametrize("text", ["", "proxy.example", "10.0.0.1/8", "10.0.0.0/99", "*"])
def test_what_is_no_address_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ArgumentError, match="trusted_proxies"):
        ServerSettings(trusted_proxies=(text,))


def test_requests_count_by_the_address_that_a_trusted_proxy_tells(serve: Any) -> None:
    def ask(url: str, address: str) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Forwarded-For": address})

    limits = ServerLimits(requests_per_minute_per_address=1)
    with serve(ServerSettings(limits=limits, trusted_proxies=("127.0.0.1",))) as (url, _):
        assert ask(url, "192.0.2.1").status_code == 200
        refused = ask(url, "192.0.2.1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit")
        assert 1 <= int(refused.headers["retry-after"]) <= 61
        assert ask(url, "192.0.2.2").status_code == 200
    with serve(ServerSettings(limits=limits)) as (url, _):
        assert [ask(url, f"192.0.2.{number}").status_code for number in (1, 2)] == [200, 429]


def test_the_engine_is_told_whose_each_request_is(
    serve: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[str | None] = []
    add = llm.engine.scheduler.add

    def noted(request: Any) -> None:
        clients.append(request.client)
        add(request)

    monkeypatch.setattr(llm.engine.scheduler, "add", noted)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with serve(ServerSettings()) as (url, _):
        httpx.post(f"{url}/v1/completions", json=BODY)
        httpx.post(f"{url}/v1/chat/completions", json=chat)
        made = httpx.post(f"{url}/quire/conversations", json={"text": "a"}).json()["id"]
        httpx.post(f"{url}/quire/conversations/{made}/append", json={"max_tokens": 1, "text": "b"})
    assert clients == ["address 127.0.0.1"] * 3
    clients.clear()
    keys = KeyRing([(digest_of_key("a"), ApiTenant("alice")), (digest_of_key("b"), ANYBODY)])
    with serve(ServerSettings(keys=keys, tenants=(ANYBODY, ApiTenant("alice")))) as (url, _):
        for key in ("a", "b"):
            httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Api-Key": key})
    assert clients == ["tenant alice", "address 127.0.0.1"]
