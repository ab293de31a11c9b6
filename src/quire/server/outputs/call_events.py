"""Events of calls in a text: `Name`, `More` and `Whole` of a form, `CallDelta` and `CutCall` of the whole reader."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from quire.server.outputs.growing_text import GrowingText

__all__ = ["CallDelta", "CallFormat", "CutCall", "Event", "More", "Name", "Run", "Whole", "held"]


@dataclass(frozen=True)
class CallDelta:
    """More of call `index`: its name with the first of them, then pieces of its arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class CutCall:
    """Call `index` ended before it was whole. text: all of it as the model wrote it.

    The arguments told of it are a beginning, and no JSON text.
    """

    index: int
    text: str


@dataclass(frozen=True)
class Name:
    """A call begins."""

    text: str


@dataclass(frozen=True)
class More:
    """More of its arguments' JSON text. The last character of a JSON object comes when the call is whole."""

    text: str


@dataclass(frozen=True)
class Whole:
    """The call is whole. end: the place behind it."""

    end: int


Event = Name | More | Whole
Run = Generator[Event | None, None, int | None]
"""Reads calls at a text's beginning: yields events, None while it needs more text; returns the place behind what it
read, None where there is no call. A call that is begun and not whole by then is cut."""


class CallFormat(Protocol):
    """A form of calls. starts: the texts that it begins with. at_line_start: only at the beginning of a line."""

    @property
    def starts(self) -> tuple[str, ...]: ...
    @property
    def at_line_start(self) -> bool: ...
    def read(self, text: GrowingText) -> Run: ...


def held(run: Run) -> Run:
    """A run whose events are held back until it has ended, and told only if all of its calls are whole."""
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
    if end is None or not events or not isinstance(events[-1], Whole):
        return None
    yield from events
    return end
