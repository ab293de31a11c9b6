"""Prompts computed by a prefill replica and fetched by the engine that answers; nothing of Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from quire.cluster.door import Door
from quire.cluster.prefill_sockets import PrefillSockets
from quire.cluster.prompt_keys import PromptKeys
from quire.cluster.replica_group import ReplicaGroup, ReplicaLostError
from quire.cluster.replica_server import AnswerPart, CarriedRequest, ReplicaServer
from quire.cluster.route_table import RouteTable
from quire.errors import QuireError
from quire.weights.load import load_tokenizer

from .conftest import SECRET, settings_of

BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
APART: dict[str, Any] = {"prefill_replicas": 1, "decode_replicas": 1, "prefill_min_tokens": 32}


def prompt_of(name: str) -> str:
    return f"def {name}(first, second):\n    return first + second\n" * 6


class Apart:
    """A prefill replica and an engine that answers, behind one door. `on_prefill`: called at each part of a prefill
    with its number; it may raise ReplicaLostError."""

    def __init__(self) -> None:
        settings = settings_of(
            **APART, engine={"kv_memory": "16MiB", "max_model_len": 512, "host_cache": "16MiB"}
        )
        sockets = PrefillSockets(SECRET, 1)
        self.prefill = ReplicaServer(settings, "prefill", settings.config_of_prefill(sockets))
        self.engine = ReplicaServer(settings, "engine", settings.config_of_engine(sockets))
        table = RouteTable()
        prefills = RouteTable(metrics=table.metrics)
        self.metrics = table.metrics
        table.set_replicas({"engine": self.engine.routing_stats()})
        prefills.set_replicas({"prefill": self.prefill.routing_stats()})
        self.on_prefill: Callable[[int], object] = lambda number: None
        self.door = Door(
            ReplicaGroup(table, self._sender(table, self.engine), 30.0),
            PromptKeys(load_tokenizer(settings.engine.model), settings.server),
            1 << 20,
            ReplicaGroup(prefills, self._sender(prefills, self.prefill), 30.0),
            settings.prefill_min_tokens,
        )
        self.tables = (table, prefills)

    def _sender(self, table: RouteTable, replica: ReplicaServer) -> Any:
        async def send(request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
            table.note_sent(ticket, table.rank(ticket, [replica.name])[0])
            answer = replica.answer(request)
            try:
                number = 0
                if replica is self.prefill:
                    self.on_prefill(number)
                async for part in answer:
                    number += 1
                    if replica is self.prefill:
                        self.on_prefill(number)
                    yield part
            finally:
                await answer.aclose()

        return send

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        await (await self.door.answer(Request(scope, receive)))(scope, receive, send)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self._call, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=60
            ) as client:
                return await client.post(path, json=body)

        answer = asyncio.run(call())
        assert answer.status_code == 200, answer.text
        return answer.json()

    def count(self, outcome: str) -> float:
        found = self.metrics.registry.get_sample_value("quire:router_prefills_total", {"outcome": outcome})
        return found or 0.0

    def loaded(self) -> int:
        stats = asyncio.run(self.engine._engine.stats())
        return stats["hit_tokens_by_tier"].get("peers", 0)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("sockets")))
        made = Apart()
        yield made
        made.engine.close()
        made.prefill.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[dict[str, Any]], Any]]:
    """The answer of one engine without prefill replicas."""
    replica = ReplicaServer(settings_of(), "alone")

    def ask(path: str, body: dict[str, Any]) -> Any:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(replica._app, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=60
            ) as client:
                return await client.post(path, json=body)

        return asyncio.run(call()).json()

    yield ask
    replica.close()


def test_a_long_prompt_is_computed_apart_and_fetched(apart: Apart, alone: Any) -> None:
    body = {**BODY, "prompt": prompt_of("one")}
    computed, loaded = apart.count("computed"), apart.loaded()
    answer = apart.ask("/v1/completions", body)
    assert answer["choices"] == alone("/v1/completions", body)["choices"]
    assert apart.count("computed") == computed + 1
    num_tokens = answer["usage"]["prompt_tokens"]
    assert apart.loaded() - loaded >= num_tokens - 1 - apart.engine._engine.block_size
    for table, replica in zip(apart.tables, (apart.engine, apart.prefill), strict=True):
        table.set_replicas({replica.name: replica.routing_stats()})
        assert table.num_open == 0
    assert apart.ask("/v1/completions", body)["choices"] == answer["choices"]
    assert apart.count("computed") == computed + 1  # the engine has it now


def test_a_chat_and_a_salt_are_fetched_too(apart: Apart, alone: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": prompt_of("chat")}],
        "max_tokens": 8,
        "temperature": 0,
        "cache_salt": "s",
    }
    loaded = apart.loaded()
    answer = apart.ask("/v1/chat/completions", body)
    assert answer["choices"] == alone("/v1/chat/completions", body)["choices"]
    assert apart.loaded() > loaded


def test_a_short_prompt_is_not_computed_apart(apart: Apart) -> None:
    before = apart.count("computed")
    apart.ask("/v1/completions", {**BODY, "prompt": "def"})
    assert apart.count("computed") == before


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_prefill_replica_that_is_lost_costs_the_computation(apart: Apart, alone: Any, number: int) -> None:
    def lose(at: int) -> None:
        if at == number:
            raise ReplicaLostError("prefill")

    lost, computed = apart.count("lost"), apart.count("computed")
    body = {**BODY, "prompt": prompt_of(f"lost_{number}")}
    apart.on_prefill = lose
    try:
        assert apart.ask("/v1/completions", body)["choices"] == alone("/v1/completions", body)["choices"]
    finally:
        apart.on_prefill = lambda number: None
    assert apart.count("lost") + apart.count("computed") == lost + computed + 1
    assert all(table.num_open == 0 for table in apart.tables)


def test_a_prefill_replica_that_refuses_costs_the_computation(apart: Apart, alone: Any) -> None:
    refused = apart.count("refused")
    body = {**BODY, "prompt": prompt_of("refused")}
    apart.prefill._app.state.service.draining = True
    try:
        assert apart.ask("/v1/completions", body)["choices"] == alone("/v1/completions", body)["choices"]
    finally:
        apart.prefill._app.state.service.draining = False
    assert apart.count("refused") == refused + 1


def test_the_administrator_reaches_both(apart: Apart) -> None:
    answer = apart.ask("/admin/flush", {"tiers": False})
    assert {entry["replica"] for entry in answer["replicas"]} == {"engine", "prefill"}


def test_places_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taken = [PrefillSockets(SECRET, 2) for _ in range(4)]
    addresses = [one.take() for one in taken]
    assert addresses == taken[0].addresses
    with pytest.raises(QuireError, match="expected a free place of 4"):
        PrefillSockets(SECRET, 2).take()
    os.close(taken[1]._lock)  # as the system does when a process ends
    assert PrefillSockets(SECRET, 2).take() == addresses[1]
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o755)
    with pytest.raises(QuireError, match="only this user can open"):
        PrefillSockets(SECRET, 2).take()
