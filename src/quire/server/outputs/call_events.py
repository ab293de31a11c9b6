"""Events of calls in a text: `CallStart`, `ArgumentText` and `CallEnd` of a format, `CallDelta` and `CutCall` of
`CallParser`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from quire.server.outputs.growing_text import GrowingText

__all__ = [
    "ArgumentText",
    "CallDelta",
    "CallEnd",
    "CallFormat",
    "CallStart",
    "CutCall",
    "Event",
    "EventGenerator",
    "buffer_events",
]


@dataclass(frozen=True)
class CallDelta:
    """A piece of call `index`: its name in the first one, then pieces of its arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class CutCall:
    """Call `index` ended before it was complete. text: all of it as the model wrote it.

    The argument text sent before is a beginning only, not JSON.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    text: str


@dataclass(frozen=True)
class ArgumentText:
    """A piece of the arguments' JSON text. The last character of a JSON object comes when the call is complete."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete. end: the place behind it."""

    end: int


Event = CallStart | ArgumentText | CallEnd
EventGenerator = Generator[Event | None, None, int | None]
"""Reads calls at a text's beginning: yields events, and None while it needs more text; returns the place behind the
calls, None where there is no call. A call that has begun and is not complete by then is cut."""


class CallFormat(Protocol):
    """A format of calls. starts: texts that a call begins with. at_line_start: only at the beginning of a line."""

    @property
    def starts(self) -> tuple[str, ...]: ...
    @property
    def at_line_start(self) -> bool: ...
    def read(self, text: GrowingText) -> EventGenerator: ...


def buffer_events(run: EventGenerator) -> EventGenerator:
    """A reader whose events are held back until it has ended, and yielded only if all of its calls are complete."""
    events: list[Event] = []
    while True:
        try:
            event = next(run)
        except StopIteration as stop:
            end = stop.value
            break
        if event is None:
            yield None
        else:
            events.append(event)
    if end is None or not events or not isinstance(events[-1], CallEnd):
        return None
    yield from events
    return end
