"""Parsing and forcing of answers: thoughts, calls, schemas, and histories of earlier answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import families
from support.running_server import running

from quire import LLM, SamplingParams
from quire.sampling import grammar
from quire.sampling.detokenizer import Detokenizer
from quire.server.messages import render
from quire.server.outputs.answer_grammar import answer_grammar
from quire.server.outputs.call_events import CallDelta
from quire.server.outputs.markers import in_grammar, shown_token_ids
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    ReasoningSpan,
    reasoning_format_of,
)
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.outputs.tool_call_format import ToolCallFormat, call_format_of
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.settings import ServerLimits, ServerSettings

THINK = ReasoningFormat("<think>", "</think>")
ASK = [{"role": "user", "content": "Hello"}]
ONE = {"maxItems": 1, "minItems": 1}
A = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
CITY = {"type": "string", "maxLength": 4}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("weather", {"type": "object", "properties": {"city": CITY}, "required": ["city"]})


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[str], str]]:
    """The URL of a server on the family of that name; grammars are not tried in processes of their own."""
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


def post(url: str, **body: Any) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 200, "temperature": 0, **body}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def ask(url: str, **body: Any) -> dict[str, Any]:
    answer = post(url, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def token(name: str, text: str) -> int:
    (found,) = families.tokenizer(name)(text, add_special_tokens=False)["input_ids"]
    return found


# -- thoughts


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "said"),
    [
        ("<think>\nHm <b>.\n</think>\n\nYes.\n", False, "Hm <b>.", "Yes.\n"),
        ("\n <think>Hm</think>Yes", False, "Hm", "Yes"),
        ("Hm\n</think>\n\nYes", True, "Hm", "Yes"),
        ("<think>\nHm\n</think>\n\nYes", True, "Hm", "Yes"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        (" \nYes", False, "", " \nYes"),
        ("<thin", False, "", "<thin"),
        ("<think>\ncut short", False, "cut short", ""),
        ("cut </thi", True, "cut </thi", ""),
    ],
)
@given(data=st.data())
def test_thoughts_whatever_the_pieces(
    text: str, is_open: bool, thoughts: str, said: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ReasoningParser(THINK, is_open=is_open)
    found: list[Any] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.push(text[begin:end])
    found += reader.push("", final=True)
    assert "".join(one.text for one in found if isinstance(one, ReasoningSpan)) == thoughts
    assert "".join(one for one in found if isinstance(one, str)) == said


def test_only_models_with_the_markers_think() -> None:
    assert [name for name in families.FAMILIES if reasoning_format_of(families.tokenizer(name))] == [
        "qwen3",
        "qwq",
        "deepseek3.1",
        "glm4.5",
    ]
    text = "<think>a</think>b"
    assert list(OutputParser(OutputFormat.of(families.tokenizer("llama3"), "")).push(text, final=True)) == [
        text
    ]


def test_calls_behind_thoughts() -> None:
    reader = OutputParser(OutputFormat(ToolCallFormat(), THINK))
    parts = list(
        reader.push('<think>a</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', final=True)
    )
    assert parts == [ReasoningSpan("a"), CallDelta(0, "f", ""), CallDelta(0, None, "{}")]


def _thinking(name: str) -> dict[int, int]:
    """A bias that, with a penalty of what was said often, has a model say some words and then end its thoughts."""
    return {token(name, "self"): 60, token(name, "</think>"): 45}


def test_template_that_opens_thoughts(serve: Callable[[str], str]) -> None:
    """The prompt ends with the marker, and what is forced is forced behind the thoughts."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "yes"}}}
    body = {"response_format": form, "logit_bias": _thinking("qwq"), "frequency_penalty": 2}
    message = ask(serve("qwq"), **body)["message"]
    assert message["content"] == '"yes"'
    assert set(message["reasoning_content"].split("self")) == {""}

    deltas = []
    for line in post(serve("qwq"), **body, stream=True).text.split("\n\n"):
        if line.startswith("data: {"):
            deltas.append(json.loads(line[6:])["choices"][0]["delta"])
    assert "".join(one.get("reasoning_content", "") for one in deltas) == message["reasoning_content"]
    assert "".join(one.get("content", "") for one in deltas) == message["content"]


def test_call_behind_thoughts_of_the_prompt(serve: Callable[[str], str]) -> None:
    choice = ask(
        serve("qwq"),
        tools=[WEATHER],
        tool_choice="required",
        logit_bias=_thinking("qwq"),
        frequency_penalty=2,
    )
    assert choice["message"]["reasoning_content"].startswith("self")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"


