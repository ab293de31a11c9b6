"""Each field of `/v1/messages` takes effect or is refused by name: the law from the types of Anthropic's package, and
the effect of fields one by one."""

from __future__ import annotations

import hashlib
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic.types as types
import anthropic.types.beta as beta_types
import httpx
import pytest
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from support import families
from support.running_server import running
from support.state_layers import tiny_model
from support.until import until

from quire import LLM
from quire.errors import ArgumentError
from quire.server.anthropic import messages_bodies
from quire.server.anthropic.messages_bodies import (
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
    OutputConfig,
    PastMessage,
    RequestMetadata,
    ResultBlock,
    ThinkingConfig,
    ToolSelection,
)
from quire.server.schemas.accepted import Accepted
from quire.server.schemas.caching import CacheControl
from quire.server.schemas.strict_body import StrictBody
from quire.server.schemas.unserved import OneOf
from quire.server.settings import ServerLimits, ServerSettings

DOCS = Path(__file__).parents[2] / "docs" / "messages.md"
ASK: dict[str, Any] = {
    "max_tokens": 8,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Write a loop."}],
}
HEADERS = {"betas", "user_profile_id", "workspace_id"}  # the package sends them as headers
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
MODELS = [
    value
    for value in vars(messages_bodies).values()
    if isinstance(value, type) and issubclass(value, StrictBody)
]


def post(url: str, body: dict[str, Any], path: str = "/v1/messages") -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(url: str, body: dict[str, Any], path: str = "/v1/messages") -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def count(url: str, body: dict[str, Any]) -> int:
    fields = {name: body[name] for name in body if name in CountTokensRequest.model_fields}
    return post(url, fields, "/v1/messages/count_tokens")["input_tokens"]


def members(union: Any) -> Iterator[Any]:
    """The TypedDicts of a union of types."""
    if typing.get_args(union):
        for member in typing.get_args(union):
            yield from members(member)
    elif hasattr(union, "__annotations__"):
        yield union


def type_of(kind: Any) -> str | None:
    """The `type` that a TypedDict's values have."""
    found = re.search(r"Literal\[['\"](\w+)['\"]", str(kind.__annotations__.get("type")))
    return found and found[1]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (MessagesRequest, types.message_create_params.MessageCreateParamsStreaming),
        (MessagesRequest, beta_create_params.MessageCreateParamsStreaming),
        (CountTokensRequest, types.MessageCountTokensParams),
        (CountTokensRequest, beta_count_params.MessageCountTokensParams),
        (PastMessage, types.MessageParam),
        (PastMessage, beta_types.BetaMessageParam),
        (ContentBlock, types.TextBlockParam),
        (ContentBlock, types.ThinkingBlockParam),
        (ContentBlock, types.RedactedThinkingBlockParam),
        (ContentBlock, types.ToolUseBlockParam),
        (ContentBlock, types.ToolResultBlockParam),
        (ContentBlock, beta_types.BetaToolUseBlockParam),
        (ContentBlock, beta_types.BetaToolResultBlockParam),
        (ResultBlock, types.TextBlockParam),
        (MessagesTool, types.ToolParam),
        (MessagesTool, beta_types.BetaToolParam),
        (ToolSelection, types.ToolChoiceParam),
        (CacheControl, types.CacheControlEphemeralParam),
        (RequestMetadata, types.MetadataParam),
        (ThinkingConfig, types.ThinkingConfigParam),
        (OutputConfig, types.OutputConfigParam),
    ],
)
def test_every_field_of_anthropics_types_is_known(model: Any, kind: Any) -> None:
    fields = {field.alias or name for name, field in model.model_fields.items()}
    for member in members(kind):
        known = set(member.__annotations__) - HEADERS
        assert known <= fields, (member, known - fields)


BLOCKS = {
    type_of(kind): kind
    for union in (types.ContentBlockParam, beta_types.BetaContentBlockParam)
    for kind in members(union)
    if type_of(kind)
}
SERVED_BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}


