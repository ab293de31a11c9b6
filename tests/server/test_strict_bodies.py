"""No route ignores a field: unknown fields are refused by name, and one list names the fields without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai.types.chat as of_openai
import pytest
from pydantic import BaseModel

from quire import LLM
from quire.server.schemas.accepted import accepted_fields
from quire.server.schemas.chat_bodies import ChatMessage, ContentPart, Function, FunctionCall, Tool, ToolCall
from quire.server.schemas.unserved import OneOf

UNKNOWN = "nobody_knows_it"
DOCS = Path(__file__).parents[2] / "docs" / "server.md"
CHAT = {"messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 8, "temperature": 0}


class Spec:
    """An OpenAPI description: the bodies of its routes."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._described = described

    def bodies(self) -> Iterator[tuple[str, str, Any]]:
        """(method, path, schema) of each route that takes one."""
        for path, methods in self._described["paths"].items():
            for method, route in methods.items():
                if "requestBody" in route:
                    (content,) = route["requestBody"]["content"].values()
                    yield method, re.sub(r"\{[^}]*\}", "x", path), content["schema"]

    def _whole(self, schema: Any) -> Any:
        if "$ref" in schema:
            return self._described["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def smallest(self, schema: Any) -> Any:
        schema = self._whole(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        for kind in ("anyOf", "oneOf"):
            if kind in schema:
                return self.smallest(schema[kind][0])
        kind = schema.get("type")
        if kind == "array":
            return [self.smallest(schema["items"])] if schema.get("minItems") else []
        if kind == "object":
            names = dict.fromkeys(schema.get("required", ()))
            if "const" in schema.get("properties", {}).get("type", {}):  # tells the members of a union apart
                names["type"] = None
            return {name: self.smallest(schema["properties"][name]) for name in names}
        return {"string": "a", "boolean": False, "integer": 1, "number": 1}.get(kind)

    def with_an_unknown_field(self, schema: Any) -> Iterator[tuple[Any, str]]:
        """(value, place of the field) for each object that there is in it."""
        schema = self._whole(schema)
        for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self.with_an_unknown_field(one)
        if schema.get("type") == "array":
            for value, place in self.with_an_unknown_field(schema["items"]):
                yield [value], f"0.{place}"
        if "properties" in schema:
            own = self.smallest(schema)
            yield {**own, UNKNOWN: 1}, UNKNOWN
            for name, inner in schema["properties"].items():
                for value, place in self.with_an_unknown_field(inner):
                    yield {**own, name: value}, f"{name}.{place}"


def test_no_route_ignores_a_field(url: str) -> None:
    """The law, over all that is described: at the top of each body, and in each object within one."""
    spec = Spec(httpx.get(f"{url}/openapi.json").json())
    places: set[tuple[str, str]] = set()
    with httpx.Client(base_url=url, timeout=30) as client:
        for method, path, schema in spec.bodies():
            for body, place in spec.with_an_unknown_field(schema):
                answer = client.request(method, path, json=body)
                assert answer.status_code == 400, (path, body, answer.text)
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == (place, "unknown_field"), (path, body, error)
                assert f"`{place}`" in error["message"]
                places.add((path, place))
    for path in ("/v1/completions", "/tokenize", "/detokenize", "/admin/pins"):
        assert (path, UNKNOWN) in places
    for place in (
        "input.0.",
        "input.0.content.0.",
        "input.0.summary.0.",
        "tools.0.",
        "text.format.",
        "tool_choice.",
    ):
        assert ("/v1/responses", place + UNKNOWN) in places
    for place in (
        "messages.0.",
        "messages.0.content.0.",
        "messages.0.tool_calls.0.function.",
        "tools.0.function.",
    ):
        assert {("/v1/chat/completions", place + UNKNOWN), ("/tokenize", place + UNKNOWN)} <= places


def test_the_list_of_accepted_fields_is_in_the_docs() -> None:
    rows: dict[tuple[str, str], list[str]] = {}
    for place, name, done in accepted_fields():
        rows.setdefault((name, done), []).append(place or "the body")
    table = "".join(f"| `{name}` | {', '.join(where)} | {done} |\n" for (name, done), where in rows.items())
    assert f"|---|---|---|\n{table}\n" in DOCS.read_text(), f"expected in docs/server.md:\n{table}"


VALUES: dict[str, Any] = {
    "metadata": {"a": "b"}, "store": True, "cache_prompt": False, "id_slot": 3, "keep_alive": 0,
    "timings_per_token": True, "return_progress": True, "spaces_between_special_tokens": True,
    "parallel_tool_calls": True, "vl_high_resolution_images": True, "index": 5, "verbosity": "high",
}  # fmt: skip


def test_accepted_fields_change_no_answer(url: str, llm: LLM) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": [{"type": "text", "text": "So:"}], "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "f"}}
    plain = {**CHAT, "messages": [message, *CHAT["messages"]], "tools": [tool], "return_token_ids": True}

    def answered(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        return told["prompt_token_ids"], told["choices"][0]["token_ids"]

    expected, everything = answered(plain), plain
    for place, name, _ in accepted_fields():
        way = place.replace("[]", ".0").split(".") if place else []
        everything = with_value(everything, way, name, VALUES.get(name, "some"))
    assert answered(everything) == expected


def with_value(body: Any, way: list[str], name: str, value: Any) -> Any:
    if not way:
        return {**body, name: value}
    step, *rest = way
    if isinstance(body, list):
        inner = with_value(body[int(step)], rest, name, value)
        return [inner, *body[1:]]
    return {**body, step: with_value(body[step], rest, name, value)}


@pytest.mark.parametrize(
    ("model", "others"),
    [
        (ChatMessage, [name for name in dir(of_openai) if name.endswith("MessageParam")]),
        (ContentPart, [name for name in dir(of_openai) if "ContentPart" in name and "Image" not in name]),
        (ToolCall, ["ChatCompletionMessageFunctionToolCallParam"]),
        (Tool, ["ChatCompletionFunctionToolParam"]),
    ],
)
def test_every_field_of_openais_messages_and_tools_is_known(
    model: type[BaseModel], others: list[str]
) -> None:
    for name in others:
        given = set(getattr(getattr(of_openai, name), "__annotations__", ()))
        assert given <= set(model.model_fields), name


def test_every_field_of_openais_functions_is_known() -> None:
    from openai.types.shared_params import FunctionDefinition

    assert set(FunctionDefinition.__annotations__) <= set(Function.model_fields)
    assert set(of_openai.ParsedFunction.model_fields) <= set(FunctionCall.model_fields)
    assert set(of_openai.ParsedChatCompletionMessage.model_fields) <= set(ChatMessage.model_fields)


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "images are not supported"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "audio is not supported"),
        ({"type": "video_url", "video_url": {"url": "http://x/y.mp4"}}, "videos are not supported"),
        ({"type": "file", "file": {"file_id": "f"}}, "files are not supported"),
    ],
)
def test_parts_without_text_are_refused_by_their_kind(url: str, part: dict[str, Any], refusal: str) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
    error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
    name = part["type"]
    assert error["message"] == f"{refusal}: this server reads text - in `messages.0.content.0.{name}`"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/completions", {"prompt": [2**31 - 1]}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "x", "prompt_logprobs": 99}, 400, "invalid_value"),
        ("POST", "/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "invalid_value"),
        ("POST", "/v1/chat/completions", {**CHAT, "logit_bias": {"99999999": 1}}, 400, "invalid_value"),
        ("POST", "/v1/chat/completions", {**CHAT, "temperature": 9}, 400, "invalid_body"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ("GET", "/window/no-such-file", None, 404, "no_such_file"),
    ],
)
def test_every_error_has_a_code(url: str, method: str, path: str, body: Any, status: int, code: str) -> None:
    answer = httpx.request(method, f"{url}{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_an_error_names_the_field_of_the_request(url: str) -> None:
    body = {**CHAT, "min_tokens": 20}
    body |= {"max_completion_tokens": 10, "max_tokens": None}
    message = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]["message"]
    assert message == "expected min_tokens of at most max_completion_tokens 10, got 20 - in `min_tokens`"


