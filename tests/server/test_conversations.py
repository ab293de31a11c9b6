"""`/quire/conversations` over HTTP: turns, branches, history, ownership, and complete removal."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.running_server import running
from support.until import until

from quire import LLM
from quire.server.api_keys import ANYBODY, ApiTenant, KeyRing, digest_of_key
from quire.server.messages import render_next
from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.settings import ServerLimits, ServerSettings

ASK = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Client:
    def __init__(self, url: str, name: str | None = None) -> None:
        headers = {} if name is None else {"Authorization": f"Bearer key-{name}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def __call__(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        root = "/quire" if path.startswith("conversations") else "/v1"
        answer = self.http.request(method, f"{root}/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def make(self, **body: Any) -> str:
        return self("POST", "conversations", body, 201)["id"]

    def turn(self, name: str, status: int = 200, **body: Any) -> Any:
        return self("POST", f"conversations/{name}/append", {**ASK, **body}, status)

    def tokens(self, name: str) -> list[int]:
        return self("GET", f"conversations/{name}")["tokens"]


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    one = Client(url)
    yield one
    for card in one("GET", "conversations")["data"]:
        one("DELETE", f"conversations/{card['id']}")


def idle(llm: LLM) -> bool:
    counts = llm.cache.stats()
    return counts["held"] == counts["in_flight"] == counts["num_sequences"] == 0


def test_turns_are_what_one_long_prompt_would_be(client: Client, llm: LLM) -> None:
    name = client.make(text="def mean(values):\n    return ")
    first = client.turn(name)
    assert first["object"] == "chat.completion"
    assert first["usage"]["completion_tokens"] == 8
    before = client.tokens(name)
    assert len(before) == first["conversation"]["num_tokens"] == first["usage"]["total_tokens"]
    second = client.turn(name, text="\n\nprint(")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(before) - 1
    whole = client.tokens(name)
    prompt = whole[:-8]
    again = client("POST", "completions", {**ASK, "prompt": prompt})
    assert again["choices"][0]["text"] == second["choices"][0]["message"]["content"]
    assert client("GET", f"conversations/{name}")["text"] == llm.tokenizer.decode(whole)
    client.turn(name)  # goes on where it ends
    assert client.tokens(name)[: len(whole)] == whole
    assert idle(llm)


def test_messages_go_through_the_chat_template(client: Client, llm: LLM) -> None:
    name = client.make(messages=[{"role": "system", "content": "Be brief."}])
    assert client.tokens(name) == []
    answer = client.turn(name, messages=[{"role": "user", "content": "Hi"}])
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    whole = client("POST", "chat/completions", {**ASK, "messages": asked})
    assert answer["choices"][0]["message"] == whole["choices"][0]["message"]
    client.turn(name, messages=[{"role": "user", "content": "More"}])
    text = client("GET", f"conversations/{name}")["text"]
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    asked += [said, {"role": "user", "content": "More"}]
    prompt = llm.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)
    client.turn(name, 400, text="x", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "<|end|>\n<|user|>More<|end|>\n<|assistant|>",
        ),
        ("{{ messages[-1].content }}", None),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", None),
    ],
)
def test_how_a_template_goes_on(template: str, text: str | None) -> None:
    import jinja2

    from quire.server.api_errors import ApiError

    class Tokenizer:
        chat_template = template

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return jinja2.Template(template).render(
                messages=messages, add_generation_prompt=options["add_generation_prompt"]
            )

    more = [ChatMessage(role="user", content="More")]
    if text is None:
        with pytest.raises(ApiError, match="append"):
            render_next(Tokenizer(), more, ServerLimits())
    else:
        assert render_next(Tokenizer(), more, ServerLimits()) == text


def test_a_streamed_turn(client: Client) -> None:
    name, other = client.make(text="def f(x):"), client.make(text="def f(x):")
    whole = client.turn(name)
    body = {**ASK, "stream": True}
    with client.http.stream("POST", f"/quire/conversations/{other}/append", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    said = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert said == whole["choices"][0]["message"]["content"]
    assert events[-1]["conversation"]["num_tokens"] == whole["conversation"]["num_tokens"]
    assert client.tokens(name) == client.tokens(other)


def test_branches_and_the_past(client: Client) -> None:
    name = client.make(text="import os\n\n")
    client.turn(name)
    first = client.tokens(name)
    other = client("POST", f"conversations/{name}/fork", status=201)["id"]
    client.turn(name, text="def a(")
    client.turn(other, text="class B")
    assert client.tokens(name)[: len(first)] == client.tokens(other)[: len(first)] == first
    assert client.tokens(name) != client.tokens(other)
    gone = client("POST", f"conversations/{name}/rewind", {"turns": 1})
    assert (gone["num_tokens"], gone["num_cached_tokens"]) == (len(first), len(first) - 1)
    assert client.tokens(name) == first
    assert client("POST", f"conversations/{name}/rewind", {"position": 2})["num_tokens"] == 2
    for body in ({}, {"turns": 1, "position": 1}, {"turns": 9}, {"position": 10**6}, {"position": -1}):
        client("POST", f"conversations/{name}/rewind", body, 400)
    assert client.tokens(name) == first[:2]
    again = client("POST", f"conversations/{other}/rewind", {"turns": 2})
    assert again["turns"] == []


def test_a_turn_that_fails_changes_nothing(client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    name = client.make(text="x = 1\n")
    before = client.tokens(name)
    client.turn(name, 400, text="y", n=2)
    client.turn(name, 400, tokens=[10**6])
    client.turn(name, 400, tokens=[5] * 3000)
    client.turn(name, 400, tools=[{"type": "function", "function": {"name": "f"}}])
    client.turn(name, 404, text="y", model="another")
    client.turn(name, 400, cache_salt="another")
    with monkeypatch.context() as patch:

        def fail() -> None:
            raise RuntimeError("broken on purpose")

        patch.setattr(llm.engine.scheduler, "schedule", fail)
        client.turn(name, 500, text="y = 2\n")
    assert client.tokens(name) == before
    client.turn(name, text="y = 2\n", generate=False)
    assert len(client.tokens(name)) > len(before)
    client.turn(name)
    client.turn(name, 400, generate=False)


class Slow:
    """A turn that goes on until it is closed."""

    def __init__(self, client: Client, name: str) -> None:
        body = {**ASK, "max_tokens": 1900, "stream": True}
        self.stream = client.http.stream("POST", f"/quire/conversations/{name}/append", json=body)

    def __enter__(self) -> Iterator[str]:
        answer = self.stream.__enter__()
        assert answer.status_code == 200
        lines = answer.iter_lines()
        for _ in range(10):
            next(lines)
        return lines

    def __exit__(self, *error: Any) -> None:
        self.stream.__exit__(*error)


def test_one_turn_at_a_time_and_what_has_come_stays(client: Client, url: str, llm: LLM) -> None:
    name = client.make(text="def f(")
    before, second = client.tokens(name), Client(url)
    with Slow(client, name) as lines:
        assert lines is not None  # kept: httpx closes a stream whose lines nobody has
        assert second.turn(name, 409, text="x")["error"]["code"] == "conflict"
        second("POST", f"conversations/{name}/rewind", {"position": 0}, 409)
        branch = second("POST", f"conversations/{name}/fork", status=201)
        assert branch["num_tokens"] > len(before)
    until(lambda: idle(llm))
    until(lambda: len(client.tokens(name)) > len(before))
    assert client.tokens(name)[: branch["num_tokens"]] == client.tokens(branch["id"])
    client.turn(name)


def test_deleting_ends_a_turn(client: Client, url: str, llm: LLM) -> None:
    name = client.make(text="def f(")
    with Slow(client, name) as lines:
        Client(url)("DELETE", f"conversations/{name}")
        assert "[DONE]" in "".join(lines)
    client("GET", f"conversations/{name}", status=404)
    client.turn(name, 404)
    assert idle(llm)


def test_each_is_its_tenants_alone(serve: Any, llm: LLM) -> None:
    a, b = ApiTenant("a", quota_bytes=8 * llm.cache.block_bytes), ApiTenant("b")
    keys = KeyRing([(digest_of_key(f"key-{tenant.name}"), tenant) for tenant in (a, b)])
    options = ServerSettings(keys=keys, tenants=(ANYBODY, a, b), limits=ServerLimits(max_conversations=2))
    with serve(options) as (url, app):
        one, two = Client(url, "a"), Client(url, "b")
        name = one.make(tokens=list(range(300, 364)))
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/append", ASK),
            ("POST", "/fork", None),
            ("POST", "/rewind", {"position": 1}),
            ("POST", "/snapshot", {"name": "x"}),
        ):
            error = two(method, f"conversations/{name}{path}", body, 404)["error"]
            assert error["code"] == "conversation_not_found"
        assert two("GET", "conversations")["data"] == []
        one.turn(name)
        same = two.make(tokens=list(range(300, 364)))
        assert two.turn(same)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "quota" in one.turn(name, 400, max_tokens=100)["error"]["message"]
        assert sum(llm.cache.owner_counts(llm.engine.tenants["a"].owner_id)) <= 8
        one.make()
        assert one("POST", "conversations", {}, 429)["error"]["code"] == "too_many_conversations"
        one("POST", f"conversations/{name}/fork", status=429)
        two.make()
        app.state.service.conversations.close()
        one("GET", f"conversations/{name}", status=404)
        assert len(app.state.service.conversations) == 0
    assert idle(llm)


def test_many_turns_at_once(client: Client, url: str, llm: LLM) -> None:
    names = [client.make(text=f"def f{i}(x):\n") for i in range(6)]
    alone = [client.turn(name)["choices"][0]["message"]["content"] for name in names]
    others = [client.make(text=f"def f{i}(x):\n") for i in range(6)]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = Client(url).turn(others[i])["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == alone
    assert idle(llm)


def test_snapshots_outlive_the_server_and_are_their_tenants(tmp_path: Path) -> None:
    a, b = ApiTenant("a"), ApiTenant("b")
    keys = KeyRing([(digest_of_key(f"key-{tenant.name}"), tenant) for tenant in (a, b)])
    settings = ServerSettings(keys=keys, tenants=(ANYBODY, a, b), limits=ServerLimits(max_snapshots=1))
    options = {"kv_memory": "16MiB", "disk_cache": tmp_path, "tenant_secret": b"of the test, for good"}
    with LLM(**options) as llm, running(llm, settings) as (url, _):
        one = Client(url, "a")
        name = one.make(tokens=list(range(300, 364)), cache_salt="s")
        one.turn(name)
        whole = one.tokens(name)
        kept = one("POST", f"conversations/{name}/snapshot", {"name": "mine"}, 201)
        assert (kept["num_tokens"], kept["num_stored_tokens"], kept["is_usable"]) == (72, 64, True)
        one("POST", f"conversations/{name}/snapshot", {"name": "mine"}, 409)
        one("POST", f"conversations/{name}/snapshot", {"name": "../x"}, 400)
        error = one("POST", f"conversations/{name}/snapshot", {"name": "second"}, 429)["error"]
        assert (error["code"], error["message"][:34]) == (
            "snapshots_full",
            "expected at most 1 snapshots of on",
        )
    with LLM(**options) as llm, running(llm, settings) as (url, _):
        one, two = Client(url, "a"), Client(url, "b")
        assert [card["name"] for card in one("GET", "snapshots?cache_salt=s")["data"]] == ["mine"]
        assert one("GET", "snapshots")["data"] == two("GET", "snapshots?cache_salt=s")["data"] == []
        two("POST", "conversations", {"snapshot": "mine", "cache_salt": "s"}, 404)
        again = one.make(snapshot="mine", cache_salt="s")
        assert one.tokens(again) == whole
        assert one.turn(again)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        two("DELETE", "snapshots/mine?cache_salt=s", status=404)
        one("DELETE", "snapshots/mine?cache_salt=s", status=204)
        assert one("GET", "snapshots?cache_salt=s")["data"] == []


def test_no_body_is_an_empty_one(url: str) -> None:
    made = httpx.post(f"{url}/quire/conversations")
    assert made.status_code == 201
    name = made.json()["id"]
    httpx.post(f"{url}/quire/conversations/{name}/append", json={"text": "def f(", "generate": False})
    turn = httpx.post(f"{url}/quire/conversations/{name}/append", timeout=30)
    assert turn.status_code == 200
    assert turn.json()["usage"]["completion_tokens"] > 0


def test_without_a_disk_cache_there_are_no_snapshots(client: Client) -> None:
    name = client.make(text="x")
    error = client("POST", f"conversations/{name}/snapshot", {"name": "mine"}, 400)["error"]
    assert "disk_cache" in error["message"]
    client("POST", "conversations", {"snapshot": "mine"}, 400)


@pytest.mark.parametrize("path", ["/conv-1/append", "/conv-1/fork", "/conv-1/snapshot"])
def test_openais_name_says_where_they_are(url: str, path: str) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = httpx.request(method, f"{url}/v1/conversations{path}", json={})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            "unknown_url",
        )
        assert error["message"].endswith(f"; Quire's own conversations are at /quire/conversations{path}")
    assert httpx.head(f"{url}/v1/conversations{path}").status_code == 404
