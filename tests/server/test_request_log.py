"""One id from the client's header to the engine and back, and one line in the log, without content."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from support.window_client import Watcher

from quire.server.api_keys import ADMIN, ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.http.request_log import RequestRecord
from quire.server.settings import ServerLimits, ServerSettings

SECRET = "xyzzy plugh"
BODY = {"prompt": SECRET, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "ignore_eos": True}
KEYS = KeyRing([(digest_of_key("key-a"), ApiTenant("team a")), (digest_of_key("key-admin"), ADMIN)])


@pytest.fixture
def names(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine is asked to call its requests."""
    found: list[str] = []
    submit_all = llm.engine.submit_all

    def noted(requests: Any) -> Any:
        found.extend(options.request_id for _, options in requests)
        return submit_all(requests)

    monkeypatch.setattr(llm.engine, "submit_all", noted)
    return found


def words_of(line: str) -> dict[str, str]:
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)
    assert line == " ".join(f"{name}={value}" for name, value in found)
    return {name: json.loads(value) if value[0] == '"' else value for name, value in found}


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_id_goes_all_the_way(url: str, names: list[str], stream: bool) -> None:
    for path, body, kind in (("completions", BODY, "cmpl"), ("chat/completions", CHAT, "chatcmpl")):
        headers = {"X-Request-Id": f"mine/{kind}?1"}
        answer = httpx.post(f"{url}/v1/{path}", json={**body, "stream": stream}, headers=headers, timeout=60)
        assert answer.headers["x-request-id"] == headers["X-Request-Id"]
        text = answer.text.partition("data: ")[2].partition("\n")[0] if stream else answer.text
        assert json.loads(text)["id"] == f"{kind}-mine/{kind}?1"
    assert names == ["mine/cmpl?1", "mine/chatcmpl?1"]


def test_a_conversations_turn_has_it_too(url: str, names: list[str]) -> None:
    made = httpx.post(f"{url}/quire/conversations", json={"text": "def f("}).json()["id"]
    answer = httpx.post(
        f"{url}/quire/conversations/{made}/append", json={"max_tokens": 2}, headers={"X-Request-Id": "turn-7"}
    )
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("turn-7", "chatcmpl-turn-7")
    assert names == ["turn-7"]
    httpx.delete(f"{url}/quire/conversations/{made}")


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "caf\u00e9", "a\tb"])
def test_what_is_no_id_is_replaced(url: str, names: list[str], given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode()}
    answer = httpx.post(f"{url}/v1/completions", json=BODY, headers=headers, timeout=60)
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert names == [answer.headers["x-request-id"]]
    longest = {"X-Request-Id": "~" * 128}
    assert httpx.get(f"{url}/health", headers=longest).headers["x-request-id"] == "~" * 128


def test_several_prompts_and_the_same_id_again(url: str, names: list[str], server: tuple[str, Any]) -> None:
    headers = {"X-Request-Id": "one"}
    body = {**BODY, "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as first:
        pieces = first.iter_raw()
        next(pieces)
        again = httpx.post(
            f"{url}/v1/completions", json={**BODY, "prompt": ["a", "b"]}, headers=headers, timeout=60
        )
        assert (again.status_code, again.headers["x-request-id"]) == (200, "one")
        assert names == ["one", "one-2", "one-3"]
    httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": "two"}, timeout=60)
    assert names[-1] == "two"
    assert "two" not in server[1].state.service._names


def test_every_answer_has_an_id(url: str, serve: Any) -> None:
    for method, path, headers, status in (
        ("GET", "/", {}, 200),
        ("GET", "/nothing", {}, 404),
        ("POST", "/v1/completions", {}, 400),
        ("GET", "/admin/report", {"Via": "a"}, 403),
        ("GET", "/v1/models", {"Host": "evil.example"}, 403),
        ("POST", "/v1/completions", {"Content-Encoding": "br"}, 415),
    ):
        answer = httpx.request(method, url + path, headers={"X-Request-Id": "me", **headers})
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["me"])
    limits = ServerLimits(max_body_bytes=8)
    with serve(ServerSettings(keys=KEYS, tenants=(ANYBODY, ApiTenant("team a")), limits=limits)) as (
        keyed,
        _,
    ):
        for content, status in (("", 401), ("x" * 9, 413)):
            answer = httpx.request(
                "GET", f"{keyed}/v1/models", content=content, headers={"X-Request-Id": "me"}
            )
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "me")


