"""A client's commands for its sessions, by the endpoint and in requests of every door, within its tenant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import families, tiny_llm
from support.running_server import running
from support.scripted_serve import Script, runner_of

from quire.engine import runner
from quire.sampling import grammar
from quire.server.api_keys import ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
MODEL = "Qwen3ForCausalLM"
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
HOLD = {"action": "hold", "seconds": 60}


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


DOORS = {
    "/v1/chat/completions": lambda text: {"messages": said(text), "max_tokens": 2},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/v1/messages": lambda text: {"model": MODEL, "max_tokens": 2, "messages": said(text)},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with (
        tiny_llm.llm(pin_memory="50%", host_cache="1MiB") as llm,
        running(llm, ServerSettings(served_model_name=MODEL)) as (one, _),
    ):
        yield one


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def command(url: str, session: str, **body: Any) -> dict[str, Any]:
    return post(url, f"/v1/sessions/{session}/cache", body).json()


def last_fields(answer: httpx.Response) -> dict[str, Any]:
    """The body of an answer, or the last event of a stream that has fields beyond the API's."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [event.get("response", event) for event in events]
    return next(event for event in reversed(told) if "session_cache" in event)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", list(DOORS))
def test_every_door_takes_commands_and_gives_receipts(url: str, path: str, stream: bool) -> None:
    session = f"{path} {stream}".replace("/", "-")
    commands = [HOLD, {"action": "prefetch"}]
    body = {**DOORS[path](f"{session}: {TEXT}"), "stream": stream, "session_cache": commands}
    receipts = last_fields(post(url, path, body, **{"X-Session-Id": session}))["session_cache"]
    assert [(one["session"], one["action"], one["outcome"]) for one in receipts] == [
        (session, "prefetch", "refused"),  # before the answer, when the session was not known
        (session, "hold", "accepted"),
    ]
    assert receipts[0]["reason"]
    assert receipts[1]["tokens"]["memory"] >= len(TEXT)
    assert receipts[1]["bytes"]["memory"] > 0
    assert 0 < receipts[1]["until_s"] <= 60
    body = {**DOORS[path](f"{session}: {TEXT}"), "stream": stream, "session_cache": {"action": "release"}}
    (receipt,) = last_fields(post(url, path, body, **{"X-Session-Id": session}))["session_cache"]
    assert (receipt["action"], receipt["outcome"]) == ("release", "accepted")
    plain = post(url, path, {**DOORS[path](TEXT), "stream": stream}, **{"X-Session-Id": session})
    assert "session_cache" not in plain.text


def test_the_endpoint_obeys_each_action(url: str) -> None:
    post(url, "/v1/completions", {**DOORS["/v1/completions"]("mine: " + TEXT), "session_id": "a/b c"})
    for body, outcome in (
        (HOLD, "accepted"),
        ({"action": "release"}, "accepted"),
        ({"action": "demote", "tier": "host"}, "accepted"),
        ({"action": "hold"}, "refused"),  # memory has nothing of it
        ({"action": "prefetch"}, "accepted"),
        ({"action": "hold"}, "clipped"),  # a tier has no tokens behind the last whole block
        ({"action": "superseded", "seconds": None, "tier": None}, "accepted"),
    ):
        receipt = command(url, "a/b c", **body)
        assert (receipt["action"], receipt["outcome"]) == (body["action"], outcome), receipt
        assert (receipt["reason"] is None) == (outcome == "accepted")
    card = httpx.get(f"{url}/v1/sessions/a/b c/cache").json()
    assert card["session"] == "a/b c"
    assert "a/b c" in [one["session"] for one in httpx.get(f"{url}/v1/sessions").json()["data"]]
    (turn,) = httpx.get(f"{url}/v1/sessions/a/b c/turns").json()["data"]
    assert turn["prompt"] == turn["computed"] + sum(turn["found"].values())
    receipt = command(url, "a/b c", action="demote", tier="disk")
    assert receipt["outcome"] == "refused"
    assert "disk" in receipt["reason"]


