"""A corpus of answers in every form of calls: in any pieces, cut short, without tools, over HTTP, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.read_calls import Read, pieces_of, read
from support.running_server import running

from quire import SamplingParams
from quire.sampling import grammar
from quire.server import chat
from quire.server.outputs.answer_grammar import answer_grammar
from quire.server.outputs.growing_text import ValueEnd
from quire.server.outputs.markers import in_grammar
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.schemas.chat_bodies import Tool
from quire.server.settings import ServerSettings

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hot": {"type": "boolean"},
        "at": {"type": "array", "items": {"type": "number"}},
        "place": {"type": "object"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]
ASK = [{"role": "user", "content": "Hello"}]
OSLO = {"city": "Oslo"}
ODD = {"city": 'O}s"\\lo\n<tool_call> ```', "days": 3}
ODD_TEXT = json.dumps(ODD)
ALL = {"city": "Oslo", "days": 3, "hot": True, "at": [1, 2.5], "place": {"a": {}}}
FENCE = "```"


@dataclass(frozen=True)
class Case:
    """What a model of a family says, its content, and its calls."""

    family: str
    text: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def qwen(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def case(family: str, text: str, *calls: tuple[str, dict[str, Any]], content: str = "") -> Case:
    return Case(family, text, content, calls)


W, T = ("weather", OSLO), ("get_time", {})
XML = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
XML_ALL = (
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=hot>\n"
    'true\n</parameter>\n<parameter=at>\n[1, 2.5]\n</parameter>\n<parameter=place>\n{"a": {}}\n</parameter>\n'
    "</function>"
)
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'
V3_TIME = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
OBJECT = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TIME = '{"name": "get_time", "arguments": {}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'

CASES = {
    "Qwen": case("qwen2.5", qwen(OBJECT), W),
    "Qwen, odd text": case("qwen2.5", qwen(f'{{"name": "weather", "arguments": {ODD_TEXT}}}'), ("weather", ODD)),
    "Qwen, arguments first": case("qwen2.5", qwen('{"arguments": {"city": "Oslo"}, "name": "weather"}'), W),
    "Qwen, two and text": case(
        "qwen3",
        f"Let me <see>.\n{qwen(OBJECT)}\n{qwen(TIME)}\nDone [1].\n",
        W,
        T,
        content="Let me <see>.\n\nDone [1].\n",
    ),
    "Qwen, two between one pair of markers": case(
        "qwen2.5", f'<tool_call>\n{OBJECT}\n{{"name": "get_time"}}\n</tool_call>', W, T
    ),
    "Qwen, no end marker": case("qwen2.5", f"<tool_call>\n{OBJECT}", W),
    "Qwen, arguments left out": case("qwen2.5", qwen('{"name": "get_time"}'), T),
    "Qwen, arguments null": case("qwen2.5", qwen('{"name": "get_time", "arguments": null}'), T),
    "Qwen, arguments empty": case("qwen2.5", qwen('{"name": "get_time", "arguments": ""}'), T),
    "Qwen, arguments within a string": case(
        "qwen2.5", qwen('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}'), W
    ),
    "Qwen, a list between markers": case("qwen2.5", f"<tool_call>[{OBJECT}]</tool_call>", W),
    "Qwen2.5-Coder, <tools>": case("qwen2.5", f"<tools>\n{OBJECT}\n</tools>", W),
    "Qwen2.5-Coder, <tools> twice": case(
        "qwen2.5", f"<tools>\n{OBJECT}\n{TIME}\n</tools>", W, T
    ),
    "Qwen2.5-Coder, fenced": case(
        "qwen2.5", f"So:\n\n{FENCE}json\n{OBJECT}\n{FENCE}\n", W, content="So:\n\n"
    ),
    "Qwen2.5-Coder, fenced list": case("qwen2.5", f"{FENCE}\n[{OBJECT}]\n{FENCE}", W),
    "Hermes, bare": case("hermes", OBJECT, W),
    "Hermes, bare behind text": case(
        "hermes", f"I look.\n\n{json.dumps(json.loads(OBJECT), indent=2)}\n", W, content="I look.\n\n"
    ),
    "Hermes, bare with its type": case("hermes", f'{{"type": "function", "id": "1", {OBJECT[1:]}', W),
    "Hermes, bare without arguments": case("hermes", '{"name": "get_time", "arguments": null}', T),
    "Hermes, list": case("hermes", f"[{OBJECT}, {TIME}]", W, T),
    "Llama 3": case("llama3", LLAMA, W),
    "Llama 3, two, ;": case("llama3", f'{LLAMA}; {{"name": "get_time", "parameters": {{}}}}', W, T),
    "Llama 3, two lines": case("llama3", f'{LLAMA}\n{{"name": "get_time", "parameters": {{}}}}', W, T),
    "Llama 3, python tag": case("llama3", f"<|python_tag|>{LLAMA}", W),
    "Llama 3, python tag, two": case("python_tag", f"<|python_tag|>{LLAMA}; {LLAMA}", W, W),
    "Llama 3, <function=": case("llama3", '<function=weather>{"city": "Oslo"}</function>', W),
    "Llama 3, <function= without arguments": case("llama3", "<function=get_time></function>", T),
    "Mistral": case("mistral", f'[TOOL_CALLS] [{OBJECT[:-1]}, "id": "abcdefghi"}}, {OBJECT}]', W, W),
    "Mistral v11": case("mistral11", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', W),
    "Mistral v11, the older form": case("mistral11", f"[TOOL_CALLS][{OBJECT}]", W),
    "Mistral v11 without an id": case("mistral11", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', W),
    "Mistral v13": case(
        "mistral13", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_time[ARGS]{}', W, T
    ),
    "Mistral v13 with an id": case("mistral13", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', W),
    "Mistral v13, empty": case("mistral13", '[TOOL_CALLS]get_time[ARGS]""', T),
    "Mistral without [ARGS]": case("mistral13", '[TOOL_CALLS]weather{"city": "Oslo"}', W),
    "DeepSeek V3": case(
        "deepseek3", f"Well.<｜tool▁calls▁begin｜>{V3}\n{V3_TIME}<｜tool▁calls▁end｜>", W, T, content="Well."
    ),
    "DeepSeek V3 without its list's markers": case("deepseek3", V3, W),
    "DeepSeek V3.1": case("deepseek3.1", f"<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>", W, W),
    "DeepSeek V3.1, nothing": case(
        "deepseek3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        T,
    ),
    "DeepSeek V3.2": case("deepseek3.1", DSML, ("weather", {"city": "Oslo", "days": 3}), T),
    "Qwen3-Coder": case("qwen3-coder", f"<tool_call>\n{XML_ALL}\n</tool_call>", ("weather", ALL)),
    "Qwen3-Coder without <tool_call>": case("qwen3-coder", f"I see.\n{XML}", W, content="I see.\n"),
    "Qwen3-Coder, no arguments": case("qwen3-coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", T),
    "Qwen3-Coder, JSON": case("qwen3-coder", qwen(OBJECT), W),
    "GLM 4.5": case(
        "glm4.5",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        ("weather", {"city": "Oslo", "days": 3}),
        T,
    ),
    "Kimi K2": case(
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        W,
        T,
    ),
    "MiniMax M2": case(
        "qwen3",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        W,
    ),
}  # fmt: skip

TEXTS = {
    "an example within a line": 'Call it with {"name": "weather", "arguments": {}}.',
    "another name": '{"name": "other", "arguments": {"city": "Oslo"}}',
    "another name, fenced": f'{FENCE}json\n{{"name": "other", "arguments": {{}}}}\n{FENCE}\n',
    "another name, <tools>": '<tools>\n{"name": "other", "arguments": {}}\n</tools>',
    "another name, <function=": '<function=other>{"city": "Oslo"}</function>',
    "a name that goes on": '{"name": "weather2", "arguments": {}}',
    "no JSON": '{"name": "weather", "arguments": {"city": Oslo}}',
    "arguments that are no object": '{"name": "weather", "arguments": [1]}',
    "other fields": '{"name": "weather", "description": "d", "parameters": {}}',
    "a list with something else": '[{"name": "weather", "arguments": {}}, 5]',
    "a list that does not end": '[{"name": "weather", "arguments": {}}',
    "a list over lines with something else": f"[\n{OBJECT},\n{OBJECT},\n5\n]",
    "a list over lines that does not end": f"{FENCE}json\n[\n{OBJECT},\n{OBJECT},\n",
    "objects within one that is no JSON": f'{{"name": "weather", "arguments": {{\n{OBJECT}\n}}}}',
    "objects within one that does not end": f'{{"name": "weather", "arguments": {{\n{OBJECT}\n',
    "code": f"{FENCE}python\nprint({{}})\n{FENCE}\n",
    "markers": "<tool_call> <tools> [TOOL_CALLS] <|python_tag|> <function=weather <tool_call>",
    "blanks": " \n\t \n",
    "JSON": '{"a": [1, {"name": "weather"}], "name": "weather"}\n',
}


def form(family: str, tools: list[dict[str, Any]] = TOOLS) -> OutputFormat:
    return OutputFormat.of(families.tokenizer(family), "", tools=[Tool.model_validate(one) for one in tools])


def in_pieces(family: str, pieces: list[str]) -> Read:
    return read(OutputParser(form(family)), pieces)


@pytest.mark.parametrize("name", CASES)
def test_each_form_wherever_it_is_cut(name: str) -> None:
    one = CASES[name]
    whole = in_pieces(one.family, [one.text])
    assert [(call, json.loads(arguments)) for call, arguments in whole.calls] == list(one.calls)
    assert (whole.said, whole.cut) == (one.content, [])
    assert in_pieces(one.family, [*one.text, ""]) == whole
    for at in range(len(one.text)):
        assert in_pieces(one.family, [one.text[:at], one.text[at:]]) == whole


@settings(max_examples=200)
@given(name=st.sampled_from([*CASES]), seed=st.integers(0, 2**32))
def test_pieces_do_not_matter(name: str, seed: int) -> None:
    one = CASES[name]
    assert in_pieces(one.family, pieces_of(one.text, seed)) == in_pieces(one.family, [one.text])


@pytest.mark.parametrize("name", CASES)
def test_a_call_cut_short_is_not_told_as_whole(name: str) -> None:
    """Wherever an answer ends: no arguments of a cut call are JSON, its text is there, and no call is made up."""
    one = CASES[name]
    for at in range(len(one.text)):
        text = one.text[:at]
        reader = OutputParser(form(one.family))
        found = read(reader, [text])
        calls = [(call, json.loads(arguments)) for call, arguments in found.calls]
        assert calls == list(one.calls[: len(calls)])
        for call, arguments, raw in found.cut:
            assert call == one.calls[len(calls)][0]
            with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid|Extra"):
                json.loads(arguments)
            assert raw in text
            assert reader.finish_reason("stop") == "stop"
        if not calls:
            assert found.said + "".join(raw for _, _, raw in found.cut) in (text, text.lstrip())
        assert in_pieces(one.family, [*text, ""]) == found


@pytest.mark.parametrize("name", CASES)
def test_without_tools_an_answer_is_its_text(name: str) -> None:
    one = CASES[name]
    text = one.text
    assert read(OutputParser(form(one.family, [])), [*text, ""]) == (text, [], [])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("family", ["qwen2.5", "hermes", "llama3", "mistral13", "qwen3-coder", "deepseek3"])
def test_what_names_no_tool_is_text(family: str, name: str) -> None:
    text = TEXTS[name]
    if (family, name) == ("qwen3-coder", "another name, <function="):
        pytest.skip("of its own form any name is a call")
    assert in_pieces(family, [text]) == (text, [], [])
    for at in range(len(text)):
        assert in_pieces(family, [text[:at], text[at:]]) == (text, [], [])
    assert in_pieces(family, [*text, ""]) == (text, [], [])


@settings(max_examples=300)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_no_text_is_lost_or_made_up(data: st.DataObject, seed: int) -> None:
    """Pieces of markers in any order: without a call the text as it is, with one its parts in their order."""
    family = data.draw(st.sampled_from([*families.FAMILIES]))
    marks = [start for one in form(family).call_formats() for start in one.starts]
    more = [
        OBJECT,
        '{"name": "',
        "weather",
        '"',
        "}",
        "]",
        "{",
        ",",
        ";",
        "\n",
        " ",
        "x",
        "[ARGS]",
        FENCE,
    ]
    more += ["</tool_call>", "</function>", "<parameter=city>", "</parameter>", ">", '"arguments": ', "json"]
    text = "".join(data.draw(st.lists(st.sampled_from([*marks, *more]), max_size=14)))
    found = in_pieces(family, [text])
    assert in_pieces(family, pieces_of(text, seed)) == found
    assert in_pieces(family, [*text, ""]) == found
    if not found.calls and not found.cut:
        assert found.said == text
    rest = iter(text)
    assert all(one in rest for one in found.said if not found.cut)


def test_text_that_begins_like_many_calls_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    find = ValueEnd.find

    def counted(end: ValueEnd, text: str) -> int | None:
        nonlocal looked_at
        before = end._position
        found = find(end, text)
        looked_at += end._position - before
        return found

    monkeypatch.setattr(ValueEnd, "find", counted)
    line = '{"name": "weather", "arguments": {\n'
    for text in (line * 500, line * 500 + "}" * 1000, f"<tools>{line}" * 500, f"[{OBJECT}, \n" * 500):
        looked_at = 0
        found = in_pieces("llama3", [text])
        assert found.said + "".join(raw for _, _, raw in found.cut) == text
        assert looked_at < 10 * len(text)


@pytest.mark.parametrize(
    ("family", "pieces", "said"),
    [
        ("qwen2.5", ["I say {"], "I say {"),
        ("qwen2.5", ["A <tool"], "A "),
        ("qwen2.5", ["A <tool", "box"], "A <toolbox"),
        ("qwen2.5", ['{"na'], ""),
        ("qwen2.5", ['{"na', "tion"], '{"nation'),
        ("qwen2.5", ['{"name": "wea'], ""),
        ("qwen2.5", ['{"name": "wea', "r"], '{"name": "wear'),
        ("qwen2.5", ["[1"], "[1"),
        ("qwen2.5", [f"{FENCE}js"], ""),
        ("qwen2.5", [f"{FENCE}js", "x"], f"{FENCE}jsx"),
        ("llama3", [f"{FENCE}python\n"], f"{FENCE}python\n"),
        ("llama3", ['{"a": '], '{"a": '),
        ("qwen3-coder", ["<function=weather>\nno"], "<function=weather>\nno"),
        ("mistral13", ["[TOOL_CALLS]weather no"], "[TOOL_CALLS]weather no"),
    ],
)
def test_text_is_held_back_only_while_it_may_be_a_call(family: str, pieces: list[str], said: str) -> None:
    reader = OutputParser(form(family))
    assert "".join(str(part) for piece in pieces for part in reader.push(piece)) == said


@pytest.mark.parametrize("name", families.FAMILIES)
def test_forced_call_may_be_what_the_template_writes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(grammar, "try_grammar", lambda text: None)
    words = families.tokenizer(name)
    required = {**PARAMETERS, "required": ["city", "days"]}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": required}})
    ]
    one = OutputFormat.of(words, "", tools=tools, must_call=True)
    text = families.written(name, ("weather", {"city": "Oslo", "days": 3}))
    if isinstance(one.calls, TaggedCallFormat):
        begin, end = (one.calls.list_begin + one.calls.begin).strip(), one.calls.end + one.calls.list_end
    else:
        assert one.calls is not None
        begin, end = one.calls.begin.strip() or '{"name"', one.calls.end
    text = text[text.index(begin) : text.rindex(end or "}") + len(end or "}")]
    assert "Oslo" in text
    matcher = grammar.Grammars(words, len(words), [words.eos_token_id]).matcher(
        SamplingParams(grammar=answer_grammar(words, one, tools))
    )
    assert matcher is not None
    for token in [*words(text, add_special_tokens=False)["input_ids"], words.eos_token_id]:
        row = torch.zeros(len(words))
        matcher.mask(row)
        assert row[token] == 0, words.decode([token])
        matcher.accept(token)


# -- over HTTP


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[str, str], str]]:
    """The URL of a server whose model says a text: a grammar has nothing else left, in the family's own tokens."""
    urls: dict[str, str] = {}
    said = [""]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(grammar, "try_grammar", lambda text: None)

        def one(family: str, text: str) -> str:
            said[0] = f"start: {' '.join(in_grammar(families.tokenizer(family), text))}\n"
            if family not in urls:
                llm = stack.enter_context(families.llm(family))
                urls[family], _ = stack.enter_context(running(llm, ServerSettings()))
            return urls[family]

        patch.setattr(chat, "_grammar", lambda *_: said[0])
        yield one


