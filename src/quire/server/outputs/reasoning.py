"""Thoughts: what a reasoning model writes between two markers before its answer.

A model has them if its tokenizer or its chat template has the markers. They count at an answer's beginning only; some
templates write the first marker themselves, so that an answer begins within the thoughts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.outputs.growing_text import overlap
from quire.server.outputs.markers import added_tokens
from quire.server.outputs.tool_call_format import template_text

__all__ = ["ReasoningFormat", "ReasoningParser", "ReasoningSpan", "reasoning_form_of"]


@dataclass(frozen=True)
class ReasoningFormat:
    """What stands before and behind thoughts."""

    begin: str
    end: str


_FORMS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


def reasoning_form_of(tokenizer: Any) -> ReasoningFormat | None:
    """The form of a model's thoughts; None for a model that writes none."""
    added, template = added_tokens(tokenizer), template_text(tokenizer)
    for form in _FORMS:
        if {form.begin, form.end} <= added.keys() or (form.begin in template and form.end in template):
            return form
    return None


@dataclass(frozen=True)
class ReasoningSpan:
    """A piece of a thought."""

    text: str


class ReasoningParser:
    """Text as it grows, told apart into thoughts and what follows them, the markers and blanks around them left out.

    Where `form` is None nothing is a thought. is_open: the prompt ends with the first marker.
    """

    def __init__(self, form: ReasoningFormat | None, *, is_open: bool = False) -> None:
        self._form = form
        self._is_open = is_open
        self._text = ""  # not yet decided
        self._step = "said" if form is None else "begin"

    def push(self, text: str, *, final: bool = False) -> Iterator[ReasoningSpan | str]:
        """Takes more text and gives out what it decides. final: no more will come."""
        self._text += text
        if self._form is not None and self._step == "begin":
            self._begin(self._form, final=final)
        if self._form is not None and self._step in ("blank", "thoughts"):
            yield from self._think(self._form, final=final)
        if self._step == "behind":
            self._text = self._text.lstrip()
            self._step = "said" if self._text else "behind"
        if self._step == "said" and self._text:
            said, self._text = self._text, ""
            yield said

    def _begin(self, form: ReasoningFormat, *, final: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(form.begin):
            self._text, self._step = text[len(form.begin) :], "blank"
        elif final or not form.begin.startswith(text):
            self._step = "blank" if self._is_open else "said"

    def _think(self, form: ReasoningFormat, *, final: bool) -> Iterator[ReasoningSpan]:
        if self._step == "blank":
            self._text = self._text.lstrip()
        thought, found, behind = self._text.partition(form.end)
        if not found and not final:
            thought = thought[: len(thought) - overlap(thought, form.end)]
        thought = thought.rstrip()
        if thought:
            self._step = "thoughts"
            yield ReasoningSpan(thought)
        self._text = self._text[len(thought) :]
        if found:
            self._text, self._step = behind, "behind"
        elif final:
            self._text = ""
