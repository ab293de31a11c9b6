"""A session's next turn is prepared: it computes its new text, although the template shows the last answer anew."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from support import families
from support.chat_stream import streamed
from support.families import Family
from support.running_server import running
from support.scripted_serve import Script, runner_of

from quire.engine import runner
from quire.sampling import grammar
from quire.server.messages import render
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.service import Service
from quire.server.settings import ServerLimits, ServerSettings

# In the real templates' shapes: how each shows earlier answers, their thoughts and calls.
_QWEN3 = """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set thoughts = message.reasoning_content or '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}{{- (message.content or '').lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# Thoughts never come back; the prompt opens new ones.
_R1 = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = (message.content or '').split('</think>')[-1] %}
{{- '<｜Assistant｜>' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{ '<｜User｜>' + message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
# Earlier answers have empty thoughts.
_GLM = """[gMASK]<sop>{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n' }}
{%- if loop.index0 > ns.last and message.reasoning_content %}
{{- '<think>' + message.reasoning_content.strip() + '</think>' }}{% else %}{{ '<think></think>' }}{% endif %}
{%- if message.content %}{{ '\\n' + message.content.strip() }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# Channels: an answer ends with another token than it is shown with.
_GPT_OSS = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}
{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}{{ '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
{{- call.function.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|channel|>final<|message|>' }}{% endif %}"""

_CALLS = ("<tool_call>", "</tool_call>")
_THOUGHTS = ("<think>", "</think>")
SHAPES = {
    "qwen3": Family(_QWEN3, special=("<|im_start|>", "<|im_end|>"), plain=(*_CALLS, *_THOUGHTS)),
    "deepseek-r1": Family(
        _R1,
        special=(
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
            "<|im_end|>",
        ),
        plain=(*_CALLS, *_THOUGHTS),
    ),
    "glm": Family(
        _GLM,
        special=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
        plain=(*_CALLS, *_THOUGHTS),
        eos="<|user|>",
    ),
    "gpt-oss": Family(
        _GPT_OSS,
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        eos="<|return|>",
    ),
    "hermes": families.FAMILIES["hermes"],
    "llama3": families.FAMILIES["llama3"],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
LONG = "I weigh this and that, then I look at it from the other side, and I begin again. " * 6
ANSWERS = {
    "plain": "The answer is forty-two, for all that is known today.",
    "thought": f"<think>\n{LONG}\n</think>\n\nThe answer is forty-two, for all that is known today.",
    "call": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "thought-call": f'<think>\n{LONG}\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>',
}
WRITES = {  # what the family's models write
    "qwen3": tuple(ANSWERS),
    "deepseek-r1": ("thought", "thought-call"),
    "glm": tuple(ANSWERS),
    "gpt-oss": ("plain",),
    "hermes": ("plain", "call"),
    "llama3": ("plain",),
}


BY_DEFAULT = ("qwen3", "gpt-oss")  # the other shapes have the mark ci


def written_kinds(*kinds: str) -> list[Any]:
    """(shape, kind) of those kinds of answers that the shape's models write."""
    return [
        pytest.param(name, kind, marks=[] if name in BY_DEFAULT else pytest.mark.ci)
        for name in SHAPES
        for kind in kinds
        if kind in WRITES[name]
    ]


@pytest.fixture(scope="module", params=BY_DEFAULT[:1])
def shaped(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Service]]:
    """(shape, URL, service) of a server whose model writes the answer that a prompt's last marker names."""
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, f"{name}-shape", SHAPES[name])
        words = families.tokenizer(f"{name}-shape")
        opened = "<think>\n" if name == "deepseek-r1" else ""  # by the prompt
        answers = {
            f"[{kind}]": [words(text.removeprefix(opened) + words.eos_token)["input_ids"]] * 50
            for kind, text in ANSWERS.items()
        }
        script = Script({"answers": answers, "tool": "", "else": []}, words)
        patch.setattr(runner, "Runner", runner_of(script))
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with families.llm(f"{name}-shape") as llm, running(llm, ServerSettings()) as (url, app):
            yield name, url, app.state.service  # type: ignore[attr-defined]


def ask(
    url: str, messages: list[dict[str, Any]], *, stream: bool, session: str, **more: Any
) -> tuple[Any, Any]:
    """The message of an answer as the client keeps it, and the usage."""
    body = {
        "messages": messages,
        "stream": stream,
        "session_id": session,
        "max_tokens": 600,
        "temperature": 0,
        **more,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["message"], answer.json()["usage"]
    got = streamed(answer.text)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": got.content,
        "reasoning_content": got.reasoning,
    }
    if got.calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in got.calls
        ]
    usage = [
        json.loads(line[6:]).get("usage") for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    return message, usage[-1]


def num_new(family: str, messages: list[dict[str, Any]], tools: Any) -> int:
    """Tokens of a prompt from the last message's content on."""
    words = families.tokenizer(family)
    told = [ChatMessage.model_validate(one) for one in messages]
    text = render(words, told, ServerLimits(), [Tool.model_validate(one) for one in tools])
    return len(words(text[text.rindex(messages[-1]["content"]) :])["input_ids"])


def num_turns(service: Service, outcome: str) -> float:
    return service.metrics.prepared_turns.labels(outcome)._value.get()


def settle(service: Service) -> None:
    """Waits until the turns that wait are prepared."""
    deadline = time.monotonic() + 30
    while not service.next_turns.is_done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.next_turns.is_done


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("shaped", "kind"), written_kinds(*ANSWERS), indirect=["shaped"])
def test_the_next_turn_computes_its_new_text(
    shaped: tuple[str, str, Service], kind: str, stream: bool
) -> None:
    name, url, service = shaped
    session = f"{kind}-{stream}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{session} What is it? [{kind}]"}]
    more = {"tools": TOOLS} if "call" in kind else {}
    for turn in range(2):
        message, _ = ask(url, messages, stream=stream, session=session, **more)
        assert bool(message.get("reasoning_content")) == ("thought" in kind)
        assert bool(message.get("tool_calls")) == ("call" in kind)
        settle(service)
        if "call" not in kind:
            message = {"role": "assistant", "content": message["content"]}  # as most clients send it back
            new = {"role": "user", "content": f"And what is it now, turn {turn}? [{kind}]"}
        else:
            new = {
                "role": "tool",
                "tool_call_id": message["tool_calls"][0]["id"],
                "content": f"It is {turn}. [{kind}]",
            }
        messages += [message, new]
        words = num_new(f"{name}-shape", messages, more.get("tools", ()))
        _, usage = ask(url, messages, stream=stream, session=f"{session}-other", **more)
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert computed <= words + 2, (computed, words)  # a token may cross into the new text
        settle(service)
    assert num_turns(service, "failed") == 0
    first, second = service.session_turns.get("default", session)
    assert first.prepared == 0
    assert second.prepared <= sum(second.found.values())
    assert (second.prepared > 0) or kind not in ("thought", "thought-call")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("shaped", "kind"), written_kinds("thought", "thought-call"), indirect=["shaped"])