def test_every_type_of_block_is_served_or_refused_by_name(url: str) -> None:
    assert set(BLOCKS) > SERVED_BLOCKS
    for kind in set(BLOCKS) - SERVED_BLOCKS:
        block = {"type": kind, "source": {"type": "text"}, "name": "x", "content": []}
        for role in ("user", "assistant"):
            error = refused(url, {**ASK, "messages": [{"role": role, "content": [block]}]})
            assert error["param"] == "messages.0.content.0", (kind, error)
            assert "not supported" in error["message"]


def test_every_type_of_tool_is_served_or_refused_by_name(url: str) -> None:
    kinds = {
        type_of(kind)
        for union in (types.ToolUnionParam, beta_types.BetaToolUnionParam)
        for kind in members(union)
    } - {None, "custom"}
    assert len(kinds) > 15
    for kind in kinds:
        error = refused(url, {**ASK, "tools": [{"type": kind, "name": "x", "max_uses": 5}]})
        assert error["param"] == "tools.0"
        assert str(kind) in error["message"]


def test_a_field_that_is_not_served_takes_what_asks_for_nothing(url: str) -> None:
    places: dict[type, Callable[[dict[str, Any]], dict[str, Any]]] = {
        MessagesRequest: lambda more: {**ASK, **more},
        MessagesTool: lambda more: {**ASK, "tools": [{**TOOL, **more}]},
        ContentBlock: lambda more: {
            **ASK, "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}, **more}]},
                {"role": "user", "content": "x"},
            ],
        },
    }  # fmt: skip
    seen = 0
    for model, place in places.items():
        for name, field in model.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, OneOf):
                    seen += 1
                    for value in (None, *mark.values):
                        model.model_validate(_inner(place({name: value}), model))
                    error = refused(url, place({name: {"some": "thing"}}))
                    assert error["param"].rsplit(".", 1)[-1] == name
                    assert mark.reason in error["message"]
    assert seen >= 15


def _inner(body: dict[str, Any], model: type) -> Any:
    if model is MessagesTool:
        return body["tools"][0]
    return body["messages"][0]["content"][0] if model is ContentBlock else body


def test_fields_that_change_nothing_are_in_the_docs() -> None:
    text = DOCS.read_text()
    names = {
        name
        for model in MODELS
        for name, field in model.model_fields.items()
        if any(isinstance(mark, Accepted) for mark in field.metadata)
    }
    assert names == {"citations", "eager_input_streaming", "budget_tokens", "user_id", "service_tier"}
    for name in names:
        assert f"`{name}`" in text or f".{name}`" in text, name


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stop": ["a"]}, "stop"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),  # it has no reasoning
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "text"}}}},
         "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}},
          "output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "f"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
         "tool_choice.disable_parallel_tool_use"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "strict": True}]}, "tools.0.strict"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 5}, "cache_control"),
        ({"system": [{"type": "thinking", "thinking": "a"}]}, "system.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
         "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "id": "b"}]}]},
         "messages.0.content.0.id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
         "messages.0.content.0.input"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages.0"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a", "cache_control": {"type": "ephemeral"}}]}]},
         "messages.0.content.0.cache_control"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                     "content": [{"type": "image", "source": {}}]}]}]},
         "messages.0.content.0.content.0"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(url: str, more: dict[str, Any], param: str) -> None:
    error = refused(url, {**ASK, **more})
    assert error["param"] == param, error
    assert error["details"] == {"error_code": error["code"]}
    assert param in error["message"]


TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}</>{% endfor %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("more", "prompt"),
    [
        ({}, "<user>a</><assistant>"),
        ({"system": "S"}, "<system>S</><user>a</><assistant>"),
        ({"system": ""}, "<user>a</><assistant>"),
        ({"system": [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]},
         "<system>S\nT</><user>a</><assistant>"),
        ({"system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
                     {"type": "text", "text": "S"}]}, "<system>S</><user>a</><assistant>"),
        ({"system": "x-anthropic-billing-header: cch=1a2b3;\nS"}, "<system>S</><user>a</><assistant>"),
        ({"messages": [USER, {"role": "user", "content": "b"}]}, "<user>a\nb</><assistant>"),
        ({"messages": [USER, {"role": "system", "content": "S"}, USER]},
         "<user>a</><system>S</><user>a</><assistant>"),
        ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "<user>a</><assistant>So"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "<user>a</>thinking=True<assistant>"),
        ({"thinking": {"type": "adaptive"}}, "<user>a</>thinking=True<assistant>"),
        ({"thinking": {"type": "disabled"}}, "<user>a</>thinking=False<assistant>"),
        ({"output_config": {"effort": "low"}}, "<user>a</>thinking=Trueeffort=low<assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>a</>thinking=False<assistant>"),
        ({"tools": [{**TOOL, "description": "d", "input_examples": [{"k": 1}]}]},
         '[f: d\nExamples of its input:\n{"k": 1}]<user>a</><assistant>'),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "<user>a</><assistant>"),
        ({"messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "T", "signature": "from elsewhere"},
                {"type": "redacted_thinking", "data": "zz"},
                {"type": "text", "text": "So", "citations": [{"type": "char_location"}]},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"k": [1, "é"]}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "R"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no file", "is_error": True},
                {"type": "tool_result", "tool_use_id": "3", "content": "error: no file", "is_error": True},
                {"type": "tool_result", "tool_use_id": "4", "is_error": True},
                {"type": "text", "text": "b"},
            ]},
         ]},
         '<user>a</><assistant>(T)Sof{"k": [1, "é"]}</><tool>R</><tool>Error: no file</><tool>error: no file</>'
         "<tool>Error:</><user>b</><assistant>"),
    ],
)  # fmt: skip
def test_the_prompt(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], prompt: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    body = {**ASK, "messages": [USER], **more, "max_tokens": 1}
    expected = llm.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert count(url, body) == len(expected)
    llm.cache.reset()
    chat = httpx.post(f"{url}/v1/completions", json={"prompt": expected, "max_tokens": 1}, timeout=30)
    assert chat.status_code == 200
    usage = post(url, body)["usage"]  # all of it but the last token is the text's that was computed before
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (len(expected) - 1, 1)


def test_a_template_that_opens_thoughts(url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    error = refused(url, {**ASK, "thinking": {"type": "disabled"}})
    assert error["param"] == "thinking.type"
    for kind in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        (block,) = post(url, {**ASK, "thinking": kind})["content"]
        assert block["type"] == "thinking"
        digest = hashlib.sha256(block["thinking"].encode()).hexdigest()
        assert block["signature"] == f"quire.sha256.{digest}"


def test_tool_choice_forces_a_call(url: str) -> None:
    schema = {"type": "object", "properties": {"k": {"enum": [1, 2]}}, "required": ["k"]}
    tools = [{"name": name, "input_schema": schema, "strict": True} for name in ("f", "g")]
    for choice in ({"type": "any"}, {"type": "tool", "name": "g"}):
        body = {**ASK, "max_tokens": 100, "tools": tools, "tool_choice": choice}
        answer = post(url, body)
        (block,) = answer["content"]
        assert (block["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
        assert block["input"] in ({"k": 1}, {"k": 2})
        assert block["name"] in (("g",) if "name" in choice else ("f", "g"))


def test_quires_own_fields(url: str) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "own fields " * 9}]}
    more = {"seed": 5, "priority": 3, "cache_priority": "keep", "cache_salt": "s"}
    first = post(url, {**body, **more})
    assert first["usage"]["cache_read_input_tokens"] == 0
    assert post(url, body)["usage"]["cache_read_input_tokens"] < 9
    again = post(url, {**body, **more})
    assert again["usage"]["cache_read_input_tokens"] > 20
    assert again["content"] == first["content"]


EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def pins_of(llm: LLM) -> list[tuple[int, float | None]]:
    return [(len(pin.tokens), pin.ttl_s) for pin in llm.pins]


@pytest.fixture
def unpinned(llm: LLM) -> Iterator[LLM]:
    yield llm
    for pin in llm.pins:
        llm.pins.remove(pin)
    until(lambda: not pins_of(llm))


