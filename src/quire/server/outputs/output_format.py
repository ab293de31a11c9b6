"""How one answer is to be read: its thoughts, what is said, and its calls, each in the model's own form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.server.outputs.bare_calls import BARE_MARKERS, bare_calls
from quire.server.outputs.call_events import CallDelta, CallFormat, CutCall
from quire.server.outputs.call_grammar import listed
from quire.server.outputs.call_parser import CallParser
from quire.server.outputs.known_formats import KNOWN_FORMS
from quire.server.outputs.markers import shown_token_ids
from quire.server.outputs.object_calls import ObjectCalls
from quire.server.outputs.reasoning import ReasoningFormat, ReasoningParser, ReasoningSpan, reasoning_form_of
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.outputs.tagged_calls import TaggedCalls
from quire.server.outputs.tool_call_format import ToolCallFormat, form_of
from quire.server.schemas.chat_bodies import Tool

__all__ = ["OutputFormat", "OutputParser"]


@dataclass(frozen=True)
class OutputFormat:
    """calls, thoughts: the model's own forms, None where it has none.

    in_thoughts: the prompt ends where thoughts begin. schemas: of the parameters of the tools that are offered, by the
    tools' names. must_call: the answer is forced to be a call.
    """

    calls: ToolCallFormat | TaggedCallFormat | None = None
    thoughts: ReasoningFormat | None = None
    in_thoughts: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    must_call: bool = False

    @classmethod
    def of(
        cls, tokenizer: Any, prompt: str, *, tools: Sequence[Tool] = (), must_call: bool = False
    ) -> OutputFormat:
        """The form of answers to a prompt that ends so. tools: that may be called.

        must_call: a call is forced; in our form where the model's cannot be read, or cannot write its arguments.
        """
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        calls = form_of(tokenizer) if tools or must_call else None
        one_by_one = isinstance(calls, TaggedCallFormat) and calls.parameter is not None
        if must_call and (calls is None or (one_by_one and not all(map(listed, schemas.values())))):
            calls = ToolCallFormat()
        thoughts = reasoning_form_of(tokenizer)
        in_thoughts = thoughts is not None and prompt.rstrip().endswith(thoughts.begin)
        return cls(calls, thoughts, in_thoughts, schemas, must_call)

    def call_forms(self) -> list[CallFormat]:
        """All forms that are read: the model's own, and those of other models for tools that are offered."""
        own: list[CallFormat] = []
        if isinstance(self.calls, TaggedCallFormat):
            own.append(TaggedCalls(self.calls, self.schemas, any_name=True))
        elif self.calls is not None and (self.calls.begin.strip() or self.must_call):
            own.append(ObjectCalls(self.calls))
        if not self.schemas:
            return own
        others = [form for form in KNOWN_FORMS.values() if form != self.calls]
        named = [TaggedCalls(form, self.schemas, any_name=False) for form in others]
        return [*own, *named, *bare_calls(self.schemas)]

    def shown_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The special tokens that have to be in the text."""
        texts = [] if self.calls is None else [*self.calls.markers]
        if self.schemas:
            texts += [*BARE_MARKERS, *(marker for form in KNOWN_FORMS.values() for marker in form.markers)]
        texts += [] if self.thoughts is None else [self.thoughts.begin, self.thoughts.end]
        return shown_token_ids(tokenizer, texts)


class OutputParser:
    """Text as it grows, told apart into thoughts, what is said, and calls."""

    def __init__(self, form: OutputFormat) -> None:
        self._thoughts = ReasoningParser(form.thoughts, is_open=form.in_thoughts)
        self._calls = CallParser(form.call_forms())

    def finish_reason(self, reason: str | None) -> str | None:
        """What an answer that ended for this reason tells: calls, if it has some and ended behind a whole one."""
        has_called = self._calls.num_calls > 0 and not self._calls.is_cut
        return "tool_calls" if reason == "stop" and has_called else reason

    def push(self, text: str, *, final: bool = False) -> Iterator[ReasoningSpan | str | CallDelta | CutCall]:
        """Takes more text and gives out what it decides. final: no more will come."""
        behind = ""
        for part in self._thoughts.push(text, final=final):
            if isinstance(part, ReasoningSpan):
                yield part
            else:
                behind += part
        yield from self._calls.push(behind, final=final)
