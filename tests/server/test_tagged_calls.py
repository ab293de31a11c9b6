"""Calls that are not JSON objects: learnt from templates, parsed from text cut anywhere, forced, and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.read_calls import Read
from support.read_calls import read as read_pieces
from support.running_server import running

from quire import SamplingParams
from quire.sampling import grammar
from quire.server.messages import render
from quire.server.outputs.answer_grammar import answer_grammar
from quire.server.outputs.call_events import CallDelta, CutCall
from quire.server.outputs.known_formats import KNOWN_FORMATS
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.parameter_values import json_of, types_of
from quire.server.outputs.tagged_call_format import ParameterFormat, TaggedCallFormat
from quire.server.outputs.tool_call_format import ToolCallFormat, call_format_of
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.settings import ServerLimits, ServerSettings

NAMED = ("mistral11", "mistral13", "deepseek3", "deepseek3.1", "qwen3-coder", "glm4.5", "kimi-k2")
ASK = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"$ref": "#/$defs/Unit"},
        "place": {"type": "object", "properties": {"at": {"type": "string"}}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days", "unit"],
    "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
}


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


WEATHER, TIME = tool("weather", SCHEMA), tool("time", None)


def form(name: str, *, must_call: bool = False) -> OutputFormat:
    return OutputFormat.of(families.tokenizer(name), "", tools=[WEATHER, TIME], must_call=must_call)


def read(form: OutputFormat, pieces: list[str]) -> Read:
    return read_pieces(OutputParser(form), pieces)


def test_learnt_forms() -> None:
    forms = {name: call_format_of(families.tokenizer(name)) for name in NAMED}
    calls, call = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁call▁begin｜>"
    assert forms == {
        "mistral11": TaggedCallFormat("", "[TOOL_CALLS]", ("[CALL_ID]", "[ARGS]"), "", ""),
        "mistral13": TaggedCallFormat("", "[TOOL_CALLS]", ("[ARGS]",), "", ""),
        "deepseek3": TaggedCallFormat(
            calls[0], f"{call}function<｜tool▁sep｜>", ("\n```json\n",), "\n```<｜tool▁call▁end｜>", calls[1]
        ),
        "deepseek3.1": TaggedCallFormat(calls[0], call, ("<｜tool▁sep｜>",), "<｜tool▁call▁end｜>", calls[1]),
        "qwen3-coder": TaggedCallFormat(
            "",
            "<tool_call>\n<function=",
            (">",),
            "\n</function>\n</tool_call>",
            "",
            ParameterFormat("\n<parameter=", ">\n", "\n</parameter>"),
        ),
        "glm4.5": TaggedCallFormat(
            "",
            "<tool_call>",
            ("",),
            "\n</tool_call>",
            "",
            ParameterFormat("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        ),
        "kimi-k2": KNOWN_FORMATS["Kimi K2"],
    }


@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=40)
@given(data=st.data())
def test_read_whatever_the_pieces(name: str, data: st.DataObject) -> None:
    """What a template writes is read back, with what is said before it, wherever the text is cut."""
    arguments = {
        "city": 'O}s"\\lo\n</par> ',
        "days": 3,
        "place": {"at": "</parameter> } ```"},
        "note": None,
    }
    text = families.written(name, ("weather", arguments), ("time", {}), content="Let me [see] <tool\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(form(name), pieces)
    assert found.said.strip() == "Let me [see] <tool"
    assert [(one, json.loads(given)) for one, given in found.calls] == [("weather", arguments), ("time", {})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral13", "[TOOL_CALLS]"),
        ("mistral13", "[TOOL_CALLS]weather"),
        ("mistral13", "[TOOL_CALLS]a b[ARGS]{}"),
        ("mistral13", "[TOOL_CALLS]weather[ARGS]no"),
        ("deepseek3", "<｜tool▁calls▁begin｜>none"),
        ("deepseek3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{}"),
        ("qwen3-coder", "<tool_call>\n<function=weather"),
    ],
)
@settings(max_examples=20)
@given(cut=st.integers(0, 60))
def test_what_is_no_call_is_text(name: str, text: str, cut: int) -> None:
    assert read(form(name), [text[:cut], text[cut:]]) == (text, [], [])


def test_what_is_no_call_before_one() -> None:
    text = "[TOOL_CALLS]no [TOOL_CALLS]time[ARGS]{}"
    assert read(form("mistral13"), [*text, ""]) == ("[TOOL_CALLS]no ", [("time", "{}")], [])


@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=40)
@given(data=st.data())
def test_nothing_breaks_the_reader(name: str, data: st.DataObject) -> None:
    """Whatever pieces of markers a model writes: no error, and the same in one piece as letter by letter."""
    calls = form(name).calls
    assert calls is not None
    marks = [piece for one in calls.markers for piece in (one, one.strip()) if piece]
    parts = st.lists(st.sampled_from([*marks, "weather", "city", "{", "}", '"', "\n", " ", "x"]), max_size=14)
    text = "".join(data.draw(parts))
    whole = read(form(name), [text])
    assert read(form(name), [*text, ""]) == whole
    assert whole.calls or whole.cut or whole.said == text


def test_values_come_as_they_are_written() -> None:
    """The name first, a string's text as it grows, other values whole; a call that is cut short stays open."""
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nOsl"
    reader = OutputParser(form("qwen3-coder"))
    assert list(reader.push(text)) == [CallDelta(0, "weather", ""), CallDelta(0, None, '{"city": "Osl')]
    more = 'o"\n</parameter>\n<parameter=days>\n1'
    assert list(reader.push(more)) == [CallDelta(0, None, 'o\\"", "days": ')]
    end = "2\n"
    assert list(reader.push(end, final=True)) == [CutCall(0, text + more + end)]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, " 5 ", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "Nobody", "Nobody"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"enum": [5, 6]}, "5", 5),
        ({"$ref": "#/$defs/Unit"}, "5", "5"),
        ({"$ref": "#/$defs/None"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "default": "C"}, "5", "5"),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({}, '"five"', '"five"'),
    ],
)
def test_values_by_the_schemas_type(schema: dict[str, Any], text: str, value: Any) -> None:
    assert json.loads(json_of(text, types_of(schema, SCHEMA))) == value


