"""`OutputItems`: one answer as OpenAI's output items, and each change of them as an event.

The items of a whole answer are those that its events describe. A call that was cut stays a call, with the status
incomplete and the arguments so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.server.chat import new_call_id
from quire.server.outputs.call_events import CallDelta, CutCall
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.reasoning import ReasoningSpan
from quire.server.response_input import encrypted_thought

__all__ = ["OutputItems", "item_id"]

Event = dict[str, Any]
Logprobs = Callable[[Sequence[int], Sequence[dict[int, float]]], list[dict[str, Any]]]

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def item_id(kind: str, owner: str, number: int) -> str:
    """The id of an item, which leads to its owner: a response or conversation with this hexadecimal part of its id."""
    return f"{_PREFIXES[kind]}_{owner}{number:06x}"


class OutputItems:
    """output_format: of the model's text. owner: the hexadecimal part of the response's id. one_call: later calls are
    left out. logprobs: makes the log probabilities of tokens, None if they are not asked for. with_encrypted:
    reasoning has its encrypted content.

    num_reasoning_tokens: generated up to the last piece of reasoning.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        owner: str,
        *,
        one_call: bool = False,
        logprobs: Logprobs | None = None,
        with_encrypted: bool = False,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.num_reasoning_tokens = 0
        self._parser = OutputParser(output_format)
        self._owner = owner
        self._one_call = one_call
        self._logprobs_of = logprobs
        self._with_encrypted = with_encrypted
        self._open: dict[str, Any] | None = None
        self._blank = ""  # text that belongs to a message only if more follows
        self._num_pending = 0  # tokens whose text has not been decided
        self._pending: list[dict[str, Any]] = []  # likewise their log probabilities

    def push(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[dict[int, float]] = (),
        finish_reason: str | None = None,
    ) -> Iterator[Event]:
        """Takes more of the answer. finish_reason: of its last piece."""
        self._num_pending += len(token_ids)
        if self._logprobs_of is not None and logprobs:
            self._pending += self._logprobs_of(token_ids[: len(logprobs)], logprobs)
        for part in self._parser.push(text, final=finish_reason is not None):
            if isinstance(part, ReasoningSpan):
                yield from self._think(part.text)
            elif isinstance(part, str):
                yield from self._write(part)
            elif self._one_call and part.index > 0:
                continue
            elif isinstance(part, CutCall):
                yield from self._close("incomplete")
            else:
                yield from self._call(part)
        if finish_reason is not None:
            yield from self._end(finish_reason)

    def _think(self, text: str) -> Iterator[Event]:
        self.num_reasoning_tokens += self._num_pending
        self._decide()
        if self._open is None or self._open["type"] != "reasoning":
            yield from self._begin({"type": "reasoning", "summary": [], "content": []})
            self._item["content"].append({"type": "reasoning_text", "text": ""})
            yield self._event("content_part.added", content_index=0, part={**self._item["content"][0]})
        self._item["content"][0]["text"] += text
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _write(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = ""
            yield from self._begin_message()
        part, logprobs = self._item["content"][0], self._decide()
        part["text"] += text
        if self._logprobs_of is not None:
            part["logprobs"] += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin_message(self) -> Iterator[Event]:
        yield from self._begin({"type": "message", "role": "assistant", "content": []})
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if self._logprobs_of is not None:
            part["logprobs"] = []
        self._item["content"].append(part)
        yield self._event("content_part.added", content_index=0, part={**part})

    def _call(self, call: CallDelta) -> Iterator[Event]:
        self._decide()
        self._blank = ""
        if call.name is not None:
            yield from self._begin(
                {"type": "function_call", "call_id": new_call_id(), "name": call.name, "arguments": ""}
            )
        if call.arguments:
            self._item["arguments"] += call.arguments
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _end(self, finish_reason: str) -> Iterator[Event]:
        kinds = {item["type"] for item in self.items}
        if "function_call" in kinds or (self._open is not None and self._open["type"] == "message"):
            self._blank = ""
        if self._blank or (not kinds & {"message", "function_call"} and finish_reason != "length"):
            # An answer of blanks, or of reasoning alone, has a message: clients look for one.
            text, self._blank = self._blank, ""
            yield from self._begin_message()
            if text:
                self._item["content"][0]["text"] = text
                yield self._event("output_text.delta", content_index=0, delta=text, logprobs=[])
        yield from self._close("incomplete" if finish_reason == "length" else "completed")

    # -- the open item ---------------------------------------------------------------------------------

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _decide(self) -> list[dict[str, Any]]:
        """The log probabilities of the tokens up to here."""
        decided, self._pending, self._num_pending = self._pending, [], 0
        return decided

    def _event(self, name: str, **fields: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place, **fields}

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        own = {"id": item_id(item["type"], self._owner, len(self.items)), "status": "in_progress"}
        self._open = {**own, **item}
        self.items.append(self._open)
        yield self._item_event("added")

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "reasoning":
                yield self._event("reasoning_text.done", content_index=0, text=part["text"])
                if self._with_encrypted:
                    item["encrypted_content"] = encrypted_thought(part["text"])
            else:
                logprobs = part.get("logprobs", [])
                yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=logprobs)
            yield self._event("content_part.done", content_index=0, part={**part})
        item["status"] = status
        yield self._item_event("done")
        self._open = None

    def _item_event(self, name: str) -> Event:
        item = {**self._item}
        if "content" in item:
            item["content"] = [{**part} for part in item["content"]]
        return {
            "type": f"response.output_item.{name}",
            "output_index": len(self.items) - 1,
            "item": item,
        }