def test_a_failure_has_an_id(url: str, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.service.Service.check_model", lambda *_: 1 // 0)
    answer = httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": "me"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "me")
    assert answer.json()["error"]["type"] == "internal_error"


def test_the_page_shows_a_whole_answers_request(url: str, llm: Any) -> None:
    """`/window/sequences/ID/0` too, whatever an id has in it."""
    with Watcher(url) as watcher:
        body = {**BODY, "max_tokens": 1500, "stream": True}
        headers = {"X-Request-Id": "a/b c?".replace(" ", "%")}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as running:
            pieces = running.iter_raw()
            next(pieces)
            state = watcher.until(lambda state: state.get("sequences"))
            assert [one["id"] for one in state["sequences"]] == ["a/b%c?"]
            found = httpx.get(f"{url}/window/sequences/a%2Fb%25c%3F/0")
            assert (found.status_code, found.json()["id"]) == (200, "a/b%c?")


def test_a_line_for_each_request(serve: Any, lines: list[str]) -> None:
    settings = ServerSettings(keys=KEYS, tenants=(ANYBODY, ApiTenant("team a")), log_requests=True)
    with serve(settings) as (url, _):
        client = httpx.Client(
            base_url=url, headers={"Authorization": "Bearer key-a", "X-Request-Id": "me"}, timeout=60
        )
        client.post("/v1/completions", json={**BODY, "prompt": list(range(40, 80))})
        client.post("/v1/completions", json={**BODY, "prompt": list(range(40, 80)), "stream": True, "n": 2})
        client.post("/v1/chat/completions", json={**CHAT, "stop": [SECRET]})
        client.get(f"/v1/models/{SECRET}")
        client.get(f"/nothing/{'x' * 300}?q={SECRET}")
        client.head("/health")
        client.get("/v1/models", headers={"Authorization": "Bearer wrong-key", "X-Request-Id": 'a"b'})
        client.get("/admin/report", headers={"Authorization": "Bearer key-admin"})
    first, second, chat, model, nothing, head, wrong, admin = map(words_of, lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first.pop("time"))
    assert float(first.pop("seconds")) >= 0
    assert first == {
        "id": "me", "tenant": "team a", "route": "POST /v1/completions", "status": "200", "prompt_tokens": "40",
        "cached_tokens": "0", "generated_tokens": "3", "finish": "length",
    }  # fmt: skip
    assert (second["cached_tokens"], second["generated_tokens"], second["status"]) == ("39", "6", "200")
    assert (chat["route"], chat["generated_tokens"]) == ("POST /v1/chat/completions", "3")
    assert (model["route"], model["status"]) == ("GET /v1/models/{name:path}", "404")
    assert "prompt_tokens" not in model
    assert (nothing["route"], nothing["status"]) == (f"GET /nothing/{'x' * 71}...", "404")
    assert (head["route"], head["status"]) == ("HEAD /health", "200")
    assert (wrong["id"], wrong["tenant"], wrong["status"]) == ('a"b', "-", "401")
    assert (admin["tenant"], admin["route"]) == ("admin", "GET /admin/report")
    for hidden in ("xyzzy", "wrong-key", "key-a"):
        assert hidden not in "".join(lines)


def test_who_leaves_a_stream_is_told_of(serve: Any, lines: list[str]) -> None:
    with serve(ServerSettings(log_requests=True)) as (url, app):
        body = {**BODY, "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as running:
            pieces = running.iter_raw()
            next(pieces)
        while app.state.service.num_open:
            httpx.get(f"{url}/health")
    (told,) = [words_of(line) for line in lines if "/v1/completions" in line]
    assert (told["status"], told["finish"], told["tenant"]) == ("200", "abort", "default")
    assert 0 < int(told["generated_tokens"]) < 1500


def test_nothing_is_logged_unless_it_is_asked_for(url: str, lines: list[str]) -> None:
    httpx.get(f"{url}/health")
    assert lines == []


def test_a_line_stays_one(lines: list[str]) -> None:
    record = RequestRecord('i"d=\\', tenant="a\nb\u2028c", status=200)
    line = record.line("GET /a\r\n", 0.5)
    assert len(line.splitlines()) == 1
    assert words_of(line)["tenant"] == "a\nb\u2028c"
