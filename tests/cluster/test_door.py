"""The door over two engines: routing, lost replicas, stored objects, lists, the administrator's calls, metrics."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request

LONG = "def add(first, second):\n    return first + second\n" * 6
BODY = {"prompt": LONG, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def run(cluster: Any, calls: Callable[[httpx.AsyncClient], Awaitable[Any]], key: str = "a") -> Any:
    async def with_client() -> Any:
        async with cluster.client(authorization=f"Bearer {key}") as client:
            return await calls(client)

    return asyncio.run(with_client())


def value(cluster: Any, name: str, **labels: str) -> float:
    return cluster.table.metrics.registry.get_sample_value(f"quire:router_{name}", labels) or 0.0


def events_of(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def test_a_prompt_returns_to_the_replica_that_has_it(cluster: Any) -> None:
    async def calls(client: httpx.AsyncClient) -> list[Any]:
        answers = [await client.post("/v1/completions", json=BODY)]
        cluster.report()
        await client.post("/v1/completions", json={**BODY, "prompt": "something else"})
        answers.append(await client.post("/v1/completions", json=BODY))
        return [answer.json() for answer in answers]

    first, second = run(cluster, calls)
    assert cluster.sent[0][0] == cluster.sent[2][0]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["usage"]["prompt_tokens"] - 1
    assert value(cluster, "hit_tokens_total", replica=cluster.sent[2][0]) >= cached
    assert cluster.table.num_open == 0


@pytest.mark.parametrize("num_parts", [0, 1])
def test_a_request_whose_replica_is_lost_goes_to_another(cluster: Any, num_parts: int) -> None:
    wanted = run(cluster, lambda client: client.post("/v1/completions", json=BODY)).json()
    cluster.lose_next(num_parts)
    answer = run(cluster, lambda client: client.post("/v1/completions", json=BODY))
    assert answer.status_code == 200
    assert answer.json()["choices"] == wanted["choices"]
    assert {name for name, _ in cluster.sent[-2:]} == {"one", "two"}
    assert value(cluster, "retries_total") == 1
    assert cluster.table.num_open == 0


@pytest.mark.parametrize(
    ("path", "body", "ends_with_done"),
    [
        ("/v1/completions", {**BODY, "n": 2, "seed": 1}, 1),
        ("/v1/completions", {**BODY, "prompt": ["a", "b"]}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 12, "n": 2}, 1),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 12, "model": "embedded"}, 0),
        ("/v1/responses", {"input": "a", "max_output_tokens": 12}, 0),
    ],
)  # fmt: skip
def test_a_stream_whose_replica_is_lost_ends_with_an_error(
    cluster: Any, path: str, body: dict[str, Any], ends_with_done: bool
) -> None:
    cluster.lose_next(3)  # the head and two pieces
    answer = run(cluster, lambda client: client.post(path, json={**body, "stream": True}))
    assert answer.status_code == 200
    events = events_of(answer.text)
    assert (events[-1] == "[DONE]") == bool(ends_with_done)
    error = events[-1 - ends_with_done]
    assert error["error"]["code"] == "replica_lost"
    assert ("event: error" in answer.text) == (path == "/v1/messages")
    assert value(cluster, "broken_streams_total") == 1
    assert value(cluster, "retries_total") == 0
    assert cluster.table.num_open == 0


def test_a_stream_that_has_not_begun_goes_to_another(cluster: Any) -> None:
    whole = run(cluster, lambda client: client.post("/v1/completions", json=BODY)).json()
    cluster.lose_next()
    answer = run(cluster, lambda client: client.post("/v1/completions", json={**BODY, "stream": True}))
    assert value(cluster, "retries_total") == 1
    events = events_of(answer.text)
    text = "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])
    assert text == whole["choices"][0]["text"]
    assert events[-1] == "[DONE]"


def test_without_any_replica_the_answer_is_503(cluster: Any) -> None:
    for each in ("one", "two"):
        cluster.lose(each)
    answer = run(cluster, lambda client: client.post("/v1/completions", json=BODY))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert answer.headers["retry-after"] == "5"


def test_a_client_that_leaves_ends_its_request(cluster: Any) -> None:
    async def leave() -> None:
        async with cluster.client(authorization="Bearer a") as client:
            task = asyncio.create_task(
                client.post("/v1/completions", json={**BODY, "max_tokens": 400, "stream": True})
            )
            while not cluster.sent:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while any(replica._app.state.service.num_open for replica in cluster.replicas.values()):
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert cluster.table.num_open == 0


def test_a_stream_that_is_never_read_leaves_nothing_open(cluster: Any) -> None:
    async def answer() -> None:
        async with cluster.client(authorization="Bearer a") as client:
            asked = client.build_request("POST", "/v1/completions", json={**BODY, "stream": True})
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(name.lower(), value) for name, value in asked.headers.raw],
            "client": ("127.0.0.1", 1),
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": asked.content}

        made = await cluster.door.answer(Request(scope, receive))
        assert made.status_code == 200
        assert cluster.table.num_open == 1

    asyncio.run(answer())
    gc.collect()
    assert cluster.table.num_open == 0


def test_a_stored_response_is_continued_where_it_is(cluster: Any) -> None:
    async def calls(client: httpx.AsyncClient) -> list[httpx.Response]:
        first = await client.post("/v1/responses", json={"input": "one", "max_output_tokens": 4})
        named = {"previous_response_id": first.json()["id"], "input": "two", "max_output_tokens": 4}
        second = await client.post("/v1/responses", json=named)
        found = await client.get(f"/v1/responses/{second.json()['id']}")
        gone = await client.delete(f"/v1/responses/{first.json()['id']}")
        missing = await client.get(f"/v1/responses/{first.json()['id']}")
        return [first, second, found, gone, missing]

    answers = run(cluster, calls)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 404]
    assert answers[2].json() == answers[1].json()


def test_lists_are_merged_and_objects_found_by_id(cluster: Any) -> None:
    async def calls(client: httpx.AsyncClient) -> tuple[list[str], list[str], list[int]]:
        made = []
        for name in ("one", "two"):
            cluster.lose(({"one", "two"} - {name}).pop())
            made.append((await client.post("/quire/conversations", json={"text": "a"})).json()["id"])
            cluster.find_all()
        listed = (await client.get("/quire/conversations")).json()["data"]
        turns = [
            await client.post(f"/quire/conversations/{name}/append", json={"max_tokens": 2}) for name in made
        ]
        removed = [await client.delete(f"/quire/conversations/{name}") for name in made]
        return made, [card["id"] for card in listed], [answer.status_code for answer in (*turns, *removed)]

    made, listed, statuses = run(cluster, calls)
    assert sorted(made) == sorted(listed)
    assert statuses == [200] * 4


def test_the_administrator_reaches_all_replicas(cluster: Any) -> None:
    answer = run(cluster, lambda client: client.post("/admin/flush", json={"tiers": False}), "root")
    assert answer.status_code == 200, answer.text
    assert [(entry["replica"], entry["status"]) for entry in answer.json()["replicas"]] == [
        ("one", 200),
        ("two", 200),
    ]
    refused = run(cluster, lambda client: client.post("/admin/flush", json={}))
    assert refused.status_code == 403
    assert "admin key" in refused.json()["error"]["message"]


def test_metrics_have_each_replica_and_the_door(cluster: Any) -> None:
    run(cluster, lambda client: client.post("/v1/completions", json=BODY))
    page = run(cluster, lambda client: client.get("/metrics"), "root").text
    for name in ("one", "two"):
        assert f'vllm:num_requests_running{{model_name="embedded",replica="{name}"}} 0.0' in page
        assert f'quire:router_digest_age_seconds{{replica="{name}"}}' in page
    assert "quire:router_replicas 2.0" in page
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert run(cluster, lambda client: client.get("/metrics"), "no").status_code == 401


@pytest.mark.parametrize("key", ["", "no"])
def test_a_stranger_is_refused_and_not_read(cluster: Any, key: str) -> None:
    answer = run(cluster, lambda client: client.post("/v1/completions", json=BODY), key)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert value(cluster, "prompt_tokens_total", replica=cluster.sent[-1][0]) == 0


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/window/events"])
def test_the_live_page_is_refused_by_name(cluster: Any, path: str) -> None:
    answer = run(cluster, lambda client: client.get(path))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_in_a_cluster"


def test_a_body_beyond_the_limit_is_refused(cluster: Any) -> None:
    answer = run(cluster, lambda client: client.post("/v1/completions", content=b" " * (16 << 20) + b" "))
    assert answer.status_code == 413
    assert not cluster.sent


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/openapi.json"])
def test_other_routes_are_one_replicas(cluster: Any, path: str) -> None:
    answer = run(cluster, lambda client: client.get(path))
    assert answer.status_code == 200
    assert len(cluster.sent) == 1
