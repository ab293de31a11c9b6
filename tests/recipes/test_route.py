"""The recipe of a route: a router beside the application's own, with its keys, its bounds and its errors."""

from __future__ import annotations

import httpx
from fastapi import FastAPI
from recipes.hit_route import router
from support.running_server import running

from quire import LLM
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

PROMPT = list(range(300, 364))


def test_it_answers_beside_the_others_and_has_their_keys_and_errors() -> None:
    tenants = (ApiTenant("a"), ApiTenant("b"))
    keys = KeyRing([(digest_of_key(f"key-{tenant.name}"), tenant) for tenant in tenants])
    with (
        LLM(kv_memory="16MiB") as llm,
        running(llm, ServerSettings(keys=keys, tenants=tenants)) as (url, app),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert isinstance(app, FastAPI)
        app.include_router(router)

        def hit(name: str, **body: object) -> httpx.Response:
            return client.post("/hit", json=body, headers={"Authorization": f"Bearer key-{name}"})

        assert hit("a", tokens=PROMPT).json() == {"num_tokens": 64, "num_hit_tokens": 0}
        body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer key-a"})
        assert answer.status_code == 200, answer.text
        assert hit("a", tokens=PROMPT).json()["num_hit_tokens"] == 63
        assert hit("b", tokens=PROMPT).json()["num_hit_tokens"] == 0
        assert hit("c", tokens=PROMPT).status_code == 401
        refused = hit("a", tokens=[-1])
        assert refused.status_code == 400
        assert "tokens" in refused.json()["error"]["message"]
