"""Tenants through the API: quota, floor, cache priority and keep_for are the engine's, and it enforces them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.running_server import running
from support.until import until

from quire import LLM
from quire.errors import ArgumentError
from quire.server import metrics
from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.app import create_app
from quire.server.settings import ServerLimits, ServerSettings

BLOCKS = 64


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory=BLOCKS * 49152, block_size=16, pin_memory="50%", max_model_len=800) as one:
        assert (one.num_blocks, one.cache.block_bytes) == (BLOCKS, 49152)
        yield one


@pytest.fixture(autouse=True)
def nothing_cached(llm: LLM) -> None:
    for pin in llm.pins:
        llm.pins.remove(pin)
    llm.cache.reset()


def settings(*tenants: ApiTenant, **options: Any) -> ServerSettings:
    keys = KeyRing([(digest_of_key(f"key-{tenant.name}"), tenant) for tenant in (*tenants, ADMIN)])
    return ServerSettings(keys=keys, tenants=(ANYBODY, *tenants), **options)


def ask(url: str, name: str | None, prompt: list[int], **more: Any) -> httpx.Response:
    headers = {} if name is None else {"Authorization": f"Bearer key-{name}"}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-quire-cached-tokens"])


def prompt_of(seed: int, num_tokens: int = 64) -> list[int]:
    return [3 + seed, *range(300, 299 + num_tokens)]


def blocks_of(llm: LLM, name: str) -> int:
    return sum(llm.cache.owner_counts(llm.engine.tenants[name].owner_id))


def test_a_quota_is_enforced(llm: LLM) -> None:
    small = ApiTenant("small", quota_bytes=8 * llm.cache.block_bytes)
    with running(llm, settings(small, ApiTenant("large"))) as (url, _):
        refused = ask(url, "small", prompt_of(0, 150))
        assert refused.status_code == 400
        assert "quota" in refused.json()["error"]["message"]
        assert "'small'" in refused.json()["error"]["message"]
        assert ask(url, "small", prompt_of(0, 150), cache_salt="s").status_code == 400
        assert ask(url, "small", prompt_of(0, 40), max_tokens=150).status_code == 400
        for seed in range(8):
            assert cached(ask(url, "small", prompt_of(seed))) == 0
            assert blocks_of(llm, "small") <= 8
        assert cached(ask(url, "small", prompt_of(7))) == 63
        assert cached(ask(url, "small", prompt_of(0))) == 0
        for seed in range(8):
            ask(url, "large", prompt_of(seed))
        assert blocks_of(llm, "large") == 32


def test_a_floor_is_kept(llm: LLM) -> None:
    kept = ApiTenant("kept", floor_bytes=10 * llm.cache.block_bytes)
    with running(llm, settings(kept, ApiTenant("other"), ApiTenant("greedy"))) as (url, _):
        for name in ("kept", "other"):
            for seed in range(2):
                ask(url, name, prompt_of(seed))
        for seed in range(10, 40):
            assert ask(url, "greedy", prompt_of(seed)).status_code == 200
        assert blocks_of(llm, "kept") == 8
        assert blocks_of(llm, "other") == 0
        # The copy of a partial block may cost the tenant one of its own.
        assert [cached(ask(url, "kept", prompt_of(seed))) // 16 for seed in range(2)] == [3, 3]
        assert [cached(ask(url, "other", prompt_of(seed))) for seed in range(2)] == [0, 0]


def test_what_is_discarded_goes_first_and_what_is_to_keep_last(llm: LLM) -> None:
    with running(llm, settings(ApiTenant("a"))) as (url, _):
        ask(url, "a", prompt_of(1), cache_priority="keep")
        ask(url, "a", prompt_of(2), cache_priority="normal")
        for seed in range(3, 40):  # over and over the same room, after the first 14
            ask(url, "a", prompt_of(seed), cache_priority="discard")
        assert cached(ask(url, "a", prompt_of(2))) == 63
        for seed in range(40, 80):
            ask(url, "a", prompt_of(seed))
        assert cached(ask(url, "a", prompt_of(1))) == 63
        assert cached(ask(url, "a", prompt_of(2))) == 0
        assert ask(url, "a", prompt_of(1), cache_priority="forever").status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_keep_for_pins_until_its_time_is_over(
    llm: LLM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(llm.engine.pins, "now", lambda: now)
    with running(llm, settings(ApiTenant("a"), ApiTenant("b"))) as (url, _):
        ask(url, "a", prompt_of(1), keep_for=60, stream=stream, max_tokens=4)
        (pin,) = llm.pins
        assert (pin.owner, len(pin.tokens), pin.expires_at) == ("a", 64, 160.0)
        assert llm.stats()["pinned"] == 4
        now = 130.0
        ask(url, "a", prompt_of(1), keep_for=10)  # its longer time begins anew
        ask(url, "b", prompt_of(1), keep_for=10)
        assert [(pin.owner, pin.expires_at) for pin in llm.pins] == [("a", 190.0), ("b", 140.0)]
        for seed in range(10, 40):
            ask(url, "b", prompt_of(seed))
        now = 189.0
        assert [pin.owner for pin in llm.pins] == ["a"]
        assert cached(ask(url, "a", prompt_of(1))) == 63
        now = 189.0 + 61
        assert list(llm.pins) == []
        for seed in range(40, 160):  # content that was used five times outlasts thirty prompts
            ask(url, "b", prompt_of(seed))
        assert cached(ask(url, "a", prompt_of(1))) == 0


def test_keep_for_is_bounded(llm: LLM) -> None:
    with running(llm, settings(ApiTenant("a"), ApiTenant("b"), limits=ServerLimits(max_kept=2))) as (
        url,
        app,
    ):
        assert ask(url, "a", prompt_of(1, 600), keep_for=60).status_code == 400  # over half of the cache
        assert list(llm.pins) == []
        for seed in range(2):
            ask(url, "a", prompt_of(seed), keep_for=60)
        answer = ask(url, "a", prompt_of(3), keep_for=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_kept")
        assert ask(url, "b", prompt_of(3), keep_for=60).status_code == 200
        assert len(llm.pins) == 3
        until(lambda: app.state.service.num_open == 0)


def test_room_that_is_gone_by_then_costs_nobody_an_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.pins, "check", lambda *args, **options: None)
    with running(llm, settings(ApiTenant("a"))) as (url, _):
        assert ask(url, "a", prompt_of(1, 600), keep_for=60).status_code == 200
        assert list(llm.pins) == []
        text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer key-a"}).text
        assert "quire:not_kept_total 1.0" in text


def test_a_tenant_finds_only_its_own_whatever_the_salt(llm: LLM) -> None:
    with running(llm, settings(ApiTenant("a"), ApiTenant("b"), limits=ServerLimits(max_kept=2))) as (url, _):
        prompt = prompt_of(5)
        assert cached(ask(url, "a", prompt, cache_salt="common", keep_for=60)) == 0
        before = llm.engine.stats()
        assert cached(ask(url, "b", prompt, cache_salt="common")) == 0
        assert cached(ask(url, "b", prompt, cache_salt="acommon")) == 0
        assert cached(ask(url, "admin", prompt, cache_salt="common")) == 0
        # As many tokens computed, in as many steps, as of a prompt that nobody has.
        after = llm.engine.stats()
        ask(url, "b", prompt_of(6), cache_salt="common")
        ask(url, "b", prompt_of(7))
        ask(url, "b", prompt_of(8))
        last = llm.engine.stats()
        for name in ("num_computed_tokens", "num_steps"):
            assert after[name] - before[name] == last[name] - after[name]
        assert cached(ask(url, "a", prompt, cache_salt="common")) == 63


def test_limits_that_cannot_be_are_said_at_the_start(llm: LLM) -> None:
    from quire import AsyncEngine

    engine = AsyncEngine(llm)
    try:
        floors = [ApiTenant(name, floor_bytes=40 * llm.cache.block_bytes) for name in "ab"]
        with pytest.raises(ArgumentError, match="floor"):
            create_app(engine, settings(*floors))
        create_app(engine, settings(ApiTenant("c")))
        assert {tenant.name for tenant in llm.engine.tenants} == {"c", "admin"}
    finally:
        engine.close()


def test_requests_without_keys_find_what_the_library_has(llm: LLM) -> None:
    llm.generate([prompt_of(1)])
    with running(llm, ServerSettings()) as (url, _):
        assert cached(ask(url, None, prompt_of(1))) == 63
        assert cached(ask(url, None, prompt_of(1), cache_salt="s")) == 0
        assert cached(ask(url, None, prompt_of(1), cache_salt="")) == 63


def test_tokens_are_counted_by_key_and_tenant(llm: LLM) -> None:
    a, b = ApiTenant("a"), ApiTenant("b")
    pairs = [("first", a), ("of b", b), ("second", a), ("boss", ADMIN)]
    keys = KeyRing([(digest_of_key(key), tenant) for key, tenant in pairs])

    def counts(key: str) -> dict[tuple[str, str], list[float]]:
        answer = httpx.get(f"{url}/metrics", headers={"X-Api-Key": key})
        found: dict[tuple[str, str], dict[str, float]] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name.startswith("quire:key_") and sample.name.endswith("_tokens_total"):
                    place = found.setdefault((sample.labels["tenant"], sample.labels["key"]), {})
                    place[sample.name.split("_")[1]] = sample.value
        names = ("read", "written", "computed", "generated")
        return {of: [place[name] for name in names] for of, place in found.items()}

    with running(llm, ServerSettings(keys=keys, tenants=(ANYBODY, a, b))) as (url, _):
        for key, seed in (("first", 1), ("second", 1), ("of b", 1), ("second", 1)):
            body = {"prompt": prompt_of(seed), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, headers={"X-Api-Key": key}, timeout=60)
        of_a = {("a", "1"): [0, 64, 64, 2], ("a", "2"): [126, 2, 2, 4]}
        of_b = {("b", "1"): [0, 64, 64, 2]}
        assert counts("first") == counts("second") == of_a
        assert counts("of b") == of_b
        assert counts("boss") == of_a | of_b


def test_keys_beyond_a_number_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_KEYS", 2)
    page, output = metrics.Metrics("m"), SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=1)
    for key in ("1", "2", "3", "4", "1"):
        page.record_tokens("a", key, output, 5, is_kept=False)  # type: ignore[arg-type]
    (family,) = [one for one in page.registry.collect() if one.name == "quire:key_computed_tokens"]
    found = {one.labels["key"]: one.value for one in family.samples if one.name.endswith("_total")}
    assert found == {"1": 4, "2": 2, "other": 4}


def test_a_tenants_metrics_are_its_own(llm: LLM) -> None:
    def page(url: str, name: str) -> str:
        answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer key-{name}"})
        assert answer.status_code == 200
        return answer.text

    def figure(text: str, name: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    with running(llm, settings(ApiTenant("a"), ApiTenant("b", requests_per_minute=1))) as (url, app):
        ask(url, "a", prompt_of(1), max_tokens=3)
        ask(url, "a", prompt_of(1), max_tokens=3, stream=True)
        ask(url, "b", prompt_of(2, 40), max_tokens=2)
        assert ask(url, "b", prompt_of(2, 40)).status_code == 429
        until(lambda: app.state.service.num_open == 0)
        names = (
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "quire:cached_prompt_tokens_total",
        )
        a, b, all_of_it = (page(url, name) for name in ("a", "b", "admin"))
        assert [figure(a, name) for name in names] == [128, 6, 63]
        assert [figure(b, name) for name in names] == [40, 2, 0]
        assert (
            figure(a, "vllm:request_success_total")
            == figure(a, "vllm:time_to_first_token_seconds_count")
            == 2
        )
        assert (
            figure(b, "vllm:request_success_total")
            == figure(b, "vllm:e2e_request_latency_seconds_count")
            == 1
        )
        assert (figure(a, "quire:refused_requests_total"), figure(b, "quire:refused_requests_total")) == (
            0,
            1,
        )
        assert figure(all_of_it, "vllm:request_success_total") == 3
        for of_others in (
            "quire:free_blocks",
            "vllm:kv_cache_usage_perc",
            "quire:steps",
            "vllm:num_requests_running",
        ):
            assert of_others in all_of_it
            assert of_others not in a


def test_with_keys_of_nobody_by_name_all_see_all(llm: LLM) -> None:
    with running(llm, ServerSettings(keys=KeyRing([(digest_of_key("key-x"), ANYBODY)]))) as (url, _):
        text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer key-x"}).text
        assert "quire:free_blocks" in text
