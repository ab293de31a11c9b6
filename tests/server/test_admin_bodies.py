"""`/admin` over HTTP: permissions, its effects while requests run, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.running_server import running

from quire import LLM
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

PROMPT = list(range(300, 364))
BODY = {"prompt": "def f(", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
CALLS = (
    ("POST", "pins", {"prompt": "x"}),
    ("GET", "pins", None),
    ("DELETE", "pins/pin-1", None),
    ("POST", "drop", {"prompt": "x"}),
    ("POST", "resize", {"kv_memory": "64MiB"}),
    ("POST", "explain", {"prompt": "x"}),
    ("GET", "report", None),
    ("POST", "flush", {}),
)


def call(url: str, method: str, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
    answer = httpx.request(method, f"{url}/admin/{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.json() if is_json and answer.content else answer.text


def cached(url: str, prompt: Any = None, **headers: str) -> int:
    body = {"prompt": PROMPT if prompt is None else prompt, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-quire-cached-tokens"])


@pytest.fixture
def fresh(url: str, llm: LLM) -> Iterator[str]:
    for pin in llm.pins:
        llm.pins.remove(pin)
    llm.cache.reset()
    yield url
    for pin in llm.pins:
        llm.pins.remove(pin)


class Running:
    """A streamed request; its text, once read."""

    def __init__(self, url: str) -> None:
        self.stream = httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60)

    def __enter__(self) -> Running:
        self.lines = self.stream.__enter__().iter_lines()
        self.first = next(self.lines)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stream.__exit__(*error)

    def text(self) -> str:
        events = [line[6:] for line in (self.first, *self.lines) if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_only_the_administrator(serve: Any, url: str, method: str, path: str, body: Any) -> None:
    keys = KeyRing([(digest_of_key("key-a"), ApiTenant("a")), (digest_of_key("key-admin"), ADMIN)])
    with serve(ServerSettings(keys=keys, tenants=(ANYBODY, ApiTenant("a")))) as (keyed, _):
        for headers in ({}, {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer no"}):
            assert call(keyed, method, path, body, 403, **headers)["error"]["code"] == "not_admin"
        answer = httpx.request(
            method, f"{keyed}/admin/{path}", json=body, headers={"x-api-key": "key-admin"}, timeout=60
        )
        assert answer.status_code in (200, 201, 404)
        for pin in call(keyed, "GET", "pins", **{"x-api-key": "key-admin"})["data"]:
            call(keyed, "DELETE", f"pins/{pin['id']}", None, 204, **{"x-api-key": "key-admin"})
    # Another site's page, or its name for this machine.
    call(url, method, path, body, 403, Host="evil.example")
    call(url, method, path, body, 403, Origin="http://evil.example")


def test_pins(fresh: str, llm: LLM) -> None:
    url = fresh
    with Running(url) as running_one:
        made = call(url, "POST", "pins", {"prompt": PROMPT, "ttl": 3600}, 201)
        assert (made["owner"], made["num_tokens"], made["is_published"]) == ("default", 64, False)
        assert made["bytes"] == 4 * llm.cache.block_bytes
        assert 3500 < made["expires_in"] <= 3600
        assert cached(url) == 63
        call(url, "POST", "flush", {"memory": True})
        assert cached(url) == 63
        shared = call(url, "POST", "pins", {"prompt": "import os\n", "publish": True}, 201)
        assert shared["is_published"]
        both = call(url, "GET", "pins")["data"]
        assert [one["id"] for one in both] == [made["id"], shared["id"]]
        assert both[0]["num_hits"] == 2
        text = running_one.text()
    call(url, "DELETE", f"pins/{made['id']}", None, 204)
    call(url, "DELETE", f"pins/{made['id']}", None, 404)
    call(url, "POST", "flush", {"memory": True})
    assert cached(url) == 0
    # Nobody noticed: the same text as alone.
    alone = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
    assert alone["choices"][0]["text"] == text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"prompt": ""},
        {"prompt": [10**6]},
        {"prompt": "x", "ttl": 0},
        {"prompt": "x", "ttl": "soon"},
        {"prompt": "x", "tenant": "nobody we know"},
        {"prompt": "x", "publish": True, "ttl": 5},
        {"prompt": list(range(300, 400)) * 30},
    ],
)
def test_what_cannot_be_pinned(fresh: str, llm: LLM, body: Any) -> None:
    assert call(fresh, "POST", "pins", body, 400)["error"]["message"]
    assert list(llm.pins) == []


def test_a_pin_over_the_budget_says_the_numbers(fresh: str, llm: LLM) -> None:
    most = llm.cache.pins.max_blocks
    llm.cache.pins.max_blocks = 3
    try:
        message = call(fresh, "POST", "pins", {"prompt": PROMPT}, 400)["error"]["message"]
    finally:
        llm.cache.pins.max_blocks = most
    assert "budget" in message
    assert "4 blocks" in message


def test_drop(fresh: str) -> None:
    url = fresh
    cached(url)
    assert cached(url) == 63
    assert call(url, "POST", "drop", {"prompt": PROMPT[:20]})["num_freed"] > 0
    assert cached(url) == 16  # the block before the one it ends in
    made = call(url, "POST", "pins", {"prompt": PROMPT}, 201)
    refused = call(url, "POST", "drop", {"prompt": PROMPT[:20]}, 400)
    assert made["id"] in refused["error"]["message"]
    assert call(url, "POST", "drop", {"prompt": PROMPT[:20], "cache_salt": "s"})["num_freed"] == 0
    call(url, "POST", "drop", {}, 400)


def test_drop_of_what_a_running_request_holds(fresh: str, llm: LLM) -> None:
    """Told apart: what is free at once, and what is free when the request ends; nobody finds either."""
    url = fresh
    alone = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    call(url, "POST", "flush", {"memory": True})
    prompt = BODY["prompt"]
    with Running(url) as one:
        cached(url, [*PROMPT, 1])
        dropped = call(url, "POST", "drop", {"prompt": prompt})
        assert dropped["num_held"] > 0
        assert dropped["num_freed"] == 0
        assert call(url, "POST", "drop", {"prompt": prompt}) == {"num_freed": 0, "num_held": 0}
        assert call(url, "POST", "explain", {"prompt": prompt})["num_hit_tokens"] == 0
        assert call(url, "POST", "drop", {"prompt": PROMPT})["num_freed"] == 2
        assert call(url, "POST", "flush", {"memory": True})["num_freed"] == 3
        assert llm.stats()["cached"] == 0
        assert one.text() == alone
    assert call(url, "POST", "flush", {"memory": True})["num_freed"] == 0
    assert llm.stats()["free"] == llm.num_blocks
    llm.cache.check()


def test_resize_while_a_request_runs(fresh: str, llm: LLM) -> None:
    url = fresh
    alone = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    with Running(url) as one:
        small = call(url, "POST", "resize", {"kv_memory": "8MiB"})
        assert small["kv_memory_bytes"] == llm.kv_memory_bytes <= 8 << 20
        assert small["num_blocks"] == llm.num_blocks
        assert "KV cache of" in small["capacity"]
        back = call(url, "POST", "resize", {"kv_memory": 64 << 20})
        assert back["num_blocks"] > small["num_blocks"]
        assert one.text() == alone
    for size in ("much", -5, 1, "1KiB", 2**61, [], "99999TiB"):
        assert call(url, "POST", "resize", {"kv_memory": size}, 400)["error"]["message"]
    assert llm.num_blocks == back["num_blocks"]
    call(url, "POST", "pins", {"prompt": PROMPT}, 201)
    assert "pinned" in call(url, "POST", "resize", {"kv_memory": 3 * 49152}, 400)["error"]["message"]


def test_explain_and_report(serve: Any, llm: LLM) -> None:
    keys = KeyRing([(digest_of_key("key-a"), ApiTenant("a")), (digest_of_key("key-admin"), ADMIN)])
    admin = {"Authorization": "Bearer key-admin"}
    with serve(ServerSettings(keys=keys, tenants=(ANYBODY, ApiTenant("a")))) as (url, _):
        cached(url, Authorization="Bearer key-a")
        found = call(url, "POST", "explain", {"prompt": PROMPT, "tenant": "a"}, **admin)
        assert (found["num_hit_tokens"], found["num_tokens"], found["reason"]) == (63, 64, "complete")
        assert "63 of 64 tokens" in found["text"]
        other = call(url, "POST", "explain", {"prompt": [*PROMPT[:30], 7, 8], "tenant": "a"}, **admin)
        assert (other["num_hit_tokens"], other["reason"], other["differs_at"]) == (30, "differs", 30)
        call(url, "POST", "explain", {"prompt": "x", "tenant": "b"}, 400, **admin)
        text = call(url, "GET", "report", **admin)
        assert "tenant" in text
        assert "\na " in text


def test_flush_has_the_tiers_hold_all(tmp_path: Path) -> None:
    with LLM(kv_memory="16MiB", disk_cache=tmp_path) as llm, running(llm, ServerSettings()) as (url, _):
        cached(url)
        assert call(url, "POST", "flush", {"memory": True})["num_freed"] >= 4
        assert llm.stats()["cached"] == 0
        found = call(url, "POST", "explain", {"prompt": PROMPT})
        assert found["num_hit_tokens"] == 0
        assert found["num_tier_tokens"].get("disk", 0) > 0
        call(url, "POST", "flush", {"tiers": "all"}, 400)
