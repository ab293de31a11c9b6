"""`/v1/responses` and `/v1/conversations` by the `openai` package, unchanged, on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from quire import LLM
from quire.server.api_keys import ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerLimits, ServerSettings

ASK = {"model": "embedded", "input": "Write a loop.", "max_output_tokens": 8, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [7, 8]}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"]},
    "strict": True,
}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def events_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{url}/v1/responses", json={**body, "stream": True}, timeout=30)
    assert answer.status_code == 200, answer.text
    events = []
    for part in answer.text.split("\n\n"):
        if part.startswith("event: "):
            name, _, data = part.partition("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(url: str, messages: list[dict[str, Any]], **more: Any) -> int:
    answer = httpx.post(f"{url}/tokenize", json={"messages": messages, **more})
    return answer.json()["count"]


def test_an_answer_is_that_of_the_chat(url: str, client: openai.OpenAI) -> None:
    response = client.responses.create(**ASK, instructions="Be brief.", top_p=0.9, extra_body={"seed": 5})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a loop."}]
    chat = client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=8, temperature=0, top_p=0.9, seed=5
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 8
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_the_answer_has_the_types_of_the_client(url: str) -> None:
    body = {
        **ASK, "tools": [TOOL], "tool_choice": "none", "metadata": {"a": "b"}, "truncation": "auto", "user": "u",
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2,
        "reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "service_tier": "auto",
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=30).json()
    found = TypeAdapter(Response).validate_python(answer, strict=False)
    assert found.metadata == {"a": "b"}
    assert found.tools[0].name == "look"
    assert found.tool_choice == "none"
    assert len(found.output[0].content[0].logprobs) == 8
    assert (found.user, found.prompt_cache_key, found.safety_identifier) == ("u", "k", "s")
    again = httpx.get(f"{url}/v1/responses/{found.id}").json()
    assert again == answer


def test_events_come_in_their_order_and_make_the_response(url: str) -> None:
    events = events_of(url, {**ASK, "include": ["message.output_text.logprobs"]})
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    assert [adapter.validate_python(event).sequence_number for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    text = "".join(event["delta"] for event in deltas)
    response = events[-1]["response"]
    assert response["output"] == [events[-2]["item"]]
    assert response["output"][0]["content"][0]["text"] == text == events[-4]["text"]
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert logprobs == response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 8
    assert httpx.get(f"{url}/v1/responses/{response['id']}").json() == response
    whole = httpx.post(f"{url}/v1/responses", json=ASK, timeout=30).json()
    assert whole["output"][0]["content"][0]["text"] == text


def test_a_response_continues_another(url: str, client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, instructions="Be brief.")
    second = client.responses.create(**{**ASK, "input": "Again."}, previous_response_id=first.id)
    third = client.responses.create(**{**ASK, "input": "And again."}, previous_response_id=second.id)
    messages = [
        {"role": "user", "content": "Write a loop."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And again."},
    ]
    assert third.usage.input_tokens == prompt_of(url, messages)  # the instructions are not carried over
    chat = client.chat.completions.create(model="embedded", messages=messages, max_tokens=8, temperature=0)
    assert chat.choices[0].message.content == third.output_text
    # The same path in the tree: all but the last token of the chat's prompt is there.
    assert chat.usage.prompt_tokens_details.cached_tokens == third.usage.input_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens < third.usage.input_tokens_details.cached_tokens
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == [message["content"] for message in messages]
    for item in items:
        TypeAdapter(ResponseItem).validate_python(item.model_dump())
    newest = client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].id == items[-1].id
    assert newest.has_more


def test_items_that_a_client_sends_back_make_the_same_prompt(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, store=False)
    items = [
        {"role": "user", "content": "Write a loop."},
        *first.output,
        {"role": "user", "content": "Again."},
    ]
    second = client.responses.create(**{**ASK, "input": items})
    stored = client.responses.create(**ASK)
    other = client.responses.create(**{**ASK, "input": "Again."}, previous_response_id=stored.id)
    assert (second.output_text, second.usage.input_tokens) == (other.output_text, other.usage.input_tokens)
    reference = {"type": "item_reference", "id": stored.output[0].id}
    items = [{"role": "user", "content": "Write a loop."}, reference, {"role": "user", "content": "Again."}]
    third = client.responses.create(**{**ASK, "input": items})
    assert third.usage.input_tokens == other.usage.input_tokens


@pytest.mark.parametrize("more", [{"store": False}, {}])
def test_a_lost_response_is_not_found(client: openai.OpenAI, more: dict[str, Any]) -> None:
    lost = client.responses.create(**ASK, **more).id
    if not more:
        client.responses.delete(lost)
    calls: list[Callable[[], Any]] = [
        lambda: client.responses.retrieve(lost),
        lambda: client.responses.delete(lost),
        lambda: client.responses.cancel(lost),
        lambda: client.responses.input_items.list(lost),
        lambda: client.responses.create(**ASK, previous_response_id=lost),
        lambda: client.responses.create(**ASK, previous_response_id="resp_" + "0" * 32),
        lambda: client.responses.create(**ASK, previous_response_id="../../etc/passwd"),
        lambda: client.responses.create(**ASK, conversation="conv_1"),
        lambda: client.conversations.retrieve("conv_" + "0" * 32),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="store: false, dropped for newer ones") as caught:
            call()
        assert caught.value.code.endswith("not_found")
    assert caught.value.type == "invalid_request_error"


def test_only_an_answer_that_has_ended_is_there(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="close the connection"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="its events are not sent again"):
        client.responses.retrieve(made.id, stream=True)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(**{**ASK, "max_output_tokens": 64}) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    schema = {"format": {"type": "json_schema", "name": "age", "schema": SCHEMA}}
    with client.responses.stream(**{**ASK, "max_output_tokens": 64}, text=schema) as stream:
        final = stream.get_final_response()
    assert texts
    assert final.status == "completed"
    assert json.loads(final.output_text)["age"] in (7, 8)


def test_parsed_answers(client: openai.OpenAI) -> None:
    class Age(pydantic.BaseModel):
        years: bool

    found = client.responses.parse(**{**ASK, "max_output_tokens": 64}, text_format=Age)
    assert isinstance(found.output_parsed, Age)
    assert found.text.format.type == "json_schema"
    plain = client.responses.create(
        **{**ASK, "max_output_tokens": 64}, text={"format": {"type": "json_object"}}
    )
    assert plain.output_text.startswith("{")


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
    ],
)
def test_a_call_that_is_asked_for_and_its_output(client: openai.OpenAI, choice: Any) -> None:
    other = {**TOOL, "name": "other"}
    body = {**ASK, "max_output_tokens": 64, "tools": [TOOL, other] if choice != "required" else [TOOL]}
    response = client.responses.create(**body, tool_choice=choice)
    [call] = response.output
    assert (call.type, call.name, call.status) == ("function_call", "look", "completed")
    assert json.loads(call.arguments)["at"] in ("a", "b")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Nothing there."}
    after = client.responses.create(**{**body, "input": [output]}, previous_response_id=response.id)
    assert after.usage.input_tokens > response.usage.input_tokens
    listed = client.responses.input_items.list(after.id, order="asc").data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    texts = {**output, "output": [{"type": "input_text", "text": "Nothing there."}]}
    again = client.responses.create(**{**body, "input": [texts]}, previous_response_id=response.id)
    assert again.usage.input_tokens == after.usage.input_tokens
    streamed = list(client.responses.create(**body, tool_choice=choice, stream=True))
    kinds = [event.type.removeprefix("response.") for event in streamed]
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert streamed[-1].response.output[0].arguments == streamed[-3].arguments


def test_a_long_history_is_cut_or_refused(url: str, llm: LLM, client: openai.OpenAI) -> None:
    turn = "x = 1\n" * 200
    items = [
        {"role": role, "content": f"{number} {turn}"} for number in range(6) for role in ("user", "assistant")
    ]
    items += [{"role": "user", "content": "Short."}]
    body = {**ASK, "input": items, "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**body)
    assert caught.value.code == "context_length_exceeded"
    response = client.responses.create(**body, truncation="auto")
    num_tokens = response.usage.input_tokens
    assert num_tokens <= llm.max_model_len - 8
    for first in range(len(items)):
        messages = [{"role": "system", "content": "Be brief."}, *items[first:]]
        if prompt_of(url, messages) <= llm.max_model_len - 8:
            break
    assert num_tokens == prompt_of(url, messages)
    assert first > 0
    counted = client.responses.input_tokens.count(
        model="embedded", input=items, instructions="Be brief.", truncation="auto"
    )
    assert counted.input_tokens == num_tokens
    assert len(list(client.responses.input_items.list(response.id))) == len(items)


def test_a_history_is_cut_before_a_question_where_the_template_wants_one_first(
    llm: LLM, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = """{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}
    {%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"""
    monkeypatch.setattr(llm.tokenizer, "chat_template", strict)
    turn = "x = 1\n" * 150
    for more in range(4):  # one of these histories fits first where an answer begins it
        items = [
            {"role": role, "content": turn + "y" * 400 * more}
            for _ in range(5)
            for role in ("user", "assistant")
        ]
        items += [{"role": "user", "content": "Short."}]
        response = client.responses.create(**{**ASK, "input": items}, truncation="auto")
        assert response.usage.input_tokens <= llm.max_model_len - 8


def test_a_conversation(url: str, client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[{"role": "user", "content": "Hi."}], metadata={"a": "b"})
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    response = client.responses.create(**ASK, conversation=made.id)
    assert response.conversation.id == made.id
    streamed = list(client.responses.create(**{**ASK, "input": "Again."}, conversation=made.id, stream=True))
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert [item.content[0].text for item in items[2::2]] == [
        response.output_text, streamed[-1].response.output[0].content[0].text,
    ]  # fmt: skip
    messages = [{"role": item.role, "content": item.content[0].text} for item in items[:-1]]
    assert streamed[-1].response.usage.input_tokens == prompt_of(url, messages)
    added = client.conversations.items.create(
        made.id, items=[{"role": "user", "content": "More."}, {"role": "user", "content": "More."}]
    )
    assert len({item.id for item in [*items, *added.data]}) == 7
    one = client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert one.content[0].text == "More."
    client.conversations.items.delete(one.id, conversation_id=made.id)
    assert len(list(client.conversations.items.list(made.id))) == 6
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(one.id, conversation_id=made.id)
    with pytest.raises(openai.BadRequestError, match="conversation"):
        client.responses.create(**ASK, previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="got both"):
        client.responses.create(**ASK, previous_response_id=response.id, conversation=made.id)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_a_record_is_found_by_its_tenant_alone(llm: LLM, serve: Callable[..., Any]) -> None:
    keys = KeyRing([(digest_of_key(name), ApiTenant(name)) for name in ("ada", "bob")])
    with serve(ServerSettings(keys=keys)) as (url, _):
        ada, bob = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=name, max_retries=0) for name in ("ada", "bob")
        )
        made, talk = ada.responses.create(**ASK), ada.conversations.create()
        assert ada.responses.retrieve(made.id).id == made.id
        for call in (
            lambda: bob.responses.retrieve(made.id),
            lambda: bob.responses.delete(made.id),
            lambda: bob.responses.create(**ASK, previous_response_id=made.id),
            lambda: bob.responses.create(
                **{**ASK, "input": [{"type": "item_reference", "id": made.output[0].id}]}
            ),
            lambda: bob.conversations.retrieve(talk.id),
            lambda: bob.responses.create(**ASK, conversation=talk.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


def test_the_records_of_a_tenant_are_bounded(llm: LLM, serve: Callable[..., Any]) -> None:
    with serve(ServerSettings(limits=ServerLimits(max_records=3, max_record_bytes=20_000))) as (url, app):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        ids = [client.responses.create(**ASK).id for _ in range(3)]
        last = client.responses.create(**ASK, previous_response_id=ids[0])  # which is used again by that
        assert client.responses.retrieve(ids[0]).id == ids[0]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[1])
        with pytest.raises(openai.BadRequestError, match="max_record_bytes"):
            client.responses.create(**{**ASK, "input": "x" * 25_000, "truncation": "auto"})
        with pytest.raises(openai.BadRequestError, match="max_record_bytes"):
            client.conversations.create(items=[{"role": "user", "content": "x" * 25_000}])
        assert client.responses.retrieve(last.id).id == last.id
        app.state.service.records.check()


def test_a_failure_of_the_engine_is_the_last_event(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.engine import runner

    def run(self: Any, step: Any) -> Any:
        raise RuntimeError("no more of this")

    monkeypatch.setattr(runner.Runner, "run", run)
    events = events_of(url, ASK)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "no more of this" not in json.dumps(events)
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    monkeypatch.undo()
    assert httpx.get(f"{url}/v1/responses/{failed['id']}").status_code == 404
    assert httpx.post(f"{url}/v1/responses", json=ASK, timeout=30).status_code == 200


def test_the_turn_behind_an_answer_is_prepared_for_a_session(
    url: str, server: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history of several responses, and a conversation, are sessions by themselves."""
    added: list[tuple[str, Any]] = []
    next_turns = server[1].state.service.next_turns
    monkeypatch.setattr(next_turns, "add", lambda tenant, session, turn: added.append((session, turn)))
    first = client.responses.create(**ASK)
    assert not added
    second = client.responses.create(**ASK, previous_response_id=first.id)
    client.responses.create(**ASK, previous_response_id=second.id, stream=False)
    client.responses.create(**ASK, prompt_cache_key="key")
    list(
        client.responses.create(
            **ASK, extra_headers={"X-Session-Id": "named"}, prompt_cache_key="key", stream=True
        )
    )
    talk = client.conversations.create()
    client.responses.create(**ASK, conversation=talk.id)
    assert [session for session, _ in added] == [first.id, first.id, "key", "named", talk.id]
    turn = added[0][1]
    assert [message.role for message in turn.messages] == ["user", "assistant", "user"]
    assert (turn.answer.role, turn.answer.content) == ("assistant", second.output_text)
