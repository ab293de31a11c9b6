"""Server-sent events: one JSON object an event, as clients of OpenAI and Anthropic read them.

Cost: a `send` for each event; a task for each stream, which wakes once in `_HEARTBEAT_S`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response

from quire.server.api_errors import answer_of, error_form

__all__ = ["DONE", "ChoiceEvents", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"
_HEARTBEAT_S = 15.0  # proxies give up after 30 to 60 s without a byte, Node's fetch after 300
_COMMENT = b": still working\n\n"  # readers of events skip it
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring
# Characters that end a line for some readers (Python's splitlines) and that JSON need not escape.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def _one_line(text: str) -> bytes:
    """JSON text without characters that some reader takes for a line's end; they occur in its strings only."""
    if not text.isascii() and ("\u2028" in text or "\u2029" in text or "\x85" in text):
        text = text.translate(_LINE_ENDS)
    return text.encode("utf-8", "replace")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """name: of the event, for APIs whose events have one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _one_line(_dumps(data)) + b"\n\n"


class ChoiceEvents:
    """Events of one answer: their common beginning is written once.

    with_usage: the answer ends with an event of its usage; the other events then have a null usage, as OpenAI's do,
    unless `set_usage` gives one.
    """

    def __init__(self, head: Mapping[str, Any], *, with_usage: bool = False) -> None:
        self._front = b"data: " + _one_line(_dumps(head)[:-1]) + b',"choices":['
        self._end = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def set_usage(self, usage: Mapping[str, Any]) -> None:
        """The usage of the next events, as vLLM's have it."""
        self._end = b'],"usage":' + _one_line(_dumps(usage)) + b"}\n\n"

    def text(self, index: int, text: str) -> bytes:
        """`choice` for a plain piece of a completion's text, the most frequent event, in a third of the time."""
        return (
            b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b'
            % (self._front, index, _one_line(_quoted(text)), self._end)
        )  # fmt: skip

    def content(self, index: int, text: str) -> bytes:
        """Likewise for a chat message's content."""
        return (
            b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b'
            % (self._front, index, _one_line(_quoted(text)), self._end)
        )  # fmt: skip

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return self._front + _one_line(_dumps(choice)) + self._end


class EventStream(Response):
    """A response of events. Its headers are sent at once, and a comment after each `_HEARTBEAT_S` without an event:
    clients and proxies close a silent connection. An error is the last event, as the status has been sent.

    first: data sent right behind the headers, may be empty. end: sent behind all events, also behind an error.
    heartbeat: sent in place of the comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str] | None = None,
        *,
        end: bytes = b"",
        heartbeat: bytes = _COMMENT,
    ) -> None:
        super().__init__(
            content=None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._end = end
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        heartbeat: asyncio.Task[None] | None = None
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            heartbeat = asyncio.create_task(self._send_comments(send))
            try:
                if self._first:
                    await self._send(send, self._first)
                async for data in self._events:
                    await self._send(send, data)
            except Exception as error:
                form = error_form(scope)
                await self._send(send, event(form.body(answer_of(error)), form.event_name))
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _send(self, send: Any, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = self._loop.time()

    async def _send_comments(self, send: Any) -> None:
        while True:
            wait_s = self._sent_at + _HEARTBEAT_S - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._send(send, self._heartbeat)
