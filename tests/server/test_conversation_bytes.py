"""The size of a tenant's conversations: they keep what a template reads, within a total number of bytes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant
from quire.server.conversation_store import ConversationEntry, Conversations
from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.settings import ServerLimits, ServerSettings

ANN, BOB = ApiTenant("ann"), ApiTenant("bob")


class State:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return self.num_tokens

    def close(self) -> None:
        pass


def talk(*contents: Any, num_tokens: int = 0) -> ConversationEntry:
    messages = [ChatMessage.model_validate({"role": "user", "content": content}) for content in contents]
    state: Any = State(num_tokens)
    return ConversationEntry(state, None, messages)


def test_content_is_kept_in_its_parts_without_what_changes_nothing() -> None:
    parts = [
        {"type": "text", "text": "a", "annotations": [[]] * 1000},
        {"type": "text", "text": "b"},
    ]
    first, *others = talk(parts, "c", None).first
    assert [message.content for message in others] == ["c", None]
    assert isinstance(first.content, list)
    assert [(part.text, part.annotations) for part in first.content] == [("a", None), ("b", None)]
    assert talk([{"type": "text", "text": ""}] * 100).num_bytes > 100_000


def test_bytes_of_one_tenant_are_bounded_and_come_back() -> None:
    conversations = Conversations(100, 100_000)
    first = conversations.add(ANN, talk("x" * 40_000, num_tokens=1000))
    assert 44_000 < first.num_bytes < 50_000
    second = conversations.add(ANN, talk("x" * 40_000))
    for refused in (
        lambda: conversations.add(ANN, talk("x" * 40_000)),
        lambda: conversations.check_bytes(ANN, 20_000),
    ):
        with pytest.raises(ApiError) as error:
            refused()
        assert (error.value.status, error.value.code) == (429, "conversations_full")
    conversations.check_bytes(ANN, 5_000)
    conversations.add(BOB, talk("x" * 90_000))
    conversations.remove(ANN, second.id)
    conversations.add(ANN, talk("x" * 40_000))
    assert len(conversations) == 3
    assert talk(*["a"] * 100).num_bytes > 100_000  # objects count, however little is in them


def test_over_http(serve) -> None:
    with serve(ServerSettings(limits=ServerLimits(max_conversation_bytes=11_000))) as (url, _):

        def post(path: str, body: Any) -> Any:
            answer = httpx.post(f"{url}/quire/conversations{path}", json=body)
            code = answer.json().get("error", {}).get("code")
            return answer.status_code, code, answer.json().get("id")

        status, _, name = post("", {"tokens": [5] * 1000})
        assert status == 201
        assert post(f"/{name}/append", {"tokens": [5] * 500, "generate": False})[0] == 200
        turn = {"tokens": [5] * 400, "generate": False}
        assert post(f"/{name}/append", turn)[:2] == (429, "conversations_full")
        assert post(f"/{name}/append", {"tokens": [5] * 400, "max_tokens": 1})[:2] == (
            429,
            "conversations_full",
        )
        assert post(f"/{name}/fork", {})[:2] == (429, "conversations_full")
        assert post("", {"tokens": [5] * 1000})[:2] == (429, "conversations_full")
        assert httpx.delete(f"{url}/quire/conversations/{name}").status_code == 200
        assert post("", {"tokens": [5] * 1000})[0] == 201
