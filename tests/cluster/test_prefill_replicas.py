"""Prompts computed by a prefill replica and fetched by the engine that answers; nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from quire.cluster.door import Door
from quire.cluster.prefills import Prefills
from quire.cluster.prompt_keys import PromptKeys
from quire.cluster.replica_group import ReplicaGroup, ReplicaLostError
from quire.cluster.replica_server import AnswerPart, CarriedRequest, ReplicaServer
from quire.cluster.route_table import RouteTable
from quire.offload.open_tiers import OpenTiers
from quire.offload.tier_budget import TierBudget
from quire.peer_address import PeerAddress
from quire.tiers.peers.peer_tier import PeerTier
from quire.tiers.tier import TierError
from quire.weights.load import load_tokenizer

from .conftest import SECRET, settings_of

BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
APART: dict[str, Any] = {"prefill_replicas": 1, "decode_replicas": 1, "prefill_min_tokens": 32}


def prompt_of(name: str) -> str:
    return f"def {name}(first, second):\n    return first + second\n" * 6


async def _nothing() -> None:
    pass


async def _never() -> None:
    await asyncio.Event().wait()


async def _fail() -> None:
    pytest.fail("a prompt was sent to a prefill replica that cannot compute it")


class Apart:
    """A prefill replica and an engine that answers, behind one door. `on_prefill`: called at each part of a prefill
    with its number; it may raise ReplicaLostError. `before_prefill`: awaited before one is sent."""

    def __init__(self) -> None:
        settings = settings_of(
            **APART, engine={"kv_memory": "16MiB", "max_model_len": 512, "host_cache": "16MiB"}
        )
        self.settings = settings
        self.prefill = ReplicaServer(settings, "prefill", settings.config_of_prefill(SECRET, "127.0.0.1"))
        self.engine = ReplicaServer(settings, "engine", settings.config_of_engine(SECRET))
        table = RouteTable()
        prefills = RouteTable(metrics=table.metrics)
        self.metrics = table.metrics
        table.set_replicas({"engine": self.engine.routing_stats()})
        self.on_prefill: Callable[[int], object] = lambda number: None
        self.before_prefill: Callable[[], Awaitable[object]] = _nothing
        self.prefills = ReplicaGroup(prefills, self._sender(prefills, "prefill"), 30.0)
        self.apart = Prefills(self.prefills, table, settings.prefill_min_tokens)
        self.door = Door(
            ReplicaGroup(table, self._sender(table, "engine"), 30.0),
            PromptKeys(load_tokenizer(settings.engine.model), settings.server),
            1 << 20,
            self.apart,
        )
        self.tables = (table, prefills)
        self.report_prefill()

    def _sender(self, table: RouteTable, name: str) -> Any:
        async def send(request: CarriedRequest, ticket: int) -> AsyncGenerator[AnswerPart, None]:
            table.note_sent(ticket, table.rank(ticket, [name])[0])
            is_prefill = name == "prefill"
            if is_prefill:
                await self.before_prefill()
            answer = (self.prefill if is_prefill else self.engine).answer(request)
            try:
                number = 0
                if is_prefill:
                    self.on_prefill(number)
                async for part in answer:
                    number += 1
                    if is_prefill:
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

    def report_prefill(self) -> None:
        """The door sees the present prefill replica, as a new one."""
        self.prefills.table.set_replicas({})
        self.prefills.table.set_replicas({"prefill": self.prefill.routing_stats()})

    def peers(self) -> PeerTier:
        """Those of the engine that answers."""
        tiers = self.engine._engine.tiers
        assert tiers is not None
        assert tiers.peers is not None
        return tiers.peers

    def count(self, outcome: str) -> float:
        found = self.metrics.registry.get_sample_value("quire:router_prefills_total", {"outcome": outcome})
        return found or 0.0

    def loaded(self) -> int:
        stats = asyncio.run(self.engine._engine.stats())
        return stats["hit_tokens_by_tier"].get("peers", 0)


@pytest.fixture(autouse=True)
def peers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long earlier look-ups took."""
    monkeypatch.setattr(TierBudget, "may_look_up", lambda self, tier, expected_s: True)


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.engine.close()
    made.prefill.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str, dict[str, Any]], Any]]:
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


@pytest.fixture
def prefill_table(apart: Apart) -> Iterator[RouteTable]:
    """The table of the prefill replica, which it has again after the test."""
    yield apart.prefills.table
    apart.before_prefill = _nothing
    apart.report_prefill()


