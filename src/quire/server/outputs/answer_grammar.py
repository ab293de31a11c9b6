"""The grammar of an answer that has to be a call, or JSON of a schema, or either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.outputs.call_grammar import call_rules, json_rule, text_until
from quire.server.outputs.output_format import OutputFormat
from quire.server.schemas.chat_bodies import Tool

__all__ = ["answer_grammar"]


def answer_grammar(
    tokenizer: Any, output_format: OutputFormat, tools: Sequence[Tool], schema: dict[str, Any] | None = None
) -> str:
    """A Lark grammar of answers that are one call of any of the tools, or JSON of the schema.

    An answer that begins within reasoning ends it first.
    """
    rules: list[str] = []
    alternatives: list[str] = []
    if tools:
        assert output_format.calls is not None
        rules += call_rules(tokenizer, output_format.calls, tools)
        alternatives.append("call")
    if schema is not None:
        rules.append(f"answer: {json_rule(schema)}")
        alternatives.append("answer")
    start = " | ".join(alternatives)
    if output_format.in_thoughts:
        assert output_format.thoughts is not None
        thoughts, symbols = text_until(tokenizer, "thoughts", "/(?s:.*)/", output_format.thoughts.end)
        rules += [*thoughts, "blank: /\\n{0,2}/"]
        start = f"{symbols} blank ({start})"
    return "\n".join([f"start: {start}", *rules]) + "\n"
