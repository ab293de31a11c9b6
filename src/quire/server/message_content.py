"""The content of a message: the text and the reasoning of its parts, in the format that the chat template takes.

Most templates take a string, and get the texts of all parts joined by line breaks, as vLLM and llama.cpp do. A
template that iterates over a list of parts gets the list, if every part appears in its output; a template that takes
only lists gets single texts as lists too. The format is learnt: messages are rendered and looked for in the output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.api_errors import ApiError
from quire.server.schemas.chat_bodies import ChatMessage, ContentPart

__all__ = ["ContentFormat", "content_format_of", "content_of", "has_thoughts"]

_FIRST, _SECOND = "qpart_one", "qpart_other"
_LEARNT_ROLES = ("user", "system", "assistant")
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
# The field of a part's text, by the part's type.
_FIELDS = {
    "text": "text", "input_text": "text", "output_text": "text",
    "refusal": "refusal", "thinking": "thinking", "reasoning": "text", "redacted_thinking": "data",
}  # fmt: skip
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
_ASSISTANT_TYPES = ("refusal", *_THOUGHTS)


@dataclass(frozen=True)
class ContentFormat:
    """lists: roles whose content may be a list of texts. lists_alone: roles whose content has to be a list.
    takes_thoughts: an assistant's list may hold reasoning."""

    lists: frozenset[str] = frozenset()
    lists_alone: frozenset[str] = frozenset()
    takes_thoughts: bool = False

    def convert(self, role: str, content: Any) -> Any:
        """The content; a string becomes a list where the template takes only lists."""
        return _texts([content]) if role in self.lists_alone and isinstance(content, str) else content


def content_of(message: ChatMessage, index: int, content_format: ContentFormat) -> tuple[Any, str | None]:
    """(content, reasoning that is not in it) of the message at place `index`. *raises:* ApiError: a part without
    text."""
    texts, thoughts = _texts_and_thoughts(message, index)
    thought = "\n".join(dict.fromkeys(filter(None, thoughts))) if thoughts else None
    if thought and content_format.takes_thoughts:
        return [{"type": "thinking", "thinking": thought}, *_texts(texts)], None
    role = "system" if message.role == "developer" else message.role
    if len(texts) > 1 and role in content_format.lists:
        return _texts(texts), thought
    return "\n".join(texts), thought


def has_thoughts(message: ChatMessage) -> bool:
    """Whether a message has reasoning, in a field or in a part."""
    parts = message.content if isinstance(message.content, list) else ()
    fields = (message.reasoning_content, message.reasoning, message.thinking)
    return any(fields) or any(part.type in _THOUGHTS and (part.thinking or part.text) for part in parts)


def _texts_and_thoughts(message: ChatMessage, index: int) -> tuple[list[str], list[str]]:
    """The texts that are not empty, and the reasoning."""
    thoughts = [
        text for text in (message.reasoning_content, message.reasoning, message.thinking) if text is not None
    ]
    is_answer = message.role == "assistant"
    if isinstance(message.content, list):
        texts: list[str] = []
        for number, part in enumerate(message.content):
            text = _text_of(part, f"messages.{index}.content", number, is_answer=is_answer)
            (thoughts if part.type in _THOUGHTS else texts).append(text)
    else:
        texts = [message.content or ""]
    if message.refusal:
        if not is_answer:
            raise ApiError(
                400,
                f"expected a refusal in an assistant's message, got one of the role {message.role!r}",
                param=f"messages.{index}.refusal",
            )
        texts.append(message.refusal)
    return [text for text in texts if text], thoughts


def _text_of(part: ContentPart, place: str, number: int, *, is_answer: bool) -> str:
    field = _FIELDS.get(part.type)
    if field is None or (part.type in _ASSISTANT_TYPES and not is_answer):
        role = "" if field is None else ", which only an assistant's message may have"
        raise ApiError(400, f"expected text parts, got {part.type[:64]!r}{role}", param=place)
    for other in {*_FIELDS.values()} - {field}:
        if getattr(part, other) is not None:
            raise ApiError(
                400,
                f"expected {field} in a part of the type {part.type}, got {other}",
                param=f"{place}.{number}.{other}",
            )
    value = getattr(part, field)
    if field == "data":
        return ""
    return "".join(item.text for item in value) if isinstance(value, list) else value or ""


def _texts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts if text]


@functools.lru_cache(maxsize=32)
def content_format_of(tokenizer: Any, template: str, *, with_tools: bool) -> ContentFormat:
    """The content format of a template. with_tools: the format with tools, which may differ."""
    if not template:
        return ContentFormat()
    question: Any = "q"

    def rendered(role: str, content: Any, **more: Any) -> str:
        before = {"assistant": [{"role": "user", "content": question}]}.get(role, [])
        behind = {"system": [{"role": "user", "content": question}]}.get(role, [])
        try:
            return tokenizer.apply_chat_template(
                [*before, {"role": role, "content": content, **more}, *behind],
                tools=[_TOOL] if with_tools else None,
                tokenize=False,
                add_generation_prompt=False,
            )
        except Exception:  # a template that cannot take this
            return ""

    def shows(role: str, content: Any) -> bool:
        """Whether both texts appear, and not as the text of a written list."""
        _, first, behind = rendered(role, content).partition(_FIRST)
        between, second, _ = behind.partition(_SECOND)
        return bool(first and second) and "text" not in between

    lists: set[str] = set()
    alone: set[str] = set()
    for role in _LEARNT_ROLES:
        if shows(role, _texts([_FIRST, _SECOND])):
            lists.add(role)
        if not shows(role, _FIRST + _SECOND) and shows(role, _texts([_FIRST + _SECOND])):
            alone.add(role)
            question = _texts(["q"]) if role == "user" else question
    named = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _FIRST)
    takes_thoughts = _FIRST not in rendered("assistant", _SECOND, **named) and shows(
        "assistant", [{"type": "thinking", "thinking": _FIRST}, *_texts([_SECOND])]
    )
    return ContentFormat(frozenset(lists), frozenset(alone), takes_thoughts)
