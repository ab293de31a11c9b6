"""One conversation through `/v1/chat/completions`, `/v1/messages` and `/v1/responses`, alone and in rotation: the same
prompts token by token, the same answers, and each turn is found in the cache where the turn before left it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support import families
from support.agents_script import THOUGHT, Answer, Call, tokens
from support.running_server import running
from support.scripted_serve import Script, runner_of

from quire.engine import runner
from quire.sampling import grammar
from quire.scheduler.request import Request
from quire.server import chat, response_output
from quire.server.anthropic import messages_answer
from quire.server.settings import ServerSettings

# Family -> whether its models write text before a call, and several calls in one answer.
FAMILIES = {"qwen3": True, "hermes": True, "mistral11": True, "llama3": False}
DEFAULT = ("qwen3", "mistral11")  # the others have the mark ci
SCHEMA = {"look": {"at": {"type": "string"}, "deep": {"type": "object"}}, "rest": {}}
PARAMETERS = {name: {"type": "object", "properties": properties} for name, properties in SCHEMA.items()}
SYSTEM = "You are kind.\nYou look before you speak."


@dataclass
class Said:
    """An answer, in no API's form. calls: (id, name, arguments as JSON text)."""

    text: str
    thought: str | None
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def content(self) -> tuple[str, str | None, list[tuple[str, Any]]]:
        return self.text, self.thought, [(name, json.loads(arguments)) for _, name, arguments in self.calls]


History = list[tuple[str, Any]]  # ("user", text), ("answer", Said) and ("results", texts by call id)


@dataclass
class Got:
    said: Said
    num_prompt: int
    num_cached: int
    response_id: str | None = None


