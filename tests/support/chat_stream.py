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
    """text: the body of an answer to a request of one choice, with `include_usage`. *raises:* ValueError."""
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
