"""Parses an answer's text in pieces and joins the results."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from quire.server.outputs.call_events import CallDelta, CutCall
from quire.server.outputs.reasoning import ReasoningSpan

__all__ = ["Read", "pieces_of", "read"]


class Reader(Protocol):
    def push(
        self, text: str, *, final: bool = False
    ) -> Iterator[ReasoningSpan | str | CallDelta | CutCall]: ...


class Read(NamedTuple):
    """calls: name and arguments of the whole ones. cut: name, arguments and raw text of those that are not."""

    said: str
    calls: list[tuple[str, str]]
    cut: list[tuple[str, str, str]]


def read(reader: Reader, pieces: Iterable[str]) -> Read:
    """The last of the pieces is the final one."""
    said, calls, cut = "", {}, []
    given = list(pieces)
    for number, piece in enumerate(given):
        for part in reader.push(piece, final=number == len(given) - 1):
            if isinstance(part, str):
                assert part
                said += part
            elif isinstance(part, CutCall):
                cut.append((*calls.pop(part.index), part.text))
            else:
                assert isinstance(part, CallDelta)
                if part.name is not None:
                    assert (part.index, part.arguments) == (len(calls) + len(cut), "")
                    calls[part.index] = (part.name, "")
                assert part.index == len(calls) + len(cut) - 1
                name, arguments = calls[part.index]
                calls[part.index] = (name, arguments + part.arguments)
    return Read(said, list(calls.values()), cut)


def pieces_of(text: str, seed: int) -> list[str]:
    """A text cut at random; some pieces are empty."""
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
