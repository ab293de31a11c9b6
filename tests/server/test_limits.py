"""Permissions, limits of concurrent requests, and the state after a client has gone."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.until import until

from quire import LLM
from quire.server.api_keys import ADMIN, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerLimits, ServerSettings

LONG = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
SHORT = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}


def keys(*tenants: ApiTenant) -> KeyRing:
    return KeyRing([(digest_of_key(f"key-{tenant.name}"), tenant) for tenant in tenants])


def key_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{name}"}


def is_idle(llm: LLM) -> bool:
    counts = llm.cache.stats()
    return counts["held"] == counts["in_flight"] == counts["num_sequences"] == 0


def test_keys(serve) -> None:
    with serve(ServerSettings(keys=keys(ApiTenant("a"), ADMIN))) as (url, _):
        for headers in ({}, {"Authorization": "Bearer key-b"}, {"Authorization": "Basic key-a"}):
            answer = httpx.post(f"{url}/v1/completions", json=SHORT, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "key-b" not in answer.text
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
            assert httpx.get(f"{url}/metrics", headers=headers).status_code == 401
        assert httpx.post(f"{url}/v1/completions", json=SHORT, headers=key_of("a")).status_code == 200
        assert (
            httpx.post(f"{url}/v1/completions", json=SHORT, headers={"x-api-key": "key-a"}).status_code == 200
        )
        assert httpx.get(f"{url}/health").status_code == 200


def test_tenants_do_not_find_each_other(serve, llm: LLM) -> None:
    llm.cache.reset()
    body = {**SHORT, "prompt": list(range(3, 120))}

    def cached(url: str, name: str, **more: object) -> int:
        answer = httpx.post(f"{url}/v1/completions", json={**body, **more}, headers=key_of(name))
        usage = answer.json()["usage"]
        assert answer.headers["x-quire-cached-tokens"] == str(usage["prompt_tokens_details"]["cached_tokens"])
        return usage["prompt_tokens_details"]["cached_tokens"]

    with serve(ServerSettings(keys=keys(ApiTenant("a"), ApiTenant("b"), ApiTenant("ab")))) as (url, _):
        assert cached(url, "a") == 0
        assert cached(url, "a") == 116
        assert cached(url, "b") == 0
        assert cached(url, "a", cache_salt="mine") == 0
        assert cached(url, "a", cache_salt="mine") == 116
        assert cached(url, "ab") == 0
        assert cached(url, "a", cache_salt="b") == 0  # not the tenant "ab"


def test_queue_is_bounded(serve, llm: LLM) -> None:
    held = threading.Event()

    async def main(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            body = {**SHORT, "max_tokens": 24, "ignore_eos": True}
            tasks = [asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(300)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # one that is refused
            held.set()
            return await asyncio.gather(*tasks)

    with serve(ServerSettings(limits=ServerLimits(max_waiting=1))) as (url, app):
        app.state.service.engine.submit_between_steps(held.wait)  # none ends before all have come
        try:
            answers = asyncio.run(main(url))
        finally:
            held.set()
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 16
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "address_share"  # the last places are for other addresses
        assert app.state.service.num_open == 0
    assert is_idle(llm)


def test_what_is_too_much_is_refused_while_a_step_takes_long(serve, llm: LLM) -> None:
    """The engine's thread is held: what is beyond the bound is refused all the same, and what is wrong counts once."""
    held, one = threading.Event(), ApiTenant("one", max_requests=1, requests_per_minute=2)
    with serve(ServerSettings(keys=keys(one))) as (url, app), ThreadPoolExecutor(1) as pool:

        def ask(**more: object) -> httpx.Response:
            return httpx.post(
                f"{url}/v1/completions", json={**SHORT, **more}, headers=key_of("one"), timeout=30
            )

        app.state.service.engine.submit_between_steps(held.wait)
        try:
            first = pool.submit(ask, prompt=[10**6])
            until(lambda: app.state.service.num_open == 1)
            assert ask().status_code == 429
        finally:
            held.set()
        assert first.result().status_code == 400
        assert [ask().status_code for _ in range(3)] == [200, 200, 429]


def test_tenant_limits(serve) -> None:
    slow, rare = ApiTenant("slow", max_requests=1), ApiTenant("rare", requests_per_minute=2)
    with serve(ServerSettings(keys=keys(slow, rare))) as (url, app):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=key_of("slow")) as answer:
            assert answer.status_code == 200
            second = httpx.post(f"{url}/v1/completions", json=SHORT, headers=key_of("slow"))
            assert second.status_code == 429
        until(lambda: app.state.service.num_open == 0)
        assert httpx.post(f"{url}/v1/completions", json=SHORT, headers=key_of("slow")).status_code == 200
        statuses = [
            httpx.post(f"{url}/v1/completions", json=SHORT, headers=key_of("rare")).status_code
            for _ in range(3)
        ]
        assert statuses == [200, 200, 429]


def test_a_client_that_leaves_frees_its_blocks(serve, llm: LLM) -> None:
    with serve(ServerSettings()) as (url, app):
        for _ in range(5):
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
                next(answer.iter_lines())
            until(lambda: app.state.service.num_open == 0 and is_idle(llm))
        # One that does not stream is noticed too.
        before = llm.stats()["num_generated_tokens"]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 1900}, timeout=0.3
            )
        until(lambda: app.state.service.num_open == 0 and is_idle(llm))
        assert llm.stats()["num_generated_tokens"] - before < 1900


def test_large_body(serve) -> None:
    with serve(ServerSettings(limits=ServerLimits(max_body_bytes=1000))) as (url, _):
        assert httpx.post(f"{url}/v1/completions", json={**SHORT, "user": "x" * 2000}).status_code == 413

        def pieces():
            yield json.dumps({**SHORT, "user": "x" * 2000}).encode()

        answer = httpx.post(
            f"{url}/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413


def test_what_can_never_fit_is_refused_at_once(serve) -> None:
    with serve(ServerSettings()) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json={**SHORT, "prompt": list(range(100)) * 30})
        assert answer.status_code == 400
        assert "3000" in answer.json()["error"]["message"]


def test_draining(serve) -> None:
    with serve(ServerSettings()) as (url, app):
        app.state.service.draining = True
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 503
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_failing_engine_is_reported_and_goes_on(serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(ServerSettings()) as (url, app):
        schedule = llm.engine.scheduler.schedule

        def fail() -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
        answer = httpx.post(f"{url}/v1/completions", json=SHORT)
        assert answer.status_code == 500
        assert "broken on purpose" not in answer.text
        assert httpx.get(f"{url}/health").status_code == 503
        monkeypatch.setattr(llm.engine.scheduler, "schedule", schedule)
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert app.state.service.num_open == 0
    assert is_idle(llm)
