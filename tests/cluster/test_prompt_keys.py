"""The door's keys of a prompt are those that the replica that answers it then reports, for each API and tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.cluster.block_digest import unpacked_digest

LONG = "def add(first, second):\n    return first + second\n" * 6
MESSAGES = [{"role": "user", "content": LONG}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": LONG}),
    "completion of tokens": ("/v1/completions", {"prompt": list(range(5, 105))}),
    "the first of several prompts": ("/v1/completions", {"prompt": [LONG, "x"]}),
    "cut": ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 70}),
    "salted": ("/v1/completions", {"prompt": LONG, "cache_salt": "pepper"}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat with a tool": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
    ),
    "response": ("/v1/responses", {"input": LONG, "instructions": "Be brief."}),
    "message": ("/v1/messages", {"messages": MESSAGES, "system": "Be brief.", "model": "embedded"}),
}  # fmt: skip


@pytest.mark.parametrize("key", ["a", "b"])
@pytest.mark.parametrize("name", BODIES)
def test_keys_are_those_of_the_digest(cluster: Any, name: str, key: str) -> None:
    path, body = BODIES[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"

    async def ask() -> tuple[Any, Any]:
        async with cluster.client(authorization=f"Bearer {key}") as client:
            answer = await client.post(path, json={**body, limit: 1})
            assert answer.status_code == 200, answer.text
            request = answer.request
            tenant = cluster.keys.tenant_of(request)
            return tenant, await cluster.keys.of(path, request.content, tenant, cluster.table.block_tokens)

    tenant, prompt = asyncio.run(ask())
    assert tenant.name == {"a": "alice", "b": "bob"}[key]
    assert prompt.fallback is None
    assert len(prompt.block_keys) == prompt.num_tokens // cluster.table.block_tokens > 3
    asked = cluster.replicas[cluster.sent[-1][0]]
    there = unpacked_digest(asked.routing_stats()["keys_by_tier"])
    # The last block may have the last prompt token, which is computed and then committed too.
    assert set(prompt.block_keys) <= there.keys()


def test_tenants_and_salts_have_keys_of_their_own(cluster: Any) -> None:
    async def keys_of(key: str, **more: Any) -> set[int]:
        async with cluster.client(authorization=f"Bearer {key}") as client:
            request = client.build_request("POST", "/v1/completions", json={"prompt": LONG, **more})
            tenant = cluster.keys.tenant_of(request)
            return set((await cluster.keys.of("/v1/completions", request.content, tenant, 16)).block_keys)

    async def all_keys() -> list[set[int]]:
        return [
            await keys_of("a"),
            await keys_of("b"),
            await keys_of("a", cache_salt="pepper"),
            await keys_of("root"),
        ]

    found = asyncio.run(all_keys())
    assert len(set.union(*found)) == sum(map(len, found))


@pytest.mark.parametrize(
    ("path", "body", "fallback", "continued"),
    [
        ("/v1/completions", b"{", "unreadable", None),
        ("/v1/completions", b'{"prompt": "a", "suffix": "b"}', "no_tokens", None),
        ("/v1/chat/completions", b'{"messages": [{"role": "nobody", "content": ""}]}', "unreadable", None),
        ("/v1/responses", b'{"input": "a", "previous_response_id": "resp_1"}', None, ("v1/responses", "resp_1")),
        ("/v1/responses", b'{"input": "a", "conversation": "conv_1"}', None, ("v1/conversations", "conv_1")),
        ("/v1/responses", b'{"input": "a", "conversation": {"id": "conv_1"}}', None, ("v1/conversations", "conv_1")),
    ],
)  # fmt: skip
def test_prompts_without_keys(
    cluster: Any, path: str, body: bytes, fallback: str | None, continued: Any
) -> None:
    tenant = next(tenant for tenant in cluster.keys._settings.tenants if tenant.name == "alice")
    prompt = asyncio.run(cluster.keys.of(path, body, tenant, 16))
    assert (prompt.block_keys, prompt.fallback, prompt.stored) == ((), fallback, continued)


def test_a_stranger_has_no_tenant(cluster: Any) -> None:
    for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "no"}):
        request = cluster.client(**headers).build_request("POST", "/v1/completions", json={"prompt": LONG})
        assert cluster.keys.tenant_of(request) is None