def answer(url: str, **body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """(content, calls, finish reason)."""
    body = {"messages": ASK, "max_tokens": 400, "temperature": 0, "tools": TOOLS, **body}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        choice = reply.json()["choices"][0]
        calls = [one["function"] for one in choice["message"].get("tool_calls") or []]
        told = [(one["name"], one["arguments"]) for one in calls]
        return choice["message"]["content"] or "", told, choice["finish_reason"]
    content, told, reason = "", [], ""
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        content += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].get("tool_calls") or []:
            if call["index"] == len(told):
                assert call["id"]
                told.append((call["function"]["name"], ""))
            name, arguments = told[call["index"]]
            told[call["index"]] = (name, arguments + call["function"]["arguments"])
    return content, told, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_answer_over_http(serve: Callable[[str, str], str], name: str, *, stream: bool) -> None:
    one = CASES[name]
    url = serve(one.family, one.text)
    content, calls, reason = answer(url, stream=stream)
    assert [(call, json.loads(arguments)) for call, arguments in calls] == list(one.calls)
    assert (content.strip(), reason) == (one.content.strip(), "tool_calls")
    none = answer(url, stream=stream, tool_choice="none")
    assert none[1:] == ([], "stop")
    special = set(families.FAMILIES[one.family].special)
    if not any(mark in one.text for mark in special):
        assert none[0] == one.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("family", "text", "bare"),
    [
        ("qwen2.5", qwen(OBJECT), False),
        ("llama3", LLAMA, True),
        ("mistral13", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', False),
        ("qwen3-coder", f"<tool_call>\n{XML}", False),
        ("qwen2.5", f"{FENCE}json\n{OBJECT}\n{FENCE}", True),
    ],
)
@pytest.mark.parametrize("by", ["max_tokens", "stop", "end"])
def test_cut_call_over_http(
    serve: Callable[[str, str], str], family: str, text: str, by: str, *, bare: bool, stream: bool
) -> None:
    """Not `tool_calls`; whole, the text is the content; streamed, what was told of the call is no JSON."""
    cut = text[: text.index("Oslo")]
    if by == "max_tokens":
        url = serve(family, text)
        num = len(families.tokenizer(family)(cut, add_special_tokens=False)["input_ids"])
        content, calls, reason = answer(url, stream=stream, max_tokens=num)
        assert reason == "length"
        cut = content or cut
    elif by == "stop":
        content, calls, reason = answer(serve(family, text), stream=stream, stop=["Oslo"])
        assert reason == "stop"
    else:
        content, calls, reason = answer(serve(family, cut), stream=stream)
        assert reason == "stop"
    if stream and not bare:
        ((name, arguments),) = calls
        assert (name, content) == ("weather", "")
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(arguments)
    else:
        assert (content, calls) == (cut, [])


