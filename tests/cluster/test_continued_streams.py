"""Streams whose replica is lost: at each part the client gets the events of a stream without a break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from quire.cluster.door import Door
from quire.cluster.replica_group import ReplicaGroup
from quire.cluster.replica_server import AnswerEnd, AnswerHead, AnswerPart, CarriedRequest, OutputEvents
from quire.cluster.route_table import RouteTable
from quire.server.stream_progress import StreamStart

PROMPT = "def add(first, second):\n"
COMPLETION = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "Add"}],
    "max_tokens": 10,
    "temperature": 0,
    "ignore_eos": True,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"sign": {"enum": ["plus", "minus"]}, "more": {"type": "boolean"}},
            "required": ["sign", "more"],
            "additionalProperties": False,
        },
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", COMPLETION),
    "seeded": ("/v1/completions", {**COMPLETION, "temperature": 1.2, "seed": 3}),
    "all fields": (
        "/v1/completions",
        {
            **COMPLETION,
            "logprobs": 2,
            "echo": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "scored prompt": ("/v1/completions", {**COMPLETION, "prompt_logprobs": 1}),
    "no token": ("/v1/completions", {**COMPLETION, "max_tokens": 0}),
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "call": (
        "/v1/chat/completions",
        {**CHAT, "ignore_eos": False, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
    ),
    "schema": (
        "/v1/chat/completions",
        {
            **CHAT,
            "ignore_eos": False,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": TOOL["function"]["parameters"]},
            },
        },
    ),
}


def streamed(cluster: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without the answer's id and time, which are equal in all of them."""

    async def ask() -> httpx.Response:
        async with cluster.client(authorization="Bearer a") as client:
            return await client.post(path, json={**body, "stream": True})

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert len({(event["id"], event["created"]) for event in events}) <= 1
    assert {event["id"].split("-", 1)[1] for event in events} <= {answer.headers["x-request-id"]}
    return events


def joined(events: list[Any]) -> dict[str, Any]:
    """The parts of all events together. Several tokens may come in one event."""
    found: dict[str, Any] = {
        "text": "",
        "logprobs": [],
        "token_ids": [],
        "last": None,
        "calls": "",
        "heads": [],
    }
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            found["text"] += delta.get("text") or delta.get("content") or ""
            found["heads"] += [{k: v for k, v in delta.items() if k == "role"}] if "role" in delta else []
            found["token_ids"] += choice.get("token_ids") or []
            found["heads"] += [choice[k] for k in ("prompt_logprobs", "prompt_token_ids") if choice.get(k)]
            for call in delta.get("tool_calls", ()):
                found["heads"] += [call["function"]["name"]] if "id" in call else []
                found["calls"] += call["function"].get("arguments") or ""
            scores = choice["logprobs"] or {}
            found["logprobs"] += scores.get("content") or []
            found["logprobs"] += zip(
                scores.get("text_offset", ()), scores.get("token_logprobs", ()), strict=True
            )
            found["last"] = choice["finish_reason"] and (choice["finish_reason"], choice["stop_reason"])
        if usage := event.get("usage"):
            found["usage"] = (usage["prompt_tokens"], usage["completion_tokens"])
    return found


def count(cluster: Any, name: str) -> float:
    return cluster.table.metrics.registry.get_sample_value(f"quire:router_{name}_streams_total")


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_breaks_at_any_part_is_one_without_a_break(cluster: Any, name: str) -> None:
    path, body = CASES[name]
    whole = joined(streamed(cluster, path, body))
    assert whole["last"] is not None
    num_parts, num_continued = 1, 0.0
    while True:  # until the answer has fewer parts
        cluster.find_all()
        cluster.lose_next(num_parts)
        assert joined(streamed(cluster, path, body)) == whole
        if count(cluster, "continued") == num_continued:
            break
        num_continued += 1
        num_parts += 1
    assert num_continued >= min(2, body["max_tokens"] + 1)
    assert count(cluster, "broken") == 0
    assert cluster.table.num_open == 0


