"""Which thoughts a prepared turn expects back: each API's clients repeat an answer in their own way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import families
from support.agents_script import THOUGHT, Answer, tokens
from support.running_server import running
from support.scripted_serve import Script, runner_of
from support.until import until

from quire.engine import runner
from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.service import Service
from quire.server.settings import ServerSettings

ASKED = "What is it? [mark]"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    """Its model thinks, and its chat template shows all earlier thoughts."""
    words = families.tokenizer("qwen3")
    answer = tokens(words, Answer("It is so."), lambda tool, arguments: {})
    script = Script({"answers": {"[mark]": [answer] * 100}, "tool": "", "else": []}, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Runner", runner_of(script))
        with families.llm("qwen3") as llm, running(llm, ServerSettings()) as (url, app):
            yield url, app.state.service  # type: ignore[attr-defined]


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prepared(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[list[ChatMessage]]:
    """The messages of each turn that is prepared from now on."""
    seen: list[list[ChatMessage]] = []
    render = service.render

    async def seen_render(messages: Any, *rest: Any, **more: Any) -> str:
        if str(messages[-1].content).startswith("turn-"):
            seen.append(list(messages))
        return await render(messages, *rest, **more)

    monkeypatch.setattr(service, "render", seen_render)
    return seen


def thought_of_last(seen: list[list[ChatMessage]], service: Service) -> str | None:
    until(lambda: service.next_turns.is_done)
    return seen[-1][-2].reasoning_content


USER = {"role": "user", "content": ASKED}
WITH_THOUGHT = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
BLOCKS = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."}],
}
PLAIN = {"role": "assistant", "content": "So."}
ITEM = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


@pytest.mark.parametrize(
    ("path", "body", "is_back"),
    [
        ("chat/completions", {"messages": [USER]}, False),
        ("chat/completions", {"messages": [USER, PLAIN, USER]}, False),
        ("chat/completions", {"messages": [USER, WITH_THOUGHT, USER]}, True),
        ("messages", {"messages": [USER]}, True),
        ("messages", {"messages": [USER, PLAIN, USER]}, False),
        ("messages", {"messages": [USER, BLOCKS, USER]}, True),
        ("responses", {"input": [USER]}, True),
        ("responses", {"input": [USER, PLAIN, USER], "store": False}, False),
        ("responses", {"input": [USER, ITEM, PLAIN, USER], "store": False}, True),
    ],
)
def test_each_api_has_its_rule(
    server: tuple[str, Service],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    is_back: bool,
) -> None:
    url, service = server
    seen = prepared(service, monkeypatch)
    length = {"max_output_tokens": 60} if path == "responses" else {"max_tokens": 60}
    post(url, path, {**body, **length, "temperature": 0, "session_id": f"{path} {body}"[:250]})
    assert thought_of_last(seen, service) == (THOUGHT if is_back else None)


def test_a_history_of_the_server_has_its_thoughts(
    server: tuple[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind answers without any; and the next prompt is found up to its new text."""
    url, service = server
    seen = prepared(service, monkeypatch)
    body = {"max_output_tokens": 60, "temperature": 0, "instructions": "Be kind."}
    first = post(url, "responses", {**body, "input": [USER, PLAIN, USER]})
    second = post(url, "responses", {**body, "input": [USER], "previous_response_id": first["id"]})
    assert thought_of_last(seen, service) == THOUGHT
    third = post(url, "responses", {**body, "input": [USER], "previous_response_id": second["id"]})
    usage = third["usage"]
    words = families.tokenizer("qwen3")
    num_new = len(words(f"{ASKED}<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] <= num_new + 1


def test_a_prompt_without_an_answer_has_no_next_turn(
    server: tuple[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = server
    added: list[Any] = []
    monkeypatch.setattr(service.next_turns, "add", lambda *turn: added.append(turn))
    session = {"session_id": "warmed"}
    post(url, "chat/completions", {"messages": [USER], "max_tokens": 0, **session})
    post(url, "messages", {"messages": [USER], "max_tokens": 0, **session})
    post(url, "responses", {"input": ASKED, "max_output_tokens": 0, **session})
    assert not added
