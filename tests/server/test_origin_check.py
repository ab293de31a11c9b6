"""Access without a key: allowed pages and host names; and the administrator in that case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import ArgumentError
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.run import bind
from quire.server.settings import ServerSettings, load_config

PAGE = "https://app.example"
PATHS = (
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/quire/conversations",
    "/openapi.json",
    "/admin/report",
    "/nothing",
)
KEYED = KeyRing([(digest_of_key("key-a"), ApiTenant("a")), (digest_of_key("key-admin"), ADMIN)])
FORWARDED = (
    ("Forwarded", "for=10.0.0.1"), ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Anything", ""), ("X-Real-IP", "127.0.0.1"), ("Via", "1.1 proxy"), ("CF-Connecting-IP", "::1"),
    ("True-Client-IP", "127.0.0.1"), ("X-Envoy-External-Address", "127.0.0.1"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FORWARDED)
def test_behind_a_proxy_nobody_is_the_administrator(url: str, name: str, value: str) -> None:
    for path in ("/admin/report", "/window/blocks/0"):
        assert httpx.get(url + path).status_code == 200
        answer = httpx.get(url + path, headers={name: value})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_admin")
        assert name.lower() in answer.json()["error"]["message"]
    with httpx.stream("GET", f"{url}/window/events", headers={name: value}) as events:
        assert events.headers["x-quire-admin"] == "0"
    assert httpx.get(f"{url}/v1/models", headers={name: value}).status_code == 200


def test_no_trust_in_this_machine(serve: Callable[..., Any]) -> None:
    """For who stands behind a proxy that adds no header."""
    with serve(ServerSettings(trust_loopback=False)) as (url, _):
        assert httpx.get(f"{url}/admin/report").json()["error"]["code"] == "not_admin"
        assert httpx.get(f"{url}/v1/models").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_another_sites_name_for_this_machine_reads_nothing(url: str, path: str) -> None:
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "10.0.0.7",
        "[fe80::1]:8000",
        "",
    ):
        answer = httpx.get(url + path, headers={"Host": host, "Origin": f"http://{host}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:1", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8000"],
)
def test_this_machines_own_names(url: str, host: str) -> None:
    assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200
    assert httpx.get(f"{url}/admin/report", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:3000", "https://127.0.0.1"])
def test_another_sites_page_does_nothing(url: str, path: str, origin: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = httpx.request(method, url + path, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")


def test_a_foreign_page_makes_no_conversation(url: str, server: tuple[str, Any]) -> None:
    service = server[1].state.service
    before = len(service.conversations.entries_of(ANYBODY))
    httpx.post(f"{url}/quire/conversations", headers={"Origin": PAGE})
    assert len(service.conversations.entries_of(ANYBODY)) == before
    made = httpx.post(f"{url}/quire/conversations", headers={"Origin": url})  # our own page's
    assert made.status_code == 201
    httpx.delete(f"{url}/quire/conversations/{made.json()['id']}")


def test_a_server_that_is_for_others_has_any_name_but_no_foreign_page(serve: Callable[..., Any]) -> None:
    with serve(ServerSettings(insecure=True)) as (url, _):
        named = {"Host": "quire.example"}
        assert httpx.get(f"{url}/v1/models", headers=named).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={**named, "Origin": PAGE}).status_code == 403
        assert httpx.get(f"{url}/admin/report", headers=named).status_code == 403


def test_with_keys_neither_is_asked(serve: Callable[..., Any]) -> None:
    with serve(ServerSettings(keys=KEYED, tenants=(ANYBODY, ApiTenant("a")))) as (url, _):
        headers = {"Host": "quire.example", "Origin": PAGE}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
        answer = httpx.get(f"{url}/v1/models", headers={**headers, "Authorization": "Bearer key-a"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("keys", [KeyRing(), KEYED])
def test_allowed_origins(serve: Callable[..., Any], keys: KeyRing) -> None:
    key = {} if keys.is_empty else {"Authorization": "Bearer key-a"}
    settings = ServerSettings(keys=keys, tenants=(ANYBODY, ApiTenant("a")), allowed_origins=(PAGE,))
    with serve(settings) as (url, _):
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        preflight = httpx.options(f"{url}/v1/completions", headers={"Origin": PAGE, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]

        body = {"prompt": "a", "max_tokens": 1, "stream": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Origin": PAGE, **key})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers
        wrong = httpx.post(f"{url}/v1/completions", json={}, headers={"Origin": PAGE, **key})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, PAGE)

        for other in ("https://app.example.evil", "http://app.example", "https://app.example:8443", "null"):
            refused = httpx.options(f"{url}/v1/completions", headers={"Origin": other, **asked})
            assert refused.status_code in (400, 403)
            assert "access-control-allow-origin" not in refused.headers
        # The API is theirs, not the administrator's part.
        assert httpx.get(f"{url}/admin/report", headers={"Origin": PAGE, **key}).status_code == 403


@pytest.mark.parametrize(
    "origin", ["*", "null", "app.example", "https://app.example/", "https://app.example/x", "https://", "https://A.b",
               "https://u@a.b", "https://*.a.b", "https://a.b:x", "https://[::1"]
)  # fmt: skip
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ArgumentError, match="allowed_origins"):
        ServerSettings(allowed_origins=(origin,))


def test_origins_of_a_file_and_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(
        '[server]\ntrust_loopback = false\nallowed_origins = ["https://a.b", "tauri://localhost"]\n'
    )
    settings, _ = load_config(str(path), {})
    assert settings.allowed_origins == ("https://a.b", "tauri://localhost")
    assert not settings.trust_loopback
    settings, _ = load_config(str(path), {"allowed_origins": ["http://[::1]:3000"], "trust_loopback": True})
    assert (settings.allowed_origins, settings.trust_loopback) == (("http://[::1]:3000",), True)
    path.write_text("[server]\nallowed_origins = [1]\n")
    with pytest.raises(ArgumentError, match="allowed_origins"):
        load_config(str(path), {})


def test_an_admin_key_alone_leaves_the_rest_to_this_machine(serve: Callable[..., Any]) -> None:
    with serve(ServerSettings(keys=KeyRing([(digest_of_key("key-admin"), ADMIN)]))) as (url, _):
        assert httpx.get(f"{url}/v1/models").status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}/v1/models", headers={"Origin": PAGE}).status_code == 403
        assert httpx.get(f"{url}/admin/report").status_code == 403
        key = {"Authorization": "Bearer key-admin", "X-Forwarded-For": "10.0.0.1"}
        assert httpx.get(f"{url}/admin/report", headers=key).status_code == 200


def test_on_an_address_of_ipv6(serve: Callable[..., Any]) -> None:
    try:
        bind("::1", 0).close()
    except ArgumentError:
        pytest.skip("this machine has no IPv6")
    with serve(ServerSettings(host="::1")) as (url, _):
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/admin/report").status_code == 200
