"""The record of a session's turns: what each found, had prepared and computed, and why; bounded; of its own tenant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import tiny_llm
from support.running_server import running
from support.until import until

from quire.engine.driver_proxy import in_caller
from quire.engine.engine_monitor import EngineMonitor
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.service import Service
from quire.server.sessions import session_turns
from quire.server.sessions.session_turns import SessionTurn, SessionTurns
from quire.server.settings import ServerSettings

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
DOORS = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/v1/messages": lambda text: {
        "model": "Qwen3ForCausalLM",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": text}],
    },
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
}


def turn(number: int) -> SessionTurn:
    return SessionTurn(float(number), f"r{number}", 10, {"memory": 0}, 0, 10, 1)


def test_sessions_and_turns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_turns, "_MAX_SESSIONS", 3)
    record = SessionTurns()
    for number in range(50):
        record.add("a", "long", turn(number))
    for name in ("x", "y", "long", "z"):
        record.add("a", name, turn(100))
    assert len(record) == 3
    assert record.get("a", "x") == []
    assert record.get("b", "y") == []
    assert [one.at for one in record.get("a", "long")] == [*range(19, 50), 100]
    rows = record.rows(2, 4)
    assert [(row["session"], row["num_turns"], len(row["turns"])) for row in rows] == [
        ("z", 1, 1),
        ("long", 51, 4),
    ]
    assert rows[1]["turns"][-1]["request"] == "r100"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    with (
        tiny_llm.llm() as llm,
        running(llm, ServerSettings(served_model_name="Qwen3ForCausalLM")) as (url, app),
    ):
        yield url, app.state.service  # type: ignore[attr-defined]


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def turns_of(service: Service, tenant: str, session: str, count: int) -> list[SessionTurn]:
    """The turns, once there are so many: a stream's client may see its end before the record does."""
    until(lambda: len(service.session_turns.get(tenant, session)) == count)
    return service.session_turns.get(tenant, session)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", list(DOORS))
def test_every_door_records_its_turns(server: tuple[str, Service], path: str, stream: bool) -> None:
    url, service = server
    session = f"{path} {stream}"
    text = f"{session}: {TEXT}"
    for asked in (text, text.replace("lazy", "tame"), text):
        post(url, path, {**DOORS[path](asked), "stream": stream}, **{"X-Session-Id": session})
    first, second, third = turns_of(service, "default", session, 3)
    assert (first.found, first.computed) == ({"memory": 0}, first.prompt) or first.cause == "differs"
    assert second.cause == "differs"
    assert second.where_it_differs is not None
    assert second.where_it_differs["asked"].startswith("tame")
    assert 0 < second.found["memory"] == second.prompt - second.computed
    assert (third.cause, third.computed) == ("complete", 1)
    assert first.generated == 2
    assert len({first.request, second.request, third.request}) == 3


def test_a_turn_has_the_report_that_its_client_asked_for(server: tuple[str, Service]) -> None:
    url, service = server
    body = {**DOORS["/v1/completions"]("another " + TEXT), "session_id": "told", "cache_report": True}
    report = post(url, "/v1/completions", body).json()["cache_report"]
    (turn,) = turns_of(service, "default", "told", 1)
    assert (turn.cause, turn.text) == (report["cause"], report["text"])
    assert turn.found == report["matched_tokens"]


def test_a_request_without_a_session_asks_nothing(
    server: tuple[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = server
    explain, asked = EngineMonitor.explain, []

    @in_caller
    def counted(monitor: EngineMonitor, prompt: Any, **options: Any) -> Any:
        asked.append(options["with_tiers"])
        return explain(monitor, prompt, **options)

    monkeypatch.setattr(EngineMonitor, "explain", counted)
    before = len(service.session_turns)
    for path, body in DOORS.items():
        post(url, path, body(TEXT))
    assert len(service.session_turns) == before
    assert asked == []
    post(url, "/v1/completions", {**DOORS["/v1/completions"](TEXT), "session_id": "asks"})
    assert asked == [False]


def test_several_prompts_are_a_turn_each(server: tuple[str, Service]) -> None:
    url, service = server
    body = {"prompt": ["first " + TEXT, "second, " + TEXT], "max_tokens": 1, "session_id": "two"}
    post(url, "/v1/completions", body)
    turns = turns_of(service, "default", "two", 2)
    assert {one.prompt for one in turns} == {len("first " + TEXT), len("second, " + TEXT)}


def test_a_session_is_of_its_tenant_and_tells_nothing_of_others() -> None:
    tenants = (ApiTenant("alice"), ApiTenant("bob"))
    keys = KeyRing([(digest_of_key(tenant.name), tenant) for tenant in tenants])
    secret = "a secret that is of alice alone, whatever the others ask for"
    with tiny_llm.llm() as llm, running(llm, ServerSettings(keys=keys, tenants=tenants)) as (url, app):
        for name, text in (("alice", secret), ("bob", secret.replace("alone", "only"))):
            body = {**DOORS["/v1/completions"](text), "session_id": "s"}
            post(url, "/v1/completions", body, Authorization=f"Bearer {name}")
        service = app.state.service  # type: ignore[attr-defined]
        (of_bob,) = turns_of(service, "bob", "s", 1)
        assert (of_bob.cause, of_bob.found, of_bob.where_it_differs) == ("never seen", {"memory": 0}, None)
        assert len(turns_of(service, "alice", "s", 1)) == 1
