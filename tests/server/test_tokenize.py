"""`/tokenize` counts what a chat asks; both routes of tokens know the model's name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import families
from support.at_length import at_length

from quire import LLM

WORDS = st.text("abc <>\n\u00e9", min_size=1, max_size=12)
CONTENT = WORDS | st.lists(WORDS.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "server:time", "description": "The time."},
        "cache_control": {"type": "ephemeral"},
    },
]


def said(role: str, **more: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"role": st.just(role), "content": CONTENT}, optional=more)


TURNS = st.lists(
    said("user")
    | said("assistant", reasoning_content=WORDS)
    | said("assistant", tool_calls=st.just([CALL]))
    | said("tool", tool_call_id=st.just(CALL["id"])),
    max_size=4,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "tools": st.sampled_from([TOOLS, TOOLS[:1], []]),
    "tool_choice": st.sampled_from(["auto", "none"]),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans()}),
    "enable_thinking": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "add_special_tokens": st.booleans(),
    "model": st.just("embedded"),
}
BODIES = st.builds(
    lambda first, turns, fields: {"messages": [*first, *turns], **fields},
    st.lists(said("system"), max_size=1),
    st.builds(lambda turns, last: [*turns, last], TURNS, said("user")),
    st.fixed_dictionaries({}, optional=FIELDS),
)


def check_law(url: str, num_examples: int) -> None:
    client = httpx.Client(base_url=url, timeout=60)
    counted: list[int] = []

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(BODIES)
    def check(body: dict[str, Any]) -> None:
        asked = client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        told = client.post("/tokenize", json=body)
        assert told.status_code == asked.status_code, (body, told.text, asked.text)
        if told.status_code == 200:
            count = told.json()["count"]
            assert count == len(told.json()["tokens"]) == asked.json()["usage"]["prompt_tokens"], body
            counted.append(count)
        else:
            assert told.json()["error"] == asked.json()["error"]

    with client:
        check()
    assert counted


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_chat_has_as_many_tokens_as_it_asks(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", families.FAMILIES[name].template)
    check_law(url, 12)


@pytest.mark.ci
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_chat_has_as_many_tokens_as_it_asks_at_length(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", families.FAMILIES[name].template)
    check_law(url, at_length(200))


def test_tools_and_thoughts_are_counted(url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", families.FAMILIES["qwen3"].template)

    def count(**more: Any) -> int:
        body = {"messages": [{"role": "user", "content": "a"}], **more}
        return httpx.post(f"{url}/tokenize", json=body).json()["count"]

    assert count() < count(tools=TOOLS[:1]) < count(tools=TOOLS)
    assert (
        count(chat_template_kwargs={"enable_thinking": False}) > count() > count(add_generation_prompt=False)
    )
    assert count(enable_thinking=False) == count(chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(("path", "body"), [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [5]})])
def test_the_model_is_the_served_one(url: str, path: str, body: dict[str, Any]) -> None:
    assert httpx.post(f"{url}/{path}", json={**body, "model": "embedded"}).status_code == 200
    other = httpx.post(f"{url}/{path}", json={**body, "model": "another"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "more", [{"tools": TOOLS}, {"continue_final_message": True}, {"enable_thinking": False}]
)
def test_what_is_of_chats_is_refused_beside_a_prompt(url: str, more: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/tokenize", json={"prompt": "a", **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(more)))