# -- forced


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    urls: dict[str, str] = {}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(grammar, "try_grammar", lambda text: None)

        def one(name: str) -> str:
            if name not in urls:
                llm = stack.enter_context(families.llm(name))
                urls[name], _ = stack.enter_context(running(llm, ServerSettings()))
            return urls[name]

        yield one


def ask(url: str, **body: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 200, "temperature": 0, **body}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


@pytest.mark.parametrize("name", NAMED)
def test_forced_call_is_in_the_models_own_tokens(serve: Any, name: str) -> None:
    properties = {key: SCHEMA["properties"][key] for key in ("city", "days", "unit")}
    tools = [one.model_dump() for one in (TIME, tool("weather", {**SCHEMA, "properties": properties}))]
    choice = {"type": "function", "function": {"name": "weather"}}
    forced = ask(serve(name), tools=tools, tool_choice=choice, return_token_ids=True, max_tokens=300)
    assert forced["finish_reason"] == "tool_calls"
    (call,) = forced["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "days", "unit"}
    assert len(arguments["city"]) <= 4
    assert arguments["days"] in range(10)
    assert arguments["unit"] in "CF"
    tokenizer = families.tokenizer(name)
    marks = [
        one for one in tokenizer.get_added_vocab() if any(one in text for text in form(name).calls.markers)
    ]
    assert marks
    assert set(tokenizer.convert_tokens_to_ids(marks)) <= set(forced["token_ids"])
    either = ask(serve(name), tools=tools, tool_choice="required", max_tokens=300)["message"]["tool_calls"]
    assert [one["function"]["name"] for one in either] in (["weather"], ["time"])


def follows(parameters: dict[str, Any], text: str) -> bool:
    """Whether a grammar of calls with these parameters lets a text through, to its end."""
    tokenizer, tools = families.tokenizer("qwen3-coder"), [tool("f", parameters)]
    one = OutputFormat.of(tokenizer, "", tools=tools, must_call=True)
    grammars = grammar.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return takes(grammars, answer_grammar(tokenizer, one, tools), text)


def takes(grammars: grammar.Grammars, lark: str, text: str) -> bool:
    tokenizer = families.tokenizer("qwen3-coder")
    matcher = grammars.matcher(SamplingParams(grammar=lark))
    assert matcher is not None
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        row = torch.zeros(len(tokenizer))
        matcher.mask(row)
        if row[token]:
            return False
        matcher.accept(token)
    return True


@pytest.mark.parametrize(
    ("schema", "value", "allowed"),
    [
        ({"type": "string"}, "any\n\ntext </par>", True),
        ({"type": "string"}, "a</parameter>\n<parameter=b>\n", False),
        ({"type": "string", "minLength": 2}, "a", False),
        ({"type": "string", "maxLength": 2}, "abc", False),
        ({"type": "string", "maxLength": 2}, "", True),
        ({"type": "string", "pattern": "^a/b+$"}, "a/bb", True),
        ({"type": "string", "pattern": "^a/b+$"}, "a/bbc", False),
        ({"type": "string", "pattern": "b+"}, "abbc", True),
        ({"type": "string", "pattern": r"^\\/\/$"}, r"\//", True),
        ({"type": "string", "enum": ["one", "two"]}, "two", True),
        ({"type": "string", "enum": ["one", "two"]}, '"two"', False),
        ({"enum": ["one", 2, None]}, "null", True),
        ({"enum": ["one", 2, None]}, "3", False),
        ({"type": "integer"}, "-12", True),
        ({"type": "integer"}, "a", False),
        ({"type": "array", "items": {"$ref": "#/$defs/Unit"}}, '["C", "F"]', True),
        ({"type": "array", "items": {"$ref": "#/$defs/Unit"}}, '["K"]', False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", True),
        ({}, "whatever", True),
    ],
)
def test_values_one_by_one_follow_their_schema(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], value: str, allowed: bool
) -> None:
    monkeypatch.setattr(grammar, "try_grammar", lambda text: None)
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": SCHEMA["$defs"]}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert follows(parameters, text) == allowed


def test_optional_and_required_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "try_grammar", lambda text: None)
    parameters = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b", "c"]}
    for names, allowed in (("abc", True), ("bc", True), ("ab", False), ("b", False), ("", False)):
        values = "".join(f"<parameter={one}>\n1\n</parameter>\n" for one in names)
        text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
        assert follows(parameters, text) == allowed
    assert follows({}, "<tool_call>\n<function=f>\n</function>\n</tool_call>")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a b": {"type": "integer"}}},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"type": "object", "properties": {}, "minProperties": 1},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"$ref": "#/$defs/None"},
    ],
)
def test_parameters_that_cannot_be_written_one_by_one(
    monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    """A required call is then in our form, as where the model's form cannot be read."""
    monkeypatch.setattr(grammar, "try_grammar", lambda text: None)
    tokenizer, tools = families.tokenizer("qwen3-coder"), [tool("f", parameters)]
    assert OutputFormat.of(tokenizer, "", tools=tools, must_call=True).calls == ToolCallFormat()
    chosen = OutputFormat.of(tokenizer, "", tools=tools)
    assert chosen.calls == form("qwen3-coder").calls
    # Where the model may answer something else as well, its own form takes any arguments.
    text = answer_grammar(tokenizer, chosen, tools, {"const": 1})
    matcher = grammar.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    call = "<tool_call>\n<function=f>\n<parameter=b>\n1\n</parameter>\n<parameter=c>\n2\n</parameter>"
    assert takes(matcher, text, f"{call}\n</function>\n</tool_call>")
    assert takes(matcher, text, "1")


@pytest.mark.parametrize(("name", "marker"), [("mistral13", "[TOOL_CALLS]"), ("qwen3-coder", "<tool_call>")])
def test_call_or_schema(serve: Any, name: str, marker: str) -> None:
    small = tool("small", {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}).model_dump()
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "maxItems": 0}}}
    token = families.tokenizer(name).convert_tokens_to_ids(marker)
    both = {"tools": [small], "response_format": form}
    called = ask(serve(name), **both, logit_bias={token: 100})
    assert called["finish_reason"] == "tool_calls"
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["a"] in "xy"
    assert ask(serve(name), **both, logit_bias={token: -100})["message"]["content"] == "[]"