def test_by_anthropics_api(shaped: tuple[str, str, Service], kind: str, stream: bool) -> None:
    """Its next prompt is found up to the new text, as a chat's."""
    name, url, service = shaped
    asked = f"messages {kind} {stream}. What is it? [{kind}]"
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    body: dict[str, Any] = {"max_tokens": 600, "temperature": 0}
    if "call" in kind:
        body["tools"] = [
            {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {})}
            for tool in TOOLS
        ]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        more = {"model": model, "max_tokens": 600, "tools": body.get("tools", [])}
        with_session = {"temperature": 0, "session_id": f"messages-{kind}-{stream}"}
        if stream:
            with client.messages.stream(**more, messages=messages, extra_body=with_session) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**more, messages=messages, extra_body=with_session)
        settle(service)
        assert answer.content[0].type == "thinking"
        blocks: list[Any] = [block for block in answer.content if "call" in kind or block.type != "thinking"]
        new: Any = f"And what is it now? [{kind}]"
        if "call" in kind:
            new = [{"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": new}]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": new}]
        usage = client.messages.create(**more, messages=messages).usage
        words = families.tokenizer(f"{name}-shape")
        least = len(words(f"And what is it now? [{kind}]")["input_ids"])
        assert usage.input_tokens <= least + 16, (
            usage,
            least,
        )  # the text, and the template's words behind it
        assert usage.cache_read_input_tokens > least
    assert num_turns(service, "failed") == 0


def test_a_server_prepares_nothing_without_a_session_or_with_the_flag_off(
    shaped: tuple[str, str, Service],
) -> None:
    _, url, service = shaped
    before = num_turns(service, "done")
    body = {"messages": [{"role": "user", "content": "[plain] no session"}], "max_tokens": 5}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    service.next_turns.max_tokens, kept = 0, service.next_turns.max_tokens
    try:
        ask(url, [{"role": "user", "content": "[plain] off"}], stream=False, session="off")
    finally:
        service.next_turns.max_tokens = kept
    settle(service)
    assert num_turns(service, "done") == before
    too_long = httpx.post(f"{url}/v1/chat/completions", json={**body, "session_id": "x" * 257}, timeout=60)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["param"] == "session_id"


def test_preparations_are_no_requests_in_the_counts(shaped: tuple[str, str, Service]) -> None:
    _, url, service = shaped
    stats = service.engine.submit_between_steps(lambda: service.engine.engine.stats()).result()
    ask(url, [{"role": "user", "content": "[plain] count this one"}], stream=False, session="counted")
    settle(service)
    after = service.engine.submit_between_steps(lambda: service.engine.engine.stats()).result()
    assert after["num_finished_requests"] == stats["num_finished_requests"] + 1