def test_an_unknown_session_is_refused(url: str) -> None:
    receipt = command(url, "nothing", action="hold")
    assert (receipt["outcome"], receipt["tokens"], receipt["bytes"]) == ("refused", {}, {})
    for what in ("cache", "turns"):
        answer = httpx.get(f"{url}/v1/sessions/nothing/{what}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"action": "forget"}, "action"),
        ({}, "action"),
        ({"action": "hold", "seconds": 0}, "seconds"),
        ({"action": "hold", "seconds": "soon"}, "seconds"),
        ({"action": "release", "seconds": 5}, "seconds"),
        ({"action": "hold", "tier": "host"}, "tier"),
        ({"action": "hold", "until": 5}, "until"),
    ],
)
def test_a_wrong_command_is_refused_by_its_field(url: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/sessions/s/cache", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    asked = {**DOORS["/v1/completions"](TEXT), "session_id": "wrong", "session_cache": [HOLD, body]}
    answer = httpx.post(f"{url}/v1/completions", json=asked)
    place = f"session_cache.1.{param}"
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, place), answer.text


@pytest.mark.parametrize("path", list(DOORS))
def test_commands_need_a_session(url: str, path: str) -> None:
    answer = httpx.post(f"{url}{path}", json={**DOORS[path](TEXT), "session_cache": HOLD})
    assert answer.status_code == 400
    assert "session_id" in answer.json()["error"]["message"]


def test_a_name_has_a_length(url: str) -> None:
    long = "s" * 257
    assert httpx.post(f"{url}/v1/sessions/{long}/cache", json=HOLD).status_code == 400
    body = {**DOORS["/v1/completions"](TEXT), "session_id": long}
    assert httpx.post(f"{url}/v1/completions", json=body).json()["error"]["param"] == "session_id"


def test_a_session_is_of_its_tenant() -> None:
    tenants = (ANYBODY, ApiTenant("alice"), ApiTenant("bob"))
    keys = KeyRing([(digest_of_key(tenant.name), tenant) for tenant in tenants[1:]])
    with (
        tiny_llm.llm(pin_memory="50%") as llm,
        running(llm, ServerSettings(keys=keys, tenants=tenants)) as (url, _),
    ):
        of = {name: {"Authorization": f"Bearer {name}"} for name in ("alice", "bob")}
        body = {**DOORS["/v1/completions"](TEXT), "session_id": "s", "session_cache": HOLD}
        post(url, "/v1/completions", body, **of["alice"])
        for name in of["alice"], of["bob"]:
            found = httpx.get(f"{url}/v1/sessions", headers=name).json()["data"]
            assert [one["session"] for one in found] == (["s"] if name is of["alice"] else [])
        assert (
            post(url, "/v1/sessions/s/cache", {"action": "release"}, **of["bob"]).json()["outcome"]
            == "refused"
        )
        for what in ("cache", "turns"):
            assert httpx.get(f"{url}/v1/sessions/s/{what}", headers=of["bob"]).status_code == 404
            assert httpx.get(f"{url}/v1/sessions/s/{what}", headers=of["alice"]).status_code == 200
        assert (
            post(url, "/v1/sessions/s/cache", {"action": "release"}, **of["alice"]).json()["outcome"]
            == "accepted"
        )
        assert httpx.post(f"{url}/v1/sessions/s/cache", json=HOLD).status_code == 401


def test_the_clients_packages_read_the_receipts(url: str) -> None:
    ours = {"session_id": "package", "session_cache": HOLD}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chat = client.chat.completions.create(model=MODEL, messages=said(TEXT), max_tokens=2, extra_body=ours)  # type: ignore[arg-type]
        assert chat.session_cache[0]["outcome"] == "accepted"  # type: ignore[attr-defined]
        response = client.responses.create(model=MODEL, input=TEXT, max_output_tokens=2, extra_body=ours)
        assert response.session_cache[0]["outcome"] == "accepted"  # type: ignore[attr-defined]
        assert not hasattr(client.responses.retrieve(response.id), "session_cache")
    with anthropic.Anthropic(base_url=url, api_key="none") as client:
        message = client.messages.create(model=MODEL, messages=said(TEXT), max_tokens=2, extra_body=ours)  # type: ignore[arg-type]
        assert message.session_cache[0]["outcome"] == "accepted"  # type: ignore[attr-defined]