def test_model_that_opens_its_thoughts_itself(serve: Callable[[str], str]) -> None:
    choice = ask(serve("qwen3"), logit_bias={token("qwen3", "<think>"): 100}, max_tokens=4)
    assert choice["message"]["reasoning_content"] == "<think>" * 3
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


def test_conversation_tells_thoughts_apart(serve: Callable[[str], str]) -> None:
    url = f"{serve('qwq')}/quire/conversations"
    talk = httpx.post(url, json={}).json()["id"]
    body = {
        "messages": ASK, "max_tokens": 40, "temperature": 0, "logit_bias": _thinking("qwq"), "frequency_penalty": 2,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}},
    }  # fmt: skip
    message = httpx.post(f"{url}/{talk}/append", json=body).json()["choices"][0]["message"]
    assert message["content"] == '"yes"'
    assert message["reasoning_content"].startswith("self")
    refused = httpx.post(f"{url}/{talk}/append", json={"messages": ASK, "tool_choice": "required"})
    assert refused.status_code == 400


# -- special markers


def test_shown_special_tokens() -> None:
    tokenizer = families.tokenizer("mistral")
    marker = token("mistral", "[TOOL_CALLS]")
    tokens = tokenizer("a é[TOOL_CALLS] [{[INST]b", add_special_tokens=False)["input_ids"]
    shown = Detokenizer(tokenizer, shown=[marker])
    assert "".join(shown.push([one]) for one in tokens) + shown.finish() == "a é[TOOL_CALLS] [{b"
    assert shown.text == "a é[TOOL_CALLS] [{b"
    half = tokenizer.convert_tokens_to_ids("\u00c3")  # the byte 0xC3
    cut = Detokenizer(tokenizer, shown=[marker])
    assert (cut.push([half]), cut.push([marker])) == ("", "\ufffd[TOOL_CALLS]")


def test_shown_special_tokens_of_a_request() -> None:
    marker = token("mistral", "[TOOL_CALLS]")
    with families.llm("mistral") as llm:
        params = {"max_tokens": 3, "logit_bias": {marker: 100}}
        for more, text in (({}, ""), ({"shown_token_ids": [marker]}, "[TOOL_CALLS]" * 3)):
            assert llm.generate("a", SamplingParams(**params, **more))[0].outputs[0].text == text
            stopped = llm.generate("a", SamplingParams(**params, **more, stop=["LLS"]))[0].outputs[0]
            assert stopped.finish_reason == ("stop" if more else "length")
        with pytest.raises(ValueError, match="shown_token_ids"):
            llm.generate("a", SamplingParams(shown_token_ids=[10**6]))


def test_marker_of_a_family_is_part_of_its_form() -> None:
    forms = {name: call_format_of(families.tokenizer(name)) for name in families.FAMILIES}
    assert forms["mistral"] == ToolCallFormat("[TOOL_CALLS] [", "]", id_field="id")
    assert forms["llama3"] == ToolCallFormat("", "", "name", "parameters")
    assert forms["python_tag"] == ToolCallFormat("<|python_tag|>", "", "name", "parameters")
    assert {forms[name] for name in ("qwen2.5", "qwen3", "qwq", "hermes")} == {ToolCallFormat()}


def test_grammar_names_tokens_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = families.tokenizer("qwen2.5")
    begin, end = token("qwen2.5", "<tool_call>"), token("qwen2.5", "</tool_call>")
    form = OutputFormat.of(tokenizer, "", must_call=True)
    text = answer_grammar(tokenizer, form, [Tool.model_validate(WEATHER)])
    assert f"<[{begin}]>" in text
    assert f"<[{end}]>" in text
    # The trial's vocabulary has few tokens: with one that it lacks it would look no further.
    tried: list[str] = []
    monkeypatch.setattr(grammar, "try_grammar", tried.append)
    grammars = grammar.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammars.compile(SamplingParams(grammar=text))
    assert "<[0]>" in tried[0]
    assert str(begin) not in tried[0]


class _FewWords:
    """A tokenizer that tells its special tokens alone, as those of mistral-common."""

    all_special_tokens = ("</s>", "[TOOL_CALLS]")

    def __len__(self) -> int:
        return 10

    @property
    def added_tokens_decoder(self) -> Any:
        raise NotImplementedError

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [{"</s>": 2, "[TOOL_CALLS]": 5}[one] for one in tokens]


