"""The grammar of an answer that is forced to be a call, or a text of a schema, or either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.outputs.call_grammar import call_rules, json_rule, text_until
from quire.server.outputs.output_format import OutputFormat
from quire.server.schemas.chat_bodies import Tool

__all__ = ["answer_grammar"]


def answer_grammar(
    tokenizer: Any, form: OutputFormat, tools: Sequence[Tool], schema: dict[str, Any] | None = None
) -> str:
    """A Lark grammar of answers that are one call of any of the tools, or JSON of the schema.

    An answer that begins within thoughts ends them first.
    """
    rules: list[str] = []
    ways: list[str] = []
    if tools:
        assert form.calls is not None
        rules += call_rules(tokenizer, form.calls, tools)
        ways.append("call")
    if schema is not None:
        rules.append(f"answer: {json_rule(schema)}")
        ways.append("answer")
    start = " | ".join(ways)
    if form.in_thoughts:
        assert form.thoughts is not None
        thoughts, symbols = text_until(tokenizer, "thoughts", "/(?s:.*)/", form.thoughts.end)
        rules += [*thoughts, "blank: /\\n{0,2}/"]
        start = f"{symbols} blank ({start})"
    return "\n".join([f"start: {start}", *rules]) + "\n"