def text(words: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": words, **({"cache_control": control} if control else {})}


def test_cache_control_pins_up_to_its_block(url: str, unpinned: LLM) -> None:
    unpinned.cache.reset()
    words = "pinned words of the system, " * 4
    body = {
        **ASK,
        "system": [text(words, HOUR)],
        "messages": [{"role": "user", "content": [text("first question", EPHEMERAL), text("second part")]}],
    }
    usage = post(url, body)["usage"]
    (short, long_s), (longer, short_s) = sorted(pins_of(unpinned))
    assert (long_s, short_s) == (3600, 300)
    num_prompt = count(url, body)
    by_length = {pin.ttl_s: unpinned.tokenizer.decode(pin.tokens.tolist()) for pin in unpinned.pins}
    assert by_length[3600] == f"<|im_start|>system\n{words}<|im_end|>\n<|im_start|>user\n"
    assert by_length[300] == f"{by_length[3600]}first question\n"
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": short,
        "ephemeral_5m_input_tokens": longer - short,
    }
    assert usage["cache_creation_input_tokens"] == longer
    assert usage["input_tokens"] == num_prompt - longer
    again = post(url, body)["usage"]
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] == num_prompt - 1
    assert len(pins_of(unpinned)) == 2


def test_breakpoints_of_tools_and_results(url: str, unpinned: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the tools the head of the prompt is kept, in any order; behind a result, what the template shows of it."""
    monkeypatch.setattr(unpinned.tokenizer, "chat_template", TEMPLATE)
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "the result", "cache_control": EPHEMERAL}
    body = {
        **ASK,
        "tools": [{**TOOL, "description": "d", "cache_control": HOUR}],
        "system": "S",
        "messages": [
            {"role": "user", "content": "the question"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": "the rest"}]},
        ],
    }
    post(url, body)
    kept = {pin.ttl_s: unpinned.tokenizer.decode(pin.tokens.tolist()) for pin in unpinned.pins}
    assert kept == {
        3600: "[f: d]<system>S</><user>",
        300: "[f: d]<system>S</><user>the question</><assistant>f{}</><tool>the result</><user>",
    }


def test_a_longer_turn_replaces_the_pin_of_the_last(url: str, unpinned: LLM) -> None:
    messages: list[Any] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"turn {turn} of this history"})
        answer = post(url, {**ASK, "messages": messages, "cache_control": EPHEMERAL})
        usage = answer["usage"]
        total = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        assert usage["input_tokens"] == 0
        assert pins_of(unpinned) == [(total, 300)]
        messages.append({"role": "assistant", "content": answer["content"]})


def test_pins_of_others_stay(url: str, unpinned: LLM) -> None:
    kept = {**ASK, "messages": [{"role": "user", "content": "kept by its own field"}], "keep_for": 60}
    post(url, kept)
    longer = [{"role": "user", "content": "kept by its own field, and more"}]
    post(url, {**ASK, "messages": longer, "cache_control": EPHEMERAL})
    assert sorted(ttl for _, ttl in pins_of(unpinned) if ttl) == [60, 300]


def test_no_room_is_told_and_the_answer_comes(serve: Callable[..., Any], unpinned: LLM) -> None:
    body = {**ASK, "cache_control": EPHEMERAL, "messages": [{"role": "user", "content": "no room for it"}]}
    with serve(ServerSettings(limits=ServerLimits(max_kept=1))) as (url, _):
        post(url, {**ASK, "cache_control": EPHEMERAL})
        usage = post(url, body)["usage"]
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count(url, body)
        assert len(pins_of(unpinned)) == 1
        page = httpx.get(f"{url}/metrics").text
        assert "quire:not_kept_total 1.0" in page


def test_a_prompt_of_state_layers_is_pinned_up_to_its_state() -> None:
    words = families.tokenizer("qwen3")
    model = tiny_model("qwen3_next", vocab_size=len(words))
    with LLM((model, words), kv_memory="16MiB") as llm, running(llm, ServerSettings()) as (url, _):
        body = {**ASK, "cache_control": EPHEMERAL}
        num_prompt = count(url, body)
        usage = post(url, body)["usage"]
        assert (usage["cache_creation_input_tokens"], usage["input_tokens"]) == (num_prompt - 1, 1)
        assert pins_of(llm) == [(num_prompt - 1, 300)]
        assert post(url, body)["usage"]["cache_read_input_tokens"] == num_prompt - 1


def test_a_budget_of_pins_is_kept(small_server: Any, small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ArgumentError("expected room, got none")

    monkeypatch.setattr(type(small_llm.engine.pins), "add", refuse)
    usage = post(small_server[0], {**ASK, "cache_control": HOUR})["usage"]
    assert usage["cache_creation_input_tokens"] == 0