def of_chat(url: str, history: History, stream: bool, more: dict[str, Any], before: Got | None) -> Got:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for kind, one in history:
        if kind == "user":
            messages.append({"role": "user", "content": one})
        elif kind == "results":
            messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in one.items()]
        else:
            message: dict[str, Any] = {"role": "assistant", "content": one.text or None}
            if one.thought is not None:
                message["reasoning_content"] = one.thought
            if one.calls:
                message["tool_calls"] = [
                    {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    for id, name, arguments in one.calls
                ]
            messages.append(message)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in PARAMETERS.items()
    ]
    body = {"messages": messages, "tools": tools, "max_tokens": 300, **more}
    if not stream:
        answer = post(url, "chat/completions", body)
        message, usage = answer["choices"][0]["message"], answer["usage"]
    else:
        message, usage = {"content": "", "reasoning_content": ""}, {}
        for event in events(url, "chat/completions", {**body, "stream_options": {"include_usage": True}}):
            usage = event["usage"] or usage
            for delta in (choice["delta"] for choice in event["choices"]):
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for part in delta.get("tool_calls", ()):
                    calls = message.setdefault("tool_calls", [])
                    if "id" in part:
                        calls.append({"id": part["id"], "function": {**part["function"], "arguments": ""}})
                    calls[-1]["function"]["arguments"] += part["function"].get("arguments", "")
    said = Said(
        message["content"] or "",
        message.get("reasoning_content") or None,
        [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
    )
    return Got(said, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def of_messages(url: str, history: History, stream: bool, more: dict[str, Any], before: Got | None) -> Got:
    messages: list[dict[str, Any]] = []
    for kind, one in history:
        if kind == "user":
            messages.append({"role": "user", "content": one})
        elif kind == "results":
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in one.items()]
            messages.append({"role": "user", "content": blocks})
        else:
            blocks = []
            if one.thought is not None:
                blocks.append({"type": "thinking", "thinking": one.thought, "signature": "elsewhere"})
            if one.text:
                blocks.append({"type": "text", "text": one.text})
            blocks += [
                {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
                for id, name, arguments in one.calls
            ]
            messages.append({"role": "assistant", "content": blocks})
    tools = [{"name": name, "input_schema": schema} for name, schema in PARAMETERS.items()]
    body = {"system": SYSTEM, "messages": messages, "tools": tools, "max_tokens": 300, **more}
    if not stream:
        answer = post(url, "messages", body)
        blocks, usage = answer["content"], answer["usage"]
    else:
        blocks, usage = [], {}
        for event in events(url, "messages", body):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}.get(
                    event["delta"]["type"]
                )
                if name is not None:
                    got = event["delta"]["partial_json" if name == "json" else name]
                    blocks[-1][name] = blocks[-1].get(name, "") + got
            elif event["type"] == "message_delta":
                usage = event["usage"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    said = Said(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        thoughts[0] if thoughts else None,
        [
            (block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            for block in blocks
            if block["type"] == "tool_use"
        ],
    )
    num_cached = usage["cache_read_input_tokens"]
    num_others = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    return Got(said, num_cached + num_others, num_cached)


def of_responses(url: str, history: History, stream: bool, more: dict[str, Any], before: Got | None) -> Got:
    """Continues `before` by its id, if that was a response; else sends all items."""
    is_continued = before is not None and before.response_id is not None
    items: list[dict[str, Any]] = []
    for kind, one in history[-1:] if is_continued else history:
        if kind == "user":
            items.append({"role": "user", "content": one})
        elif kind == "results":
            items += [
                {"type": "function_call_output", "call_id": id, "output": text} for id, text in one.items()
            ]
        else:
            if one.thought is not None:
                thought = [{"type": "reasoning_text", "text": one.thought}]
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought})
            if one.text:
                items.append({"role": "assistant", "content": [{"type": "output_text", "text": one.text}]})
            items += [
                {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
                for id, name, arguments in one.calls
            ]
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in PARAMETERS.items()]
    body = {"instructions": SYSTEM, "input": items, "tools": tools, "max_output_tokens": 300, **more}
    if is_continued:
        body["previous_response_id"] = before.response_id  # type: ignore[union-attr]
    response = events(url, "responses", body)[-1]["response"] if stream else post(url, "responses", body)
    said = Said("", None)
    for item in response["output"]:
        if item["type"] == "reasoning":
            said.thought = item["content"][0]["text"]
        elif item["type"] == "message":
            said.text += item["content"][0]["text"]
        else:
            said.calls.append((item["call_id"], item["name"], item["arguments"]))
    usage = response["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Got(said, usage["input_tokens"], cached, response["id"])


Door = Callable[[str, History, bool, dict[str, Any], Got | None], Got]
CHAT, MESSAGES, RESPONSES = of_chat, of_messages, of_responses


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{url}/v1/{path}", json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class RecordingScript(Script):
    """A script that keeps each request's prompt. written: the answers' tokens, by turn."""

    def __init__(self, script: dict[str, Any], tokenizer: Any) -> None:
        super().__init__(script, tokenizer)
        self.prompts: dict[str, list[int]] = {}
        self.written: list[list[int]] = []

    def token(self, request: Request, position: int) -> int | None:
        self.prompts.setdefault(request.request_id, list(request.prompt_token_ids))
        return super().token(request, position)


def answers_of(has_several: bool) -> list[Answer]:
    look = Call("look", {"at": 'é "quoted"\n', "deep": {"a": [1, None, {"b": ""}]}})
    second = (Call("look", {"at": "b", "deep": {}}), Call("rest")) if has_several else (Call("rest"),)
    return [
        Answer("I look." if has_several else "", (look,)),
        Answer("", second),
        Answer("It is\n\n- one\n- two"),
        Answer("You are welcome."),
        Answer("", (Call("look", {"at": "again", "deep": {}}),)),
        Answer("Good bye."),
    ]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.ci) for name in FAMILIES],
)
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[str, RecordingScript, list[Answer]]]:
    words, answers = families.tokenizer(request.param), answers_of(FAMILIES[request.param])

    def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"name": tool, "arguments": arguments}

    by_marker = {f"[turn {turn}]": [tokens(words, one, call)] * 20 for turn, one in enumerate(answers)}
    script = RecordingScript({"answers": by_marker, "tool": "", "else": []}, words)
    script.written = [said[0] for said in by_marker.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Runner", runner_of(script))
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with (
            families.llm(request.param) as llm,
            running(llm, ServerSettings(prepare_next_turn=0)) as (url, _),
        ):
            yield url, script, answers


@pytest.fixture
def with_counted_ids(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins to count: ids of calls are the same in each conversation, for templates that show them."""

    def begin() -> None:
        numbers = itertools.count()
        for module in (chat, messages_answer, response_output):
            monkeypatch.setattr(module, "new_call_id", lambda: f"{next(numbers):09}")

    return begin


def converse(
    url: str, script: RecordingScript, doors: Sequence[Door], num_turns: int, *, stream: bool, salt: str
) -> tuple[list[Got], list[list[int]]]:
    """The answers and the prompts. doors: of the turns, in rotation."""
    history: History = [("user", "What do you see? [turn 0]")]
    got: list[Got] = []
    prompts: list[list[int]] = []
    before: Got | None = None
    for turn in range(num_turns):
        script.prompts.clear()
        more = {"temperature": 0, "cache_salt": salt}
        before = doors[turn % len(doors)](url, history, stream, more, before)
        got.append(before)
        (prompt,) = script.prompts.values()
        prompts.append(prompt)
        history.append(("answer", before.said))
        ids = [id for id, _, _ in before.said.calls]
        words = f"[turn {turn + 1}]"
        if ids:
            history.append(("results", {id: f"seen {at} {words}" for at, id in enumerate(ids)}))
        else:
            history.append(("user", f"And then? {words}"))
    return got, prompts


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["whole", "stream"])
def test_one_conversation_by_every_door(
    scripted: tuple[str, RecordingScript, list[Answer]],
    with_counted_ids: Callable[[], None],
    stream: bool,
) -> None:
    url, script, answers = scripted
    rotations: dict[str, Sequence[Door]] = {
        "chat": (CHAT,),
        "messages": (MESSAGES,),
        "responses": (RESPONSES,),
        "rotated": (CHAT, MESSAGES, RESPONSES),
        "backwards": (RESPONSES, MESSAGES, CHAT),
    }
    first: tuple[list[Got], list[list[int]]] | None = None
    for name, doors in rotations.items():
        with_counted_ids()
        got, prompts = converse(url, script, doors, len(answers), stream=stream, salt=f"{name} {stream}")
        for turn, (one, answer) in enumerate(zip(got, answers, strict=True)):
            text, thought, calls = one.said.content
            assert text.strip() == answer.text, (name, turn)
            assert thought in (None, THOUGHT)
            assert calls == [(call.tool, call.arguments) for call in answer.calls], (name, turn)
            assert one.num_prompt == len(prompts[turn])
        first = first or (got, prompts)
        assert prompts == first[1], name
        assert [one.said.content for one in got] == [one.said.content for one in first[0]], name
        assert [one.num_cached for one in got] == [one.num_cached for one in first[0]], name
        assert got[0].num_cached == 0
        for turn in range(1, len(got)):  # found as far as it repeats what the turn before left
            left = [*prompts[turn - 1], *script.written[turn - 1]]
            pairs = enumerate(zip(left, prompts[turn], strict=False))
            num_same = next((at for at, (one, other) in pairs if one != other), len(left))
            assert num_same >= len(prompts[turn - 1]) - 2
            assert got[turn].num_cached >= num_same - 1, (name, turn)