def test_template_that_writes_objects_and_tells_no_tools_is_answered_in_our_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        '[CALL]{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(families.tokenizer("hermes"), "chat_template", template)
    assert call_format_of(families.tokenizer("hermes")) == ToolCallFormat()


def test_parallel_calls_whose_template_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        "<call>{{ m.tool_calls[0].function.name }}<args>{{ m.tool_calls[0].function.arguments | tojson }}</call>"
        "{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(families.tokenizer("hermes"), "chat_template", template)
    assert call_format_of(families.tokenizer("hermes")) == TaggedCallFormat(
        "", "<call>", ("<args>",), "</call>", ""
    )


def test_end_markers_left_out_by_the_model() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n1\n</parameter>\n</function>\n"
    assert read(form("qwen3-coder"), [*text, ""]) == ("", [("weather", '{"days": 1}')], [])
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    assert read(form("deepseek3.1"), [*text, ""]) == ("", [("time", "{}")], [])


def test_blanks_do_not_hold_text_back_for_ever() -> None:
    reader = OutputParser(form("mistral13"))
    given = [part for one in ["[TOOL_CALLS]", *["\n"] * 200] for part in reader.push(one)]
    assert "".join(map(str, given)).startswith("[TOOL_CALLS]\n")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": 5},
        {"properties": {}, "required": "ab"},
        {"properties": {"a": {}}, "required": [{}]},
        {"properties": {"a": {"type": "string", "minLength": "x"}}},
        {"properties": {"a": {"type": "string", "pattern": "(/"}}},
        {"properties": {"a": {"enum": []}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}},
        {"$ref": "#"},
    ],
)
@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_odd_parameters_are_answered_or_refused(
    serve: Any, parameters: dict[str, Any], more: dict[str, Any]
) -> None:
    body = {"messages": ASK, "max_tokens": 4, "tools": [tool("f", parameters).model_dump()], **more}
    reply = httpx.post(f"{serve('qwen3-coder')}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code in (200, 400), reply.text


def test_types_of_schemas_that_name_themselves() -> None:
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 20 + [{"type": "null"}]}}}
    assert types_of({"$ref": "#/$defs/A"}, root) == {"null"}


@pytest.mark.parametrize("name", NAMED)
def test_histories_go_through_the_template(name: str) -> None:
    arguments = {"city": "Oslo", "days": 3}
    text = families.written(name, ("weather", arguments), content="So:")
    assert "weather" in text.partition("So:")[2]
    assert read(form(name), [text])[1] == [("weather", json.dumps(arguments))]
    for cut in ('{"ci', "5", ""):
        call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": cut}}
        messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rendered = render(
            families.tokenizer(name), [ChatMessage.model_validate(one) for one in messages], ServerLimits()
        )
        assert form(name).calls.begin + "weather" in rendered


def test_tools_are_told_in_the_models_form_where_the_template_tells_none() -> None:
    text = render(
        families.tokenizer("deepseek3"), [ChatMessage(role="user", content="q")], ServerLimits(), [TIME]
    )
    assert text.startswith("You may call these functions:")
    assert (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>" in text
    )