def test_tokenizer_that_tells_its_special_tokens_alone() -> None:
    assert in_grammar(_FewWords(), "[TOOL_CALLS] [") == ["<[5]>", '" ["']
    assert shown_token_ids(_FewWords(), ["[TOOL_CALLS] [", "]"]) == (5,)
    assert in_grammar(None, "[TOOL_CALLS]") == ['"[TOOL_CALLS]"']
    assert shown_token_ids(None, ["[TOOL_CALLS]"]) == ()


# -- schemas


def test_references_are_each_tools_own(serve: Callable[[str], str]) -> None:
    def holder(item: dict[str, Any]) -> dict[str, Any]:
        return {
            "$defs": {"Item": item, "Items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, **ONE}},
            "type": "object",
            "properties": {"items": {"$ref": "#/$defs/Items"}},
            "required": ["items"],
        }  # fmt: skip

    tools = [tool("one", holder({"const": 1})), tool("two", holder({"const": "zwei"}))]
    for name, want in (("one", [1]), ("two", ["zwei"])):
        choice = {"type": "function", "function": {"name": name}}
        (call,) = ask(serve("qwen2.5"), tools=tools, tool_choice=choice)["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"items": want}
    (call,) = ask(serve("qwen2.5"), tools=tools, tool_choice="required")["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["items"] in ([1], ["zwei"])


@pytest.mark.parametrize(
    ("parameters", "want"),
    [
        (None, {}),
        ({"type": "object", "properties": {}}, {}),
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, {"a": 1}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"anyOf": [A, A]}}, "required": ["a"]}, {"a": {"a": 1}}),
        ({"type": "object", "properties": {"properties": {"const": 2}}, "required": ["properties"]}, {"properties": 2}),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}]},
            {"a": 1},
        ),
    ],
)  # fmt: skip
def test_arguments_hold_what_the_parameters_name(
    serve: Callable[[str], str], parameters: dict[str, Any] | None, want: dict[str, Any]
) -> None:
    choice = ask(serve("qwen2.5"), tools=[tool("f", parameters)], tool_choice="required")
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == want


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {"const": 1}}, "minProperties": 2},
        {"type": "object", "properties": {"a": {"const": 1}}, "anyOf": [A], "required": ["a"]},
        {"type": "object", "allOf": [A, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
        {"type": "object", "properties": {"x": {**A, "$ref": "#/$defs/A"}}, "$defs": {"A": A}},
        {"type": "object", "properties": {"a": A}, "additionalProperties": {"type": "null"}},
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_closed_stay_open(parameters: dict[str, Any]) -> None:
    tokenizer = families.tokenizer("qwen2.5")
    text = answer_grammar(
        tokenizer,
        OutputFormat.of(tokenizer, "", must_call=True),
        [Tool.model_validate(tool("f", parameters))],
    )
    (line,) = [one for one in text.splitlines() if one.startswith("arguments_0")]
    schema = json.loads(line.partition("%json ")[2])
    assert schema.get("additionalProperties") == parameters.get("additionalProperties")


def test_thoughts_whose_end_is_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "try_grammar", lambda text: None)
    tokenizer = families.tokenizer("hermes")
    text = answer_grammar(
        tokenizer, OutputFormat(None, THINK, in_thoughts=True), (), {"type": "array", "maxItems": 0}
    )
    grammars = grammar.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    matcher = grammars.matcher(SamplingParams(grammar=text))
    assert matcher is not None
    for one in [*tokenizer("[Hm] <b>\n</think>\n\n[]")["input_ids"], tokenizer.eos_token_id]:
        row = torch.zeros(len(tokenizer))
        matcher.mask(row)
        assert row[one] == 0
        matcher.accept(one)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "nonsense"},
        {"type": "object", "properties": {"secret_name": {"$ref": "#/$defs/None"}}},
        {"type": "object", "properties": {"secret_name": {"type": "string", "pattern": "("}}},
        {"type": "object", "properties": {"secret_name": {"enum": []}}, "required": ["secret_name"]},
        {"type": "object", "properties": {"secret_name": {"not": {}}}},
    ],
)
def test_errors_do_not_show_the_grammar(serve: Callable[[str], str], parameters: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": parameters}}
    for more, param in (
        ({"tools": [tool("f", parameters)], "tool_choice": "required"}, "tools"),
        ({"response_format": schema}, "response_format.json_schema.schema"),
        ({"response_format": schema, "tools": [WEATHER]}, "tools"),
    ):
        answer = post(serve("qwen2.5"), **more)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert not any(part in error["message"] for part in ("\n", "{", "%json", "start", "call_0", "at 2("))


def test_call_or_schema(serve: Callable[[str], str]) -> None:
    """Beside tools a schema leaves both ways open; which is the model's to say."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "maxItems": 0}}}
    both = {"tools": [WEATHER], "response_format": form}
    for name, marker in (
        ("qwen2.5", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("python_tag", "<|python_tag|>"),
    ):
        called = ask(serve(name), **both, logit_bias={token(name, marker): 100})
        assert called["finish_reason"] == "tool_calls"
        assert set(json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])) == {"city"}
        said = ask(serve(name), **both, logit_bias={token(name, marker): -100})
        assert (said["message"]["content"], said["finish_reason"]) == ("[]", "stop")
        told = ask(serve(name), **both, tool_choice="none")
        assert told["message"]["content"] == "[]"
    refused = post(serve("llama3"), **both)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
    assert ask(serve("llama3"), **both, tool_choice="none")["message"]["content"] == "[]"


def test_forced_call_where_the_templates_form_is_none_of_ours(
    serve: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}</function>{% endfor %}{% endfor %}"
        "{{ tools | tojson }}"
    )
    url = serve("hermes")
    monkeypatch.setattr(families.tokenizer("hermes"), "chat_template", template)
    choice = ask(url, tools=[WEATHER], tool_choice="required")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    cut = ask(url, tools=[WEATHER], tool_choice="required", max_tokens=14)["message"]
    assert ask(url, messages=[*ASK, cut, *ASK], tools=[WEATHER], max_tokens=1)


# -- histories


@pytest.mark.parametrize("name", families.FAMILIES)
def test_answers_can_be_sent_back(serve: Callable[[str], str], name: str) -> None:
    url = serve(name)
    bias = {"logit_bias": {token(name, "</think>"): 100}} if name == "qwq" else {}
    forced = {"tools": [WEATHER], "tool_choice": "required", **bias}
    whole, cut = ask(url, **forced)["message"], ask(url, **forced, max_tokens=7)["message"]
    assert whole["content"] is None
    assert "tool_calls" not in cut
    assert ask(url, messages=[*ASK, cut, *ASK], tools=[WEATHER], max_tokens=1)
    (call,) = whole["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    for arguments in (call["function"]["arguments"], call["function"]["arguments"][:5]):
        called = json.loads(json.dumps(whole))
        called["tool_calls"][0]["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}
        history = [*ASK, called, result, *ASK]
        assert ask(url, messages=history, tools=[WEATHER], max_tokens=1)
        foreign = json.loads(json.dumps(history).replace(call["id"], "call_of_another_server"))
        assert ask(url, messages=foreign, tools=[WEATHER], max_tokens=1)


@pytest.mark.parametrize("name", [*families.FAMILIES, "none"])
@pytest.mark.parametrize(
    "arguments", ['{"ci', "", "null", "5", '"x"', "[1]", '{"a": "\\ud800"}', "[" * 20_000]
)
def test_any_arguments_are_taken(name: str, arguments: str) -> None:
    tokenizer = None if name == "none" else families.tokenizer(name)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        ChatMessage.model_validate(one)
        for one in [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, *ASK]
    ]
    text = render(tokenizer, messages, ServerLimits(), [Tool.model_validate(WEATHER)])
    text.encode()
    form = call_format_of(tokenizer)
    begin = form.begin + "f" if isinstance(form, TaggedCallFormat) else '"name": "f"'
    assert begin in text


def test_thoughts_go_back_to_templates_that_repeat_them() -> None:
    messages = [
        ChatMessage.model_validate(one)
        for one in [*ASK, {"role": "assistant", "content": "Yes", "reasoning_content": "because"}, *ASK]
    ]
    for name in families.FAMILIES:
        text = render(families.tokenizer(name), messages, ServerLimits())
        assert "Yes" in text
        assert ("because" in text) == (name == "qwen3")
    assert "Yes" in render(None, messages, ServerLimits())


def test_calls_are_told_where_the_template_knows_none(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = ChatMessage.model_validate({"role": "assistant", "content": "So:", "tool_calls": [call]})
    text = render(llm.tokenizer, [message], ServerLimits())
    assert 'So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
