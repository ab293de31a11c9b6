"""How one answer is to be read: its thoughts, what is said, and its calls, each in the model's own form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.forms.call_reader import CallDelta, CallReader
from quire.server.forms.markers import shown_token_ids
from quire.server.forms.reasoning import ReasoningForm, ReasoningReader, Thought, reasoning_form_of
from quire.server.forms.tools import ToolForm, form_of

__all__ = ["AnswerForm", "AnswerReader"]


@dataclass(frozen=True)
class AnswerForm:
    """calls, thoughts: None where none are looked for. in_thoughts: the prompt ends where thoughts begin."""

    calls: ToolForm | None = None
    thoughts: ReasoningForm | None = None
    in_thoughts: bool = False

    @classmethod
    def of(
        cls, tokenizer: Any, prompt: str, *, may_call: bool = False, must_call: bool = False
    ) -> AnswerForm:
        """The form of answers to a prompt that ends so. must_call: a call is forced, in our form where need be."""
        calls = form_of(tokenizer) if may_call or must_call else None
        if calls is None and must_call:
            calls = ToolForm()
        thoughts = reasoning_form_of(tokenizer)
        return cls(calls, thoughts, thoughts is not None and prompt.rstrip().endswith(thoughts.begin))

    def shown_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The special tokens that have to be in the text."""
        texts = [] if self.calls is None else [self.calls.begin, self.calls.end]
        texts += [] if self.thoughts is None else [self.thoughts.begin, self.thoughts.end]
        return shown_token_ids(tokenizer, texts)


class AnswerReader:
    """Text as it grows, told apart into thoughts, what is said, and calls."""

    def __init__(self, form: AnswerForm) -> None:
        self._thoughts = ReasoningReader(form.thoughts, is_open=form.in_thoughts)
        self._calls = CallReader(form.calls)

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def push(self, text: str, *, final: bool = False) -> Iterator[Thought | str | CallDelta]:
        """Takes more text and gives out what it decides. final: no more will come."""
        behind = ""
        for part in self._thoughts.push(text, final=final):
            if isinstance(part, Thought):
                yield part
            else:
                behind += part
        yield from self._calls.push(behind, final=final)
