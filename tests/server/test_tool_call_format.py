"""Tools: the form of calls learnt from templates, read back from text cut anywhere, forced, and streamed."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.read_calls import read

from quire import LLM
from quire.server.messages import render
from quire.server.outputs.bare_calls import bare_calls
from quire.server.outputs.call_parser import CallParser
from quire.server.outputs.object_calls import ObjectCalls
from quire.server.outputs.tool_call_format import ToolCallFormat, call_format_of, template_describes_tools
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.settings import ServerLimits

QWEN = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    '[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]'
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
)
XML = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<function={{ c.function.name }}>x</function>{% endfor %}{% endfor %}{{ tools | tojson }}"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.fixture
def with_template(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def use(template: str | None):
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        return llm.tokenizer

    return use


@pytest.mark.parametrize(
    ("template", "form", "tells"),
    [
        (QWEN, ToolCallFormat(), True),
        (LLAMA, ToolCallFormat("", "", "name", "parameters"), True),
        (MISTRAL, ToolCallFormat("[TOOL_CALLS] [", "]", id_field="id"), True),
        (XML, None, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ToolCallFormat(), False),
        (None, ToolCallFormat(), False),
    ],
    ids=["qwen", "llama", "mistral", "xml", "no tools", "none"],
)
def test_learnt_forms(with_template, template: str | None, form: ToolCallFormat | None, tells: bool) -> None:
    tokenizer = with_template(template)
    assert call_format_of(tokenizer) == form
    assert template_describes_tools(tokenizer) == tells


def test_model_is_told_in_either_way(with_template) -> None:
    tools = [Tool.model_validate(WEATHER)]
    messages = [ChatMessage(role="user", content="q")]
    for template in (QWEN, None):
        text = render(with_template(template), messages, ServerLimits(), tools)
        assert "get_weather" in text
        assert text.count("q") >= 1


def reader(form: ToolCallFormat) -> CallParser:
    return CallParser([ObjectCalls(form)] if form.begin else bare_calls(["f", "g"]))


ARGUMENTS = '{"city": "O}s\\"lo", "a": [1, {"b": "</tool_call>"}]}'
TEXTS = {
    "one": (f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', "", [("f", ARGUMENTS)]),
    "said first": (
        f'Let me see <\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "Let me see <\n",
        [("f", ARGUMENTS)],
    ),
    "two": (
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "",
        [("f", ARGUMENTS), ("g", "{}")],
    ),
    "arguments first": (
        f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>',
        "",
        [("f", ARGUMENTS)],
    ),
    "said behind and between": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nAnd \n now:\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call> That is \n all. \n',
        "\nAnd \n now:\n That is \n all. \n",
        [("f", "{}"), ("g", "{}")],
    ),
    "a name within the arguments": (
        '<tool_call>{"arguments": {"name": "bob"}, "name": "f"}</tool_call>',
        "",
        [("f", '{"name": "bob"}')],
    ),
    "no name": ('See <tool_call>\n{"a": {"name": "f"}} so', 'See <tool_call>\n{"a": {"name": "f"}} so', []),
    "no JSON text": ('<tool_call>{"name": "\\x"}', '<tool_call>{"name": "\\x"}', []),
    "no call": ("I like <tool_box> and {braces}", "I like <tool_box> and {braces}", []),
    "no object": ("<tool_call> none", "<tool_call> none", []),
}


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_read_whatever_the_pieces(name: str, data: st.DataObject) -> None:
    text, said, calls = TEXTS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reader(ToolCallFormat()), pieces) == (said, calls, [])


@pytest.mark.parametrize(
    "form",
    [ToolCallFormat(), ToolCallFormat("[TOOL_CALLS] [", "]"), ToolCallFormat("", "", "name", "parameters")],
    ids=str,
)
@given(data=st.data())
def test_pieces_do_not_matter(form: ToolCallFormat, data: st.DataObject) -> None:
    """Whatever parts of calls a model writes: the same in one piece as letter by letter."""
    call = '{"name": "f", "' + form.arguments_field + '": {"a": 1}}'
    parts = [
        form.begin.strip(),
        form.end.strip(),
        call,
        '{"name": "f"}',
        "{",
        "}",
        "[",
        ",",
        "\n",
        " ",
        "x",
        '"',
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    assert read(reader(form), [*text, ""]) == read(reader(form), [text])


def test_list_of_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "1"}, {"name": "g", "arguments": {}}]'
    for cut in range(len(text)):
        pieces = [text[:cut], text[cut:]]
        found = read(reader(ToolCallFormat("[TOOL_CALLS] [", "]")), pieces)
        assert found == ("", [("f", '{"a": 1}'), ("g", "{}")], [])


@given(data=st.data())
def test_object_alone(data: st.DataObject) -> None:
    form = ToolCallFormat("", "", "name", "parameters")
    for text, said, calls in (
        (f' {{"name": "f", "parameters": {ARGUMENTS}}}', "", [("f", ARGUMENTS)]),
        ("It is {not} one", "It is {not} one", []),
    ):
        cut = data.draw(st.integers(0, len(text)))
        assert read(reader(form), [text[:cut], text[cut:]]) == (said, calls, [])


@given(st.text(alphabet='<tool_cal>/{}"name:f\\ \n', max_size=60), st.integers(0, 60))
def test_nothing_is_lost_without_a_call(text: str, cut: int) -> None:
    """Whatever is said comes out, in whatever pieces; a call needs a name."""
    found = read(reader(ToolCallFormat()), [text[:cut], text[cut:]])
    assert found.calls or found.cut or found.said == text


@pytest.mark.parametrize("template", [QWEN, LLAMA, None], ids=["qwen", "llama", "none"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls(url: str, with_template, template: str | None, choice) -> None:
    with_template(template)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "The weather?"}],
        "tools": [WEATHER, TIME] if choice == "required" else [TIME, WEATHER],
        "tool_choice": choice,
        "max_tokens": 96,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if choice != "required":
        assert call.function.name == "get_weather"
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "days"}

    name, text, reason = "", "", None
    for chunk in client.chat.completions.create(**ask, stream=True):
        part = chunk.choices[0]
        assert not part.delta.content
        reason = part.finish_reason or reason
        for delta in part.delta.tool_calls or []:
            name += delta.function.name or ""
            text += delta.function.arguments or ""
    assert (name, text, reason) == (call.function.name, call.function.arguments, "tool_calls")


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nonsense"}}}],
            "tool_choice": "required",
        },
        {"tools": [WEATHER] * 1000},
    ],
)
def test_refused(url: str, change: dict) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = {"model": "embedded", "messages": [{"role": "user", "content": "a"}], "tools": [WEATHER], **change}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ask)
