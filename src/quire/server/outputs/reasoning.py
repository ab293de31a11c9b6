"""Reasoning ("thoughts"): the text that a reasoning model writes between two markers before its answer.

A model has reasoning if its tokenizer or its chat template has the markers. They count at an answer's beginning only;
some templates write the first marker themselves, so that an answer begins within the reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.outputs.growing_text import overlap
from quire.server.outputs.markers import added_tokens
from quire.server.outputs.tool_call_format import template_text

__all__ = ["ReasoningFormat", "ReasoningParser", "ReasoningSpan", "reasoning_format_of"]


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers before and behind reasoning."""

    begin: str
    end: str


_FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


def reasoning_format_of(tokenizer: Any) -> ReasoningFormat | None:
    """The format of a model's reasoning; None for a model without reasoning."""
    added, template = added_tokens(tokenizer), template_text(tokenizer)
    for markers in _FORMATS:
        in_template = markers.begin in template and markers.end in template
        if {markers.begin, markers.end} <= added.keys() or in_template:
            return markers
    return None


@dataclass(frozen=True)
class ReasoningSpan:
    """A piece of reasoning."""

    text: str


class ReasoningParser:
    """Splits growing text into reasoning and content; the markers and blanks around them are omitted.

    reasoning_format: None for a model without reasoning. is_open: the prompt ends with the first marker.
    """

    def __init__(self, reasoning_format: ReasoningFormat | None, *, is_open: bool = False) -> None:
        self._format = reasoning_format
        self._is_open = is_open
        self._text = ""  # not yet decided
        self._step = "content" if reasoning_format is None else "begin"

    def push(self, text: str, *, final: bool = False) -> Iterator[ReasoningSpan | str]:
        """Takes more text and yields the decided parts. final: no more text will come."""
        self._text += text
        if self._format is not None and self._step == "begin":
            self._begin(self._format, final=final)
        if self._format is not None and self._step in ("blank", "thoughts"):
            yield from self._think(self._format, final=final)
        if self._step == "behind":
            self._text = self._text.lstrip()
            self._step = "content" if self._text else "behind"
        if self._step == "content" and self._text:
            content, self._text = self._text, ""
            yield content

    def _begin(self, markers: ReasoningFormat, *, final: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(markers.begin):
            self._text, self._step = text[len(markers.begin) :], "blank"
        elif final or not markers.begin.startswith(text):
            self._step = "blank" if self._is_open else "content"

    def _think(self, markers: ReasoningFormat, *, final: bool) -> Iterator[ReasoningSpan]:
        if self._step == "blank":
            self._text = self._text.lstrip()
        thought, has_ended, behind = self._text.partition(markers.end)
        if not has_ended and not final:
            thought = thought[: len(thought) - overlap(thought, markers.end)]
        thought = thought.rstrip()
        if thought:
            self._step = "thoughts"
            yield ReasoningSpan(thought)
        self._text = self._text[len(thought) :]
        if has_ended:
            self._text, self._step = behind, "behind"
        elif final:
            self._text = ""