def test_a_conversations_turns_may_name_a_session(url: str) -> None:
    made = httpx.post(f"{url}/quire/conversations", json={"text": "told: " + TEXT}).json()["id"]
    body = {"max_tokens": 2, "session_cache": HOLD}
    answer = post(url, f"/quire/conversations/{made}/append", body, **{"X-Session-Id": "told"})
    assert answer.json()["session_cache"][0]["outcome"] == "accepted"
    card = httpx.get(f"{url}/v1/sessions/told/cache").json()
    assert (card["num_requests"], card["is_held"]) == (1, True)
    assert card["num_held_tokens"] == card["num_memory_tokens"] >= len("told: " + TEXT)


def figures(url: str) -> dict[str, float]:
    """The metrics of sessions, by name and labels."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_commands_and_what_became_of_sessions_are_counted(url: str) -> None:
    before = figures(url)
    body = {**DOORS["/v1/completions"]("counted: " + TEXT), "session_id": "counted"}
    post(url, "/v1/completions", body)
    for action in ("hold", "superseded", "hold"):
        command(url, "counted" if action == "superseded" else "not there", action=action)
    after = figures(url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("quire:session_receipts_total hold refused") == 2
    assert grown("quire:session_receipts_total superseded accepted") == 1
    assert grown("quire:superseded_tokens_total") >= len("counted: " + TEXT)
    assert grown("quire:superseded_branches_total") == 1
    assert grown("quire:sessions") == 1
    told = DOCS.read_text()
    for name in after:
        if name.startswith("quire:"):
            shown = re.sub(r"_(bucket|sum|count|created)$", "", name.split()[0])
            assert shown in told, f"{shown} is in no table of docs/server.md"


@pytest.mark.parametrize("is_set", [False, True])
def test_anthropics_user_names_the_session_where_the_server_says_so(is_set: bool) -> None:
    settings = ServerSettings(served_model_name=MODEL, session_from_user_id=is_set)
    with tiny_llm.llm() as llm, running(llm, settings) as (url, _):
        body = {**DOORS["/v1/messages"](TEXT), "metadata": {"user_id": "user-1"}}
        post(url, "/v1/messages", body)
        post(url, "/v1/messages", {**body, "session_id": "named"})
        found = {one["session"] for one in httpx.get(f"{url}/v1/sessions").json()["data"]}
        assert found == ({"user-1", "named"} if is_set else {"named"})
        body["metadata"]["user_id"] = "u" * 257
        answer = httpx.post(f"{url}/v1/messages", json=body)
        assert answer.status_code == (400 if is_set else 200)
        if is_set:
            assert "metadata.user_id" in answer.text


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALLING = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": TOOL}], "max_tokens": 99},
    "/v1/messages": {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}], "max_tokens": 99},
    "/v1/responses": {"tools": [{"type": "function", **TOOL}], "max_output_tokens": 99},
}


@pytest.fixture(scope="module")
def calling() -> Iterator[tuple[str, Any]]:
    """A server whose model calls a tool where the prompt says [call]."""
    with pytest.MonkeyPatch.context() as patch:
        words = families.tokenizer("hermes")
        answers = {
            f"[{kind}]": [words(text + words.eos_token)["input_ids"]] * 50
            for kind, text in (("call", CALL), ("plain", "Done."))
        }
        patch.setattr(
            runner, "Runner", runner_of(Script({"answers": answers, "tool": "", "else": []}, words))
        )
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with families.llm("hermes") as llm, running(llm, ServerSettings()) as (url, app):
            yield url, app.state.service  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", list(CALLING))
def test_the_engine_is_told_of_calls(calling: tuple[str, Any], path: str, stream: bool) -> None:
    url, service = calling
    for kind in ("plain", "call"):
        session = f"{path} {stream} {kind}"
        body = {
            **DOORS[path](f"Do it. [{kind}]"),
            **CALLING[path],
            "model": service.model_name,
            "stream": stream,
        }
        post(url, path, body, **{"X-Session-Id": session})
        info = httpx.get(f"{url}/v1/sessions/{session}/cache").json()
        assert (info["kept_s"] is not None) == (kind == "call"), info