# Beside OpenAI's and vLLM's (test_fields.py): of llama.cpp, Ollama, OpenRouter, DashScope and Open WebUI.
OF_CLIENTS = """
cache_prompt id_slot min_p repeat_penalty repeat_last_n n_predict n_keep n_probs return_progress
timings_per_token samplers dynatemp_range xtc_probability dry_multiplier mirostat typical_p tfs_z lora grammar
json_schema keep_alive options format num_ctx num_predict think thinking thinking_budget enable_thinking
reasoning reasoning_effort reasoning_format provider models route transforms plugins usage extra_body
vl_high_resolution_images
"""


def test_a_field_that_clients_send_is_done_or_refused_with_what_to_do(url: str) -> None:
    from quire.server.schemas.chat_bodies import ChatRequest

    served = {"min_p", "enable_thinking", "reasoning_effort"}
    accepted = {name for place, name, _ in accepted_fields() if not place}
    for name in OF_CLIENTS.split():
        if name in served | accepted:
            assert name in ChatRequest.model_fields
            continue
        answer = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, name: {"a": 1}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        if name != "json_schema":  # of completions alone
            (only,) = [one for one in ChatRequest.model_fields[name].metadata if isinstance(one, OneOf)]
            assert only.reason in answer.json()["error"]["message"]
