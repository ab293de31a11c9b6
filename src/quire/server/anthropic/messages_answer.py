"""An answer as Anthropic's message, as one body or as its events.

The events of a stream: message_start, ping; for each block content_block_start, content_block_delta,
content_block_stop; message_delta with the reason of the end and the usage, message_stop. The first comes with the first
output, since only then it is known how much of the prompt was cached; a ping keeps the connection open until then.

Invariants
    M1  the events of a stream, put together, are the whole answer; except that a call which the answer's end cuts has
        begun as tool_use in a stream, and is text in a whole answer.
    M2  the three counts of input tokens add up to the prompt's length.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.anthropic.messages_bodies import CacheCreation, MessagesRequest, MessagesUsage
from quire.server.anthropic.messages_errors import request_id_header
from quire.server.anthropic.messages_prompt import signature_of
from quire.server.chat import new_call_id
from quire.server.http.sse import EventStream, event
from quire.server.kept_prefixes import KeptCounts
from quire.server.outputs.call_events import CallDelta, CutCall
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.reasoning import ReasoningSpan
from quire.server.schemas.chat_bodies import AnsweredCall, AnswerMessage
from quire.server.service import Answer, RunningRequests, Service, id_of_answer

__all__ = ["MessagesWriter"]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


_PING = _event("ping")


class _Blocks:
    """The blocks of a growing answer: events for a stream, and `whole` when it has ended.

    has_one_call: calls behind the first are left out. omits_thoughts: thinking comes without its text.
    """

    def __init__(self, parser: OutputParser, *, has_one_call: bool, omits_thoughts: bool) -> None:
        self.parser = parser
        self.whole: list[dict[str, Any]] = []
        self._has_one_call = has_one_call
        self._omits_thoughts = omits_thoughts
        self._thoughts: list[str] = []
        self._pieces: list[str] = []  # of the open block
        self._is_open = False

    def push(self, text: str, *, final: bool) -> Iterator[bytes]:
        """The events of more text. final: no more will come."""
        for part in self.parser.push(text, final=final):
            if isinstance(part, ReasoningSpan):
                yield from self._grow("thinking", part.text)
            elif isinstance(part, str):
                yield from self._grow("text", part)
            elif self._has_one_call and part.index > 0:
                continue
            elif isinstance(part, CutCall):
                self._is_open = False
                yield _event("content_block_stop", index=len(self.whole) - 1)
                self.whole[-1] = {"type": "text", "text": part.text}
            else:
                yield from self._call(part)
        if final:
            yield from self._close()

    def message(self) -> AnswerMessage:
        """The whole answer as a chat's message."""
        calls = [
            AnsweredCall(
                id=block["id"],
                function={"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
            )
            for block in self.whole
            if block["type"] == "tool_use"
        ]
        return AnswerMessage(
            content="\n".join(block["text"] for block in self.whole if block["type"] == "text"),
            tool_calls=calls or None,
            reasoning_content="\n".join(self._thoughts) or None,
        )

    def _call(self, part: CallDelta) -> Iterator[bytes]:
        if part.name is not None:
            yield from self._close()
            yield self._open({"type": "tool_use", "id": new_call_id(), "name": part.name, "input": {}})
        if part.arguments:
            self._pieces.append(part.arguments)
            yield self._delta(type="input_json_delta", partial_json=part.arguments)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self.whole[-1]["type"] != kind:
            yield from self._close()
            signature = {"signature": ""} if kind == "thinking" else {}
            yield self._open({"type": kind, kind: "", **signature})
        self._pieces.append(text)
        if kind == "text" or not self._omits_thoughts:
            yield self._delta(type=f"{kind}_delta", **{kind: text})

    def _open(self, block: dict[str, Any]) -> bytes:
        self._is_open, self._pieces = True, []
        self.whole.append(dict(block))
        return _event("content_block_start", index=len(self.whole) - 1, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=len(self.whole) - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        block, text = self.whole[-1], "".join(self._pieces)
        self._is_open = False
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        elif block["type"] == "text":
            block["text"] = text
        else:
            self._thoughts.append(text)
            block["thinking"] = "" if self._omits_thoughts else text
            block["signature"] = signature_of(text, is_omitted=self._omits_thoughts)
            yield self._delta(type="signature_delta", signature=block["signature"])
        yield _event("content_block_stop", index=len(self.whole) - 1)


def _input(text: str) -> dict[str, Any]:
    """A call's arguments; this API has objects only."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


class MessagesWriter:
    """The answer to one request. when_answered: called with the message of a whole answer."""

    def __init__(
        self,
        body: MessagesRequest,
        service: Service,
        params: SamplingParams,
        output_format: OutputFormat,
        when_answered: Callable[[AnswerMessage], None] | None = None,
    ) -> None:
        self._body = body
        self._service = service
        self._params = params
        self._kept = KeptCounts()
        self._when_answered = when_answered
        self._answer = Answer.of(params.n)
        choice, thinking = body.tool_choice, body.thinking
        self._blocks = _Blocks(
            OutputParser(output_format),
            has_one_call=bool(choice and choice.disable_parallel_tool_use),
            omits_thoughts=thinking is not None and thinking.display == "omitted",
        )

    async def respond(self, running: RunningRequests) -> Response:
        if self._body.stream:
            events = self._events(running)
            return EventStream(await anext(events), events, request_id_header(), heartbeat=_PING)
        with running:
            async with aclosing(running.outputs()) as outputs:
                async for output in outputs:
                    self._take(output, running)
            text = self._answer.texts[0]
            for _ in self._blocks.push(text, final=True):
                pass
        end = self._end()
        more = await self._has_ended(running, end)
        message = {**self._head(), **end, "content": self._blocks.whole, "usage": self._usage(), **more}
        return JSONResponse(message, headers=request_id_header())

    async def _events(self, running: RunningRequests) -> AsyncGenerator[bytes]:
        has_begun = False
        with running:
            yield b""  # from here on the request ends with this generator
            async with aclosing(running.outputs()) as outputs:
                async for output in outputs:
                    self._take(output, running)
                    if not has_begun:
                        has_begun = True
                        yield _event("message_start", message=self._head())
                        yield _PING
                    part = output.outputs[0]
                    for data in self._blocks.push(part.new_text, final=part.finish_reason is not None):
                        yield data
        end = self._end()
        more = await self._has_ended(running, end)
        yield _event("message_delta", delta=end, usage=self._usage(), **more)
        yield _event("message_stop")

    async def _has_ended(self, running: RunningRequests, end: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `RunningRequests.end`. end: as `_end`."""
        if self._when_answered is not None and self._blocks.whole:
            self._when_answered(self._blocks.message())
        return await running.end(has_calls=end["stop_reason"] == "tool_use")

    def _take(self, output: RequestOutput, running: RunningRequests) -> None:
        self._answer.add(output)
        self._kept = running.kept_counts.get(0, self._kept)

    def _head(self) -> dict[str, Any]:
        return {
            "id": id_of_answer("msg"),
            "type": "message",
            "role": "assistant",
            "model": self._service.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        answer = self._answer
        reason = self._blocks.parser.finish_reason(answer.finish_reasons[0])
        matched = answer.stop_reasons[0]
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "stop" and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        if reason != "length":
            return {"stop_reason": "end_turn", "stop_sequence": None}
        num_generated = answer.num_generated_tokens
        num_tokens = answer.num_prompt_tokens + num_generated
        is_full = num_tokens >= self._service.engine.max_model_len and num_generated < self._body.max_tokens
        return {
            "stop_reason": "model_context_window_exceeded" if is_full else "max_tokens",
            "stop_sequence": None,
        }

    def _usage(self) -> dict[str, Any]:
        answer, created = self._answer, self._kept.num_computed
        usage = MessagesUsage(
            input_tokens=answer.num_prompt_tokens - answer.num_cached_tokens - created,
            cache_read_input_tokens=answer.num_cached_tokens,
            cache_creation_input_tokens=created,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=self._kept.computed.get(300.0, 0),
                ephemeral_1h_input_tokens=self._kept.computed.get(3600.0, 0),
            ),
            output_tokens=answer.num_generated_tokens,
        )
        return usage.model_dump()
