"""Server-sent events: one JSON object an event, as OpenAI's clients read them.

Cost: a `send` for each event, no task of its own; a client that has gone is noticed at the next one, and by
`receive` while there is none to send.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response

from quire.server.errors import answer_of, error_body

__all__ = ["DONE", "ChoiceEvents", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring
# What ends a line for some readers (Python's splitlines among them) and is no control character of JSON's.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def _one_line(text: str) -> bytes:
    """JSON as a line that every reader takes for one. It has such characters in strings alone."""
    if not text.isascii() and ("\u2028" in text or "\u2029" in text or "\x85" in text):
        text = text.translate(_LINE_ENDS)
    return text.encode("utf-8", "replace")


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + _one_line(_dumps(data)) + b"\n\n"


class ChoiceEvents:
    """Events of one answer: what they have in common is written once.

    with_usage: the answer ends with an event of its usage, so that the others say they have none, as OpenAI's do.
    """

    def __init__(self, head: Mapping[str, Any], *, with_usage: bool = False) -> None:
        self._front = b"data: " + _one_line(_dumps(head)[:-1]) + b',"choices":['
        self._end = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def text(self, index: int, text: str) -> bytes:
        """`choice` of a plain piece of a completion's text, the event there are most of, in a third of the time."""
        return (
            b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b'
            % (self._front, index, _one_line(_quoted(text)), self._end)
        )  # fmt: skip

    def content(self, index: int, text: str) -> bytes:
        """Likewise of a chat message's content."""
        return (
            b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b'
            % (self._front, index, _one_line(_quoted(text)), self._end)
        )  # fmt: skip

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return self._front + _one_line(_dumps(choice)) + self._end


class EventStream(Response):
    """A response of events. `first`: the first one, already there, so that what fails before it is a plain error."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(
            content=None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.current_task()
        assert sending is not None
        left = False

        async def monitor() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            sending.cancel()

        watching = asyncio.create_task(monitor())
        try:
            await self._send(send, self._first)
            async for data in self._events:
                await self._send(send, data)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not left:
                raise
        except Exception as error:  # the status is sent: the error is the last event
            await self._send(send, event(error_body(answer_of(error))))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            await self._events.aclose()

    async def _send(self, send: Any, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
