"""The output format of one answer: reasoning, content and calls, each in the model's own format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.server.outputs.bare_calls import BARE_MARKERS, bare_calls
from quire.server.outputs.call_events import CallDelta, CallFormat, CutCall
from quire.server.outputs.call_grammar import can_list_arguments
from quire.server.outputs.call_parser import CallParser
from quire.server.outputs.known_formats import KNOWN_FORMATS
from quire.server.outputs.markers import shown_token_ids
from quire.server.outputs.object_calls import ObjectCalls
from quire.server.outputs.pythonic_calls import PYTHONIC_MARKERS, pythonic_calls
from quire.server.outputs.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    ReasoningSpan,
    reasoning_format_of,
)
from quire.server.outputs.tagged_call_format import TaggedCallFormat
from quire.server.outputs.tagged_calls import TaggedCalls
from quire.server.outputs.tool_call_format import ToolCallFormat, call_format_of
from quire.server.schemas.chat_bodies import Tool

__all__ = ["OutputFormat", "OutputParser"]


@dataclass(frozen=True)
class OutputFormat:
    """calls, thoughts: the model's own formats, None where it has none.

    in_thoughts: the prompt ends with the beginning of reasoning. schemas: of the offered tools' parameters, by the
    tools' names. must_call: the answer has to be a call.
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
        """The format of answers to a prompt that ends with `prompt`. tools: those that may be called.

        must_call: a call is forced; in our format if the model's cannot be read, or cannot write its arguments.
        """
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        calls = call_format_of(tokenizer) if tools or must_call else None
        is_listed = isinstance(calls, TaggedCallFormat) and calls.parameter is not None
        if must_call and (
            calls is None or (is_listed and not all(map(can_list_arguments, schemas.values())))
        ):
            calls = ToolCallFormat()
        thoughts = reasoning_format_of(tokenizer)
        in_thoughts = thoughts is not None and prompt.rstrip().endswith(thoughts.begin)
        return cls(calls, thoughts, in_thoughts, schemas, must_call)

    def call_formats(self) -> list[CallFormat]:
        """The formats to read: the model's own, and those of other models for offered tools."""
        own: list[CallFormat] = []
        if isinstance(self.calls, TaggedCallFormat):
            own.append(TaggedCalls(self.calls, self.schemas, any_name=True))
        elif self.calls is not None and (self.calls.begin.strip() or self.must_call):
            own.append(ObjectCalls(self.calls))
        if not self.schemas:
            return own
        others = [known for known in KNOWN_FORMATS.values() if known != self.calls]
        tagged = [TaggedCalls(known, self.schemas, any_name=False) for known in others]
        return [*own, *tagged, *bare_calls(self.schemas), *pythonic_calls(self.schemas)]

    def shown_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The special tokens that decoding must not omit."""
        texts = [] if self.calls is None else [*self.calls.markers]
        if self.schemas:
            texts += [
                *BARE_MARKERS,
                *PYTHONIC_MARKERS,
                *(marker for known in KNOWN_FORMATS.values() for marker in known.markers),
            ]
        texts += [] if self.thoughts is None else [self.thoughts.begin, self.thoughts.end]
        return shown_token_ids(tokenizer, texts)


class OutputParser:
    """Splits growing text into reasoning, content and calls."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._thoughts = ReasoningParser(output_format.thoughts, is_open=output_format.in_thoughts)
        self._calls = CallParser(output_format.call_formats())

    def finish_reason(self, reason: str | None) -> str | None:
        """The API's finish reason: tool_calls for an answer with calls that ended behind a complete one."""
        has_called = self._calls.num_calls > 0 and not self._calls.is_cut
        return "tool_calls" if reason == "stop" and has_called else reason

    def push(self, text: str, *, final: bool = False) -> Iterator[ReasoningSpan | str | CallDelta | CutCall]:
        """Takes more text and yields the decided parts. final: no more text will come."""
        behind = ""
        for part in self._thoughts.push(text, final=final):
            if isinstance(part, ReasoningSpan):
                yield part
            else:
                behind += part
        yield from self._calls.push(behind, final=final)
