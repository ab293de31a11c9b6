"""Items of responses: from a model's text, whole or streamed, and back to the messages of a chat."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import openai.types.responses.response_create_params as create_params
import openai.types.responses.response_includable as includable
import openai.types.responses.response_input_item_param as input_items
import openai.types.responses.tool_param as tool_params
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import (
    ResponseItem,
    ResponseStreamEvent,
    input_token_count_params,
    response_retrieve_params,
)
from openai.types.shared_params.reasoning import Reasoning
from pydantic import TypeAdapter, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from quire.server.api_errors import ApiError
from quire.server.outputs.output_format import OutputFormat
from quire.server.outputs.reasoning import ReasoningFormat
from quire.server.outputs.tool_call_format import ToolCallFormat
from quire.server.response_input import messages_of_items, parsed_items, stored_item
from quire.server.response_output import OutputItems
from quire.server.schemas.common import SamplingBody
from quire.server.schemas.response_bodies import (
    REFUSED_TOOLS,
    FunctionTool,
    PromptOfResponse,
    ReasoningConfig,
    ResponseRequest,
    TextConfig,
)
from quire.server.schemas.response_items import REFUSED_ITEMS, REFUSED_PARTS
from quire.server.schemas.unserved import OneOf

FORMAT = OutputFormat(calls=ToolCallFormat(), thoughts=ReasoningFormat("<think>", "</think>"))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b c"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "f", "arguments": {"a": "b'
TEXTS = (
    "Plain text.", "", " \n", f"<think>\nI think.\n</think>\n\nSo: {CALL}", f"{CALL}\n{OTHER}", f"Now {CALL} and then",
    "<think>Only this", "<think>a</think>", f"<think>a</think>{CUT}", f"Text {CUT}", f"\n\n{CALL}", f"{CUT}\n{OTHER}",
)  # fmt: skip
events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def written(
    pieces: list[str], reason: str = "stop", **options: Any
) -> tuple[OutputItems, list[dict[str, Any]]]:
    items = OutputItems(FORMAT, "0" * 32, **options)
    found: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        found += items.push(piece, [number], [{number: -0.5}], reason if is_last else None)
    return items, found


def comparable(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "call_id": None} if "call_id" in item else item for item in items]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_events_of_an_answer_describe_its_items(text: str, reason: str) -> None:
    whole, _ = written([text], reason)
    items, found = written([*text] or [""], reason)
    assert comparable(items.items) == comparable(whole.items)
    built: list[dict[str, Any]] = []
    for number, event in enumerate(found):
        events.validate_python({**event, "sequence_number": number})
        kind, at = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert at == len(built)
            built.append(json.loads(json.dumps(event["item"])))
            continue
        assert at == len(built) - 1  # one item at a time
        if kind == "content_part.added":
            built[at]["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            built[at]["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            built[at]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == built[at]["arguments"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == built[at]["content"][0]["text"]
        elif kind == "output_item.done":
            assert event["item"] == items.items[at] == {**built[at], "status": event["item"]["status"]}
    statuses = [item["status"] for item in items.items]
    assert "in_progress" not in statuses
    for item in items.items:
        TypeAdapter(ResponseItem).validate_python(item)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("Plain text.", "stop", ["message completed"]),
        ("Plain text.", "length", ["message incomplete"]),
        ("", "stop", ["message completed"]),
        (" \n", "length", ["message incomplete"]),
        ("<think>Only this", "length", ["reasoning incomplete"]),
        ("<think>a</think>", "stop", ["reasoning completed", "message completed"]),
        (f"\n\n{CALL}\n", "stop", ["function_call completed"]),
        (
            f"<think>a</think>b {CALL}{OTHER}", "stop",
            ["reasoning completed", "message completed", "function_call completed", "function_call completed"],
        ),
        (f"Text {CUT}", "length", ["message completed", "function_call incomplete"]),
        (f"Text {CUT}", "stop", ["message completed", "function_call incomplete"]),
        (f"{CALL} and then", "stop", ["function_call completed", "message completed"]),
    ],
)  # fmt: skip
def test_the_items_of_an_answer(text: str, reason: str, expected: list[str]) -> None:
    items, _ = written([*text] or [""], reason)
    assert [f"{item['type']} {item['status']}" for item in items.items] == expected


def test_one_call_alone_where_the_client_wants_no_more() -> None:
    items, _ = written([f"{CALL}{OTHER}"], one_call=True)
    assert [item["name"] for item in items.items] == ["f"]


def test_reasoning_is_counted_and_returned_for_clients_without_content() -> None:
    items, _ = written(["<think>", "a", "b", "</think>", "c"], with_encrypted=True)
    assert items.num_reasoning_tokens == 3
    [thought, _] = items.items
    sent = {name: value for name, value in thought.items() if name != "content"}
    [message] = messages_of_items(parsed_items([sent, {"role": "assistant", "content": "c"}]))
    assert (message.reasoning_content, message.content) == ("ab", "c")
    for wrong in ("gAAAAAB", "quire1:!!", "quire1:/w=="):
        with pytest.raises(ApiError) as caught:
            messages_of_items(parsed_items([{**sent, "encrypted_content": wrong}]))
        assert caught.value.param == "input.0.encrypted_content"


def test_log_probabilities_are_those_of_the_text() -> None:
    def logprobs(token_ids: Any, entries: Any) -> list[dict[str, Any]]:
        return [
            {"token": token, "logprob": entry[token]} for token, entry in zip(token_ids, entries, strict=True)
        ]

    items, found = written(["<think>", "a", "</think>", "b", "c", CALL], logprobs=logprobs)
    part = items.items[1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == [2, 3, 4]
    deltas = [event["logprobs"] for event in found if event["type"].endswith("output_text.delta")]
    assert list(itertools.chain(*deltas)) == part["logprobs"]


@pytest.mark.parametrize("text", [text for text in TEXTS if CUT not in text])
def test_the_items_of_an_answer_are_one_message_again(text: str) -> None:
    items, _ = written([*text] or [""])
    asked = {
        "id": "msg_1",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    messages = messages_of_items(parsed_items([asked, *items.items, asked]))
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    answer = messages[1]
    kinds = [item["type"] for item in items.items]
    assert (answer.reasoning_content is not None) == ("reasoning" in kinds)
    texts = [item["content"][0]["text"] for item in items.items if item["type"] == "message"]
    assert answer.content == ("".join(texts) if texts else None)
    calls = [item for item in items.items if item["type"] == "function_call"]
    assert [(call.id, call.function.name, call.function.arguments) for call in answer.tool_calls or ()] == [
        (call["call_id"], call["name"], call["arguments"]) for call in calls
    ]


ITEMS = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": st.text(max_size=5)}
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": st.text(max_size=5)})),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("reasoning"),
            "summary": st.just([]),
            "content": st.lists(
                st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": st.text(max_size=5)}), max_size=2
            ),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": st.just("a"), "name": st.just("f"), "arguments": st.text()}
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": st.sampled_from("ab"), "output": st.text(max_size=5)}
    ),
)  # fmt: skip


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(ITEMS, max_size=8))
def test_stored_items_make_the_same_messages(items: list[dict[str, Any]]) -> None:
    given_items = parsed_items(items)
    stored = [stored_item(item, f"x_{number}") for number, item in enumerate(given_items)]
    assert messages_of_items(parsed_items(stored)) == messages_of_items(given_items)
    assert [stored_item(item, "") for item in parsed_items(stored)] == stored
    num_texts = sum(item.get("type") == "function_call" for item in items)
    assert sum(len(message.tool_calls or ()) for message in messages_of_items(given_items)) == num_texts


# -- laws: each field, item, part and tool of the client's types is known --------------------------------


def names_of(fields: Any) -> set[str]:
    return {field.alias or name for name, field in fields.model_fields.items()}


@pytest.mark.parametrize(
    ("model", "of_client"),
    [
        (ResponseRequest, create_params.ResponseCreateParamsBase),
        (ResponseRequest, create_params.ResponseCreateParamsStreaming),
        (PromptOfResponse, input_token_count_params.InputTokenCountParams),
        (ReasoningConfig, Reasoning),
        (TextConfig, create_params.ResponseTextConfigParam),
        (FunctionTool, tool_params.FunctionToolParam),
    ],
)
def test_every_field_of_the_client_is_known(model: Any, of_client: Any) -> None:
    assert set(get_type_hints(of_client)) <= names_of(model)


def types_of(union: Any) -> dict[str, Any]:
    """The members of a union of typed dictionaries, by type; those without one by their name."""
    found = {}
    for member in get_args(union):
        assert is_typeddict(member)
        kinds = [value for value in _literals(get_type_hints(member).get("type")) if value]
        found |= dict.fromkeys(kinds or [member.__name__], member)
    return found


def _literals(hint: Any) -> list[Any]:
    found = []
    for argument in get_args(hint):
        found += [argument] if isinstance(argument, str) else _literals(argument)
    return found


def test_every_item_of_the_client_is_known_or_refused_by_its_type() -> None:
    known = {"message", "function_call", "function_call_output", "reasoning", "item_reference"}
    kinds = types_of(input_items.ResponseInputItemParam)
    assert set(kinds) == known | set(REFUSED_ITEMS)
    for kind in REFUSED_ITEMS:
        with pytest.raises(ValidationError) as caught:
            ResponseRequest.model_validate({"input": [{"type": kind, "id": "a", "action": {}}]})
        assert caught.value.errors()[-1]["loc"][-1] == "type"
    adapter: TypeAdapter[Any] = TypeAdapter(list[Any])
    full = {
        "message": {"role": "user", "content": "a", "status": "completed", "phase": None},
        "function_call": {
            "call_id": "a", "name": "f", "arguments": "{}", "id": "fc_1", "caller": {"type": "direct"}, "async": False,
            "namespace": None, "status": "completed",
        },
        "function_call_output": {
            "call_id": "a", "output": "b", "id": "x", "caller": None, "name": "f", "namespace": None, "status": None,
        },
        "reasoning": {
            "id": "rs", "summary": [{"type": "summary_text", "text": "a"}], "content": [], "encrypted_content": None,
            "status": "completed",
        },
        "item_reference": {"id": "msg"},
    }  # fmt: skip
    for kind, fields in full.items():
        hints = set(get_type_hints(kinds[kind]))
        assert hints <= {"type", *fields, "id"}, kind
        adapter.validate_python(parsed_items([{"type": kind, **fields}]))


def test_every_part_and_tool_of_the_client_is_known_or_refused_by_its_type() -> None:
    from openai.types.conversations.message import Content
    from openai.types.responses.response_input_content_param import ResponseInputContentParam

    parts = {
        value
        for member in get_args(ResponseInputContentParam)
        for value in _literals(get_type_hints(member)["type"])
    }
    answered = {"text", "summary_text", "reasoning_text", "input_text", "output_text", "refusal"}
    members = {
        value
        for part in get_args(get_args(Content)[0])
        for value in _literals(part.model_fields["type"].annotation)
    }
    assert parts | members <= answered | set(REFUSED_PARTS)
    for kind in REFUSED_PARTS:
        body = {"input": [{"role": "user", "content": [{"type": kind, "image_url": "x"}]}]}
        with pytest.raises(ValidationError) as caught:
            ResponseRequest.model_validate(body)
        assert caught.value.errors()[-1]["loc"][-1] == "type"
    assert set(types_of(tool_params.ToolParam)) <= {"function"} | set(REFUSED_TOOLS)
    for kind in REFUSED_TOOLS:
        for field, value in (("tools", [{"type": kind}]), ("tool_choice", {"type": kind})):
            with pytest.raises(ValidationError) as caught:
                ResponseRequest.model_validate({"input": "a", field: value})
            assert caught.value.errors()[-1]["loc"][-1] == "type"


def test_what_a_response_may_include_is_known_or_refused() -> None:
    served = {"message.output_text.logprobs", "reasoning.encrypted_content"}
    for value in get_args(includable.ResponseIncludable):
        body = {"input": "a", "include": [value]}
        if value in served:
            ResponseRequest.model_validate(body)
        else:
            with pytest.raises(ValidationError):
                ResponseRequest.model_validate(body)
    queried = set(get_type_hints(response_retrieve_params.ResponseRetrieveParamsStreaming))
    assert queried == {"include", "include_obfuscation", "starting_after", "stream"}


def test_a_field_that_is_not_served_takes_what_asks_for_nothing() -> None:
    for name, field in ResponseRequest.model_fields.items():
        served_as = next((part for part in field.metadata if isinstance(part, OneOf)), None)
        if served_as is None:
            continue
        for value in (None, *served_as.values):
            ResponseRequest.model_validate({"input": "a", name: value})
        for value in ({"a": 1}, "some", 7, [[]]):
            with pytest.raises(ValidationError) as caught:
                ResponseRequest.model_validate({"input": "a", name: value})
            assert caught.value.errors()[0]["loc"] == (name,)


def test_fields_of_our_own_are_those_of_a_chat() -> None:
    """A body that is accepted here makes a chat that is accepted."""
    shared = set(ResponseRequest.model_fields) & set(SamplingBody.model_fields) - {
        "metadata",
        "store",
        "stream_options",
    }
    for name in shared:
        own, chats = ResponseRequest.model_fields[name], SamplingBody.model_fields[name]
        if any(type(mark).__name__ in ("Accepted", "OneOf") for mark in own.metadata):
            continue
        assert (own.annotation, repr(own.metadata)) == (chats.annotation, repr(chats.metadata)), name