def test_a_stream_goes_on_though_its_second_replica_is_lost_too(cluster: Any) -> None:
    whole = joined(streamed(cluster, "/v1/completions", COMPLETION))
    for name in ("one", "two"):
        cluster.lose(name, 4)
    sent = len(cluster.sent)

    def find(name: str) -> None:
        cluster.find_all()

    cluster.when_lost = [lambda name: None, find]
    assert joined(streamed(cluster, "/v1/completions", COMPLETION)) == whole
    assert len(cluster.sent) == sent + 3


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_without_an_event_begins_again(cluster: Any, path: str) -> None:
    body = {
        "model": "embedded",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0,
    }
    if path == "/v1/responses":
        body = {"input": "a", "max_output_tokens": 8, "temperature": 0}
    cluster.lose_next(1)  # the head

    async def ask() -> httpx.Response:
        async with cluster.client(authorization="Bearer a") as client:
            return await client.post(path, json={**body, "stream": True})

    answer = asyncio.run(ask())
    assert "replica_lost" not in answer.text
    assert count(cluster, "continued") == 1


class Silent:
    """Two replicas: "one" hangs after some parts, "two" answers at once."""

    def __init__(self, parts: list[AnswerPart]) -> None:
        self.table = RouteTable()
        self.table.set_replicas({"one": {}, "two": {}})
        self._parts = parts
        self.asked: list[tuple[str, StreamStart | None]] = []
        self.was_left = False

    async def send(self, request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
        ranked = self.table.rank(ticket, ["one", "two"])
        name = ranked[0] if self.asked else "one"
        self.table.note_sent(ticket, name)
        self.asked.append((name, request.continued))
        if name == "one":
            for part in self._parts:
                yield part
            try:
                await asyncio.Event().wait()
            finally:
                self.was_left = True
        yield AnswerHead(200, ((b"content-type", b"text/event-stream"),), "two", StreamStart(1, 2))
        yield OutputEvents(b"data: b\n\n", is_last=True)
        yield AnswerEnd(None)

    async def ask(self) -> bytes:
        door = Door(ReplicaGroup(self.table, self.send, 0.05), None, 1 << 20)  # type: ignore[arg-type]
        scope = {"type": "http", "method": "GET", "path": "/any", "headers": [], "query_string": b""}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        answer = await door.answer(Request(scope, receive))
        return b"".join([piece async for piece in answer.body_iterator])  # type: ignore[attr-defined]


HEAD = AnswerHead(200, ((b"content-type", b"text/event-stream"),), "one", StreamStart(1, 2))


@pytest.mark.parametrize(
    ("parts", "begins", "start"),
    [
        ([], b"", None),
        ([b"", HEAD], b"", StreamStart(1, 2)),
        ([HEAD, OutputEvents(b"data: a\n\n", (7, 8)), b""], b"data: a\n\n", StreamStart(1, 2, (7, 8))),
    ],
)
def test_the_request_of_a_replica_that_hangs_goes_on_at_another(
    parts: list[AnswerPart], begins: bytes, start: StreamStart | None
) -> None:
    cluster = Silent(parts)
    assert asyncio.run(cluster.ask()) == begins + b"data: b\n\n"
    assert cluster.asked == [("one", None), ("two", start)]
    assert cluster.was_left
    assert cluster.table.num_open == 0
    for _ in range(3):  # later requests try the others first
        ticket = cluster.table.open()
        assert cluster.table.rank(ticket, ["one", "two"]) == ["two", "one"]


def test_a_request_waits_for_a_replica_however_long_it_takes() -> None:
    cluster = Silent([])
    begin = cluster.send

    async def send(request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
        await asyncio.sleep(0.3)  # there is no replica yet
        cluster.asked.append(("none", None))
        async for part in begin(request, ticket):
            yield part

    cluster.send = send  # type: ignore[method-assign]
    assert asyncio.run(cluster.ask()) == b"data: b\n\n"