@pytest.mark.parametrize("stream", [False, True])
def test_whole_call_before_a_cut_one(serve: Callable[[str, str], str], *, stream: bool) -> None:
    text = f'{qwen(OBJECT)}\n<tool_call>\n{{"name": "get_time", "arguments": {{"a": 1}}'
    content, calls, reason = answer(serve("qwen2.5", text), stream=stream)
    assert reason == "stop"
    assert calls[0] == ("weather", json.dumps(OSLO))
    if stream:
        assert (content, calls[1:]) == ("", [("get_time", '{"a": 1')])
    else:
        assert (content, calls[1:]) == (text.partition("</tool_call>")[2].lstrip("\n"), [])
    one = answer(serve("qwen2.5", text), stream=stream, parallel_tool_calls=False)
    assert one == ("", [("weather", json.dumps(OSLO))], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_call_whose_length_ends_behind_it_is_whole(serve: Callable[[str, str], str], *, stream: bool) -> None:
    text = qwen(OBJECT)
    num = len(families.tokenizer("qwen2.5")(text, add_special_tokens=False)["input_ids"])
    for max_tokens in (num, num - 1):
        told = answer(serve("qwen2.5", text), stream=stream, max_tokens=max_tokens)
        assert told == ("", [("weather", json.dumps(OSLO))], "length")