def test_without_a_prefill_replica_the_engine_computes_at_once(
    apart: Apart, alone: Any, prefill_table: RouteTable
) -> None:
    absent = apart.count("absent")
    body = {**BODY, "prompt": prompt_of("absent")}
    apart.before_prefill = _never
    prefill_table.set_replicas({})
    assert apart.ask("/v1/completions", body)["choices"] == alone("/v1/completions", body)["choices"]
    assert apart.count("absent") == absent + 1


@pytest.mark.parametrize("way", ["gone", "hangs"])
def test_a_prompt_that_waits_is_given_up_when_the_last_prefill_replica_ends(
    apart: Apart, alone: Any, prefill_table: RouteTable, way: str
) -> None:
    async def lose_and_wait() -> None:
        (prefill_table.forget if way == "gone" else prefill_table.note_silent)("prefill")
        await _never()

    absent = apart.count("absent")
    apart.before_prefill = lose_and_wait
    for name in ("first", "second"):  # the second one is not sent
        body = {**BODY, "prompt": prompt_of(f"{way}_{name}")}
        assert apart.ask("/v1/completions", body)["choices"] == alone("/v1/completions", body)["choices"]
        apart.before_prefill = _fail
    assert apart.count("absent") == absent + 2
    assert all(table.num_open == 0 for table in apart.tables)


class Clock:
    """step: seconds after which a prefill is looked at; it does not end then. 0: it ends."""

    now = step = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_prompt_that_is_late_is_aborted_and_computed_by_the_engine(
    apart: Apart, alone: Any, prefill_table: RouteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, computed = apart.count("late"), apart.count("computed")
    clock = Clock()
    monkeypatch.setattr("quire.cluster.prefills.time", clock)
    monkeypatch.setattr(prefill_table, "expected_s", lambda block_keys, num_tokens: 5.0)
    answer = apart.prefill.answer

    async def answer_late(request: CarriedRequest) -> AsyncGenerator[AnswerPart]:
        async with aclosing(answer(request)) as parts:
            async for part in parts:  # the prompt is at the replica
                if clock.step:
                    clock.now += clock.step
                    await _never()
                yield part

    monkeypatch.setattr(apart.prefill, "answer", answer_late)
    for number, clock.step in enumerate((21.0, 41.0)):  # 4 and 8 times the expected seconds, and one more
        body = {**BODY, "prompt": prompt_of(f"late_{number}")}
        assert apart.ask("/v1/completions", body)["choices"] == alone("/v1/completions", body)["choices"]
        assert apart.count("late") == late + number + 1
        assert apart.prefill._app.state.service.num_open == 0
    assert all(table.num_open == 0 for table in apart.tables)
    assert apart.apart._patience == 16
    clock.step = 0.0
    apart.ask("/v1/completions", {**BODY, "prompt": prompt_of("in_time")})
    assert apart.count("computed") == computed + 1
    assert apart.apart._patience == 4


def test_a_new_prefill_replica_is_asked_for_its_first_prompt(apart: Apart, alone: Any) -> None:
    """Also by an engine that has found the last one gone."""
    prompts = [prompt_of(f"place_{number}") for number in range(2)]
    assert apart.ask("/v1/completions", {**BODY, "prompt": prompts[0]})
    apart.prefill.close()
    with pytest.raises(TierError):
        apart.peers().contains([bytes(32)])
    apart.prefill = ReplicaServer(
        apart.settings, "prefill", apart.settings.config_of_prefill(SECRET, "127.0.0.1")
    )
    apart.report_prefill()
    loaded = apart.loaded()
    body = {**BODY, "prompt": prompts[1]}
    assert apart.ask("/v1/completions", body)["choices"] == alone("/v1/completions", body)["choices"]
    assert apart.loaded() > loaded


def test_another_cluster_gets_nothing(apart: Apart) -> None:
    address = PeerAddress.parse(str(apart.prefill.peer_address))
    for secret in (None, b"the secret of another cluster"):
        with (
            closing(PeerTier.of([address], secret)) as tier,
            pytest.raises(TierError, match="another remote_secret"),
        ):
            tier.ping()


def test_a_prefill_replica_starts_when_its_content_can_be_stored(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []

    def connect(tiers: OpenTiers, *parts: object) -> None:
        tiers.stores.is_trusted = lambda timeout_s: bool(waited_s.append(timeout_s)) or True

    monkeypatch.setattr("quire.engine.open_engine._connect_tiers", connect)
    ReplicaServer(apart.settings, "new", apart.settings.config_of_prefill(SECRET, "127.0.0.1")).close()
    assert waited_s[0] == 60
