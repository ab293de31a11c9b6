"""Reads a chat completion's stream strictly: any part of another form is an error, never skipped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Streamed", "StreamedCall", "streamed"]


@dataclass
class StreamedCall:
    id: str
    name: str
    arguments: str = ""

    @property
    def value(self) -> Any:
        """The arguments; their text where they are no JSON."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


@dataclass
class Streamed:
    """One answer, put together again."""

    content: str = ""
    reasoning: str = ""
    calls: list[StreamedCall] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt: int = 0
    num_cached: int = 0


def streamed(text: str) -> Streamed:
    """text: the body of an answer to a chat request of one choice with `include_usage`, or to `/v1/messages`.

    *raises:* ValueError: it has not the form.
    """
    if text.startswith("event: "):
        return _message(text)
    *events, behind = text.split("\n\n")
    if behind or not events or events[-1] != "data: [DONE]":
        raise ValueError(f"expected events up to data: [DONE], got ...{text[-200:]!r}")
    answer, usage = Streamed(), None
    for one in events[:-1]:
        if one.startswith(":"):
            continue  # a comment, which keeps the connection alive
        if not one.startswith("data: "):
            raise ValueError(f"expected data: or a comment, got {one[:200]!r}")
        chunk = json.loads(one.removeprefix("data: "))
        if "error" in chunk:
            raise ValueError(f"expected an answer, got the error {chunk['error']}")
        if usage is not None:
            raise ValueError(f"expected the usage last, got {one[:200]!r} behind it")
        usage = chunk.get("usage")
        for choice in chunk["choices"]:
            _add(answer, choice)
    if usage is None or answer.finish_reason is None:
        raise ValueError(f"expected a finish reason and the usage, got {answer.finish_reason} and {usage}")
    answer.num_prompt = usage["prompt_tokens"]
    answer.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer


def _add(answer: Streamed, choice: dict[str, Any]) -> None:
    if answer.finish_reason is not None:
        raise ValueError(f"expected nothing behind the finish reason, got {choice}")
    delta = choice["delta"]
    answer.content += delta.get("content") or ""
    answer.reasoning += delta.get("reasoning_content") or ""
    answer.finish_reason = choice["finish_reason"]
    for call in delta.get("tool_calls") or []:
        function = call["function"]
        if call["index"] == len(answer.calls):
            if call["type"] != "function" or not call["id"] or not function["name"]:
                raise ValueError(f"expected a function's name and an id, got {call}")
            answer.calls.append(StreamedCall(call["id"], function["name"]))
        elif call["index"] != len(answer.calls) - 1 or call.get("id") or function.get("name"):
            raise ValueError(f"expected more of call {len(answer.calls) - 1}, or the next one, got {call}")
        answer.calls[-1].arguments += function.get("arguments") or ""


_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def _message(text: str) -> Streamed:
    """An answer of `/v1/messages`, in a chat's words."""
    *events, behind = text.split("\n\n")
    answer, kinds, kind, usage = Streamed(), [], "", {}
    index = -1
    for one in events:
        name, line = one.split("\n")
        data = json.loads(line.removeprefix("data: "))
        if name != f"event: {data['type']}":
            raise ValueError(f"expected the event's type as its name, got {one[:200]!r}")
        if data["type"] == "error":
            raise ValueError(f"expected an answer, got the error {data['error']}")
        if data["type"] == "ping":
            continue
        kinds.append(data["type"])
        if data["type"] == "content_block_start":
            if kind or data["index"] != index + 1:
                raise ValueError(f"expected block {index + 1} once the last has ended, got {one[:200]!r}")
            index, block = data["index"], data["content_block"]
            kind = block["type"]
            if kind == "tool_use":
                answer.calls.append(StreamedCall(block["id"], block["name"]))
        elif data["type"] in ("content_block_delta", "content_block_stop"):
            if not kind or data["index"] != index:
                raise ValueError(f"expected an event of block {index}, got {one[:200]!r}")
            delta = data.get("delta", {})
            answer.content += delta.get("text", "")
            answer.reasoning += delta.get("thinking", "")
            if "partial_json" in delta:
                answer.calls[-1].arguments += delta["partial_json"]
            kind = "" if data["type"] == "content_block_stop" else kind
        elif data["type"] == "message_delta":
            usage, answer.finish_reason = data["usage"], _REASONS[data["delta"]["stop_reason"]]
    if behind or kind or kinds[0] != "message_start" or kinds[-2:] != ["message_delta", "message_stop"]:
        raise ValueError(f"expected a message from its start to its stop, got {kinds} and {behind!r}")
    answer.num_cached = usage["cache_read_input_tokens"]
    answer.num_prompt = usage["input_tokens"] + answer.num_cached + usage["cache_creation_input_tokens"]
    return answer
