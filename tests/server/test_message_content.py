"""The prompt text of a message's content: parts, refusals, thoughts, and answers that are sent back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from support import families

from quire.server.api_errors import ApiError
from quire.server.messages import render
from quire.server.schemas.chat_bodies import AnsweredCall, AnswerMessage, ChatMessage, Tool
from quire.server.settings import ServerLimits

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = "{% for p in m.content %}{{ p.text }}|{% endfor %}"
EITHER = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PARTS}{{% endif %}}"
BOTH = f"{{% for m in messages %}}<{{{{ m.role }}}}>{EITHER}{{% endfor %}}"
LISTS = f"{{% for m in messages %}}<{{{{ m.role }}}}>{PARTS}{{% endfor %}}"
# As Gemma's: of a system message the first part alone.
FIRST = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% elif m.role == 'system' %}{{ m.content[0].text }}"
    f"{{% else %}}{PARTS}{{% endif %}}{{% endfor %}}"
)
# As Magistral's.
CHUNKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
# As gpt-oss's.
STRICT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content and m.thinking %}{{ raise('both') }}{% endif %}"
    "{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
)
A, B = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
THOUGHT = {"type": "thinking", "thinking": "why"}


class Tokenizer:
    """With a template, and nothing else."""

    eos_token = None

    def __init__(self, template: str) -> None:
        self.chat_template = template
        self.added_tokens_decoder: dict[int, Any] = {}

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        def fail(text: str) -> None:
            raise ValueError(text)

        return jinja2.Template(self.chat_template).render(messages=messages, **{"raise": fail, **options})


def rendered(template: str | None, *messages: dict[str, Any]) -> str:
    tokenizer = None if template is None else Tokenizer(template)
    return render(tokenizer, [ChatMessage.model_validate(one) for one in messages], ServerLimits())


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def answer(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*parts], **more}


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        (None, user(A, B), "user: a\nb\nassistant:"),
        (PLAIN, user(A, B), "<user>a\nb"),
        (PLAIN, user(A, {"type": "text", "text": ""}, B), "<user>a\nb"),
        (
            PLAIN,
            user({"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}),
            "<user>a\nb",
        ),
        (PLAIN, {"role": "tool", "content": [A, B]}, "<tool>a\nb"),
        (BOTH, user(A, B), "<user>a|b|"),
        (BOTH, {"role": "user", "content": "a"}, "<user>a"),
        (BOTH, {"role": "tool", "content": [A, B]}, "<tool>a\nb"),
        (LISTS, user(A, B), "<user>a|b|"),
        (LISTS, {"role": "user", "content": "a"}, "<user>a|"),
        (FIRST, user(A, B), "<user>a|b|"),
        (FIRST, {"role": "system", "content": [A, B]}, "<system>a\nb"),
        (FIRST, {"role": "developer", "content": [A, B]}, "<system>a\nb"),
    ],
)
def test_texts_are_joined_or_go_as_they_are(template: str | None, message: dict[str, Any], text: str) -> None:
    assert rendered(template, message) == text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_go_where_the_template_takes_them(name: str) -> None:
    own = f"{{% if m.{name} %}}({{{{ m.{name} }}}}){{% endif %}}"
    template = f"{{% for m in messages %}}{own}{{{{ m.content }}}}{{% endfor %}}"
    for message in (
        answer(THOUGHT, A),
        answer({"type": "reasoning", "text": "why"}, A),
        answer({"type": "thinking", "thinking": [{"type": "text", "text": "why"}], "signature": "s"}, A),
        answer(A, reasoning_content="why"),
        answer(A, reasoning="why", reasoning_content="why"),
        answer(A, thinking="why"),
    ):
        assert rendered(template, message) == "(why)a"
        assert rendered(PLAIN, message) == "<assistant>a"
    assert rendered(template, answer({"type": "redacted_thinking", "data": "xyz"}, A)) == "a"
    assert rendered(CHUNKS, answer(THOUGHT, A, B)) == "<assistant>[THINK]why[/THINK]ab"
    assert rendered(CHUNKS, answer(A, reasoning="why")) == "<assistant>[THINK]why[/THINK]a"


def test_thoughts_that_a_template_refuses_beside_content_are_left_out() -> None:
    assert rendered(STRICT, answer(reasoning="why")) == "<assistant>(why)"
    assert rendered(STRICT, answer(A, reasoning="why")) == "<assistant>a"


def test_a_refusal_is_content() -> None:
    assert rendered(PLAIN, answer({"type": "refusal", "refusal": "no"}, A)) == "<assistant>no\na"
    assert rendered(PLAIN, {"role": "assistant", "refusal": "no"}) == "<assistant>no"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (user(THOUGHT), "messages.1.content"),
        (user({"type": "refusal", "refusal": "no"}), "messages.1.content"),
        (user({"type": "video"}), "messages.1.content"),
        (answer({"type": "text", "thinking": "a"}), "messages.1.content.0.thinking"),
        (answer(A, {"type": "thinking", "text": "a"}), "messages.1.content.1.text"),
        ({"role": "user", "refusal": "no"}, "messages.1.refusal"),
    ],
)
def test_a_part_that_is_not_its_messages_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        rendered(PLAIN, user(A), message)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (user({"type": "image_url", "image_url": {"url": "u"}}), "messages.0.content.0.image_url"),
        (answer(A, function_call={"name": "f", "arguments": "{}"}), "messages.0.function_call"),
        (answer(A, audio={"id": "a"}), "messages.0.audio"),
        (answer(A, prefix=True), "messages.0.prefix"),
        (answer(A, opinion=1), "messages.0.opinion"),
    ],
)
def test_a_field_of_a_message_is_refused_by_name(url: str, message: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


WORDS = st.text("ab \n", max_size=8)
CALLS = st.builds(
    lambda name, arguments: AnsweredCall(id="abcdefghi", function={"name": name, "arguments": arguments}),
    st.sampled_from(["f", "server:tool", "a/b.c"]),
    st.sampled_from(["{}", '{"a": 1}', '{"a', ""]),
)
ANSWERS = st.builds(
    AnswerMessage,
    content=st.none() | WORDS,
    tool_calls=st.none() | CALLS.map(lambda call: [call]),
    reasoning_content=st.none() | WORDS,
)


def echoes(message: AnswerMessage) -> list[dict[str, Any]]:
    """An answer as clients send it back: as it came, with nulls, by OpenAI's package, with more fields, in parts."""
    whole = message.model_dump()
    came = {
        name: value for name, value in whole.items() if value is not None or name in ("content", "refusal")
    }
    streamed = {
        **came,
        "id": "msg_1",
        "name": "assistant",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning": message.reasoning_content,
        "provider_specific_fields": {"refusal": None},
        "tool_calls": [
            {"index": index, "extra_content": {}, **call.model_dump()}
            for index, call in enumerate(message.tool_calls or [])
        ]
        or None,
    }
    parts = [{"type": "text", "text": message.content or "", "cache_control": {"type": "ephemeral"}}]
    if message.reasoning_content:
        parts.insert(0, {"type": "thinking", "thinking": message.reasoning_content, "signature": "s"})
    of_openai = ChatCompletionMessage.model_validate(came).model_dump()
    return [came, whole, of_openai, streamed, {**came, "reasoning_content": None, "content": parts}]


@pytest.mark.parametrize("name", [*families.FAMILIES, "none"])
def test_any_answer_can_be_sent_back_whole(name: str) -> None:
    tokenizer = None if name == "none" else families.tokenizer(name)
    tool = Tool.model_validate({"type": "function", "function": {"name": "f"}})

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(ANSWERS)
    def check(message: AnswerMessage) -> None:
        texts = set()
        for one in echoes(message):
            asked = [
                {"role": "user", "content": "q"},
                json.loads(json.dumps(one)),
                {"role": "user", "content": "q"},
            ]
            history = [ChatMessage.model_validate(part) for part in asked]
            texts.add(render(tokenizer, history, ServerLimits(), [tool]))
        (text,) = texts  # the same, however it came
        if message.content and not message.tool_calls:
            assert message.content.strip() in text

    check()
