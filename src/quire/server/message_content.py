"""The content of a message: of its parts, the text, and the thoughts, in the form that the chat template takes.

Most templates take a text, and get the texts of all parts with a line break between them, as vLLM and llama.cpp write
them. A template that goes through a list of parts gets the list, if every part comes out of it; one that takes nothing
but lists gets texts as lists too. Which form it is is learnt: messages are rendered, and looked for in what comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.api_errors import ApiError
from quire.server.schemas.chat_bodies import ChatMessage, ContentPart

__all__ = ["ContentFormat", "content_form_of", "content_of"]

_ONE, _OTHER = "qpart_one", "qpart_other"
_LEARNT = ("user", "system", "assistant")
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
# The field that a part's type stands for.
_FIELDS = {
    "text": "text", "input_text": "text", "output_text": "text",
    "refusal": "refusal", "thinking": "thinking", "reasoning": "text", "redacted_thinking": "data",
}  # fmt: skip
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
_OF_ANSWERS = ("refusal", *_THOUGHTS)


@dataclass(frozen=True)
class ContentFormat:
    """The roles whose content may be a list of texts, those whose content has to be one, and whether an assistant's
    list takes thoughts."""

    lists: frozenset[str] = frozenset()
    lists_alone: frozenset[str] = frozenset()
    takes_thoughts: bool = False

    def of(self, role: str, content: Any) -> Any:
        """A text as a list where the template takes nothing else."""
        return _texts([content]) if role in self.lists_alone and isinstance(content, str) else content


def content_of(message: ChatMessage, index: int, form: ContentFormat) -> tuple[Any, str | None]:
    """(content, thoughts that are not in it) of the message at this place. *raises:* ApiError: a part of no text."""
    texts, thoughts = _said(message, index)
    thought = "\n".join(dict.fromkeys(filter(None, thoughts))) if thoughts else None
    if thought and form.takes_thoughts:
        return [{"type": "thinking", "thinking": thought}, *_texts(texts)], None
    role = "system" if message.role == "developer" else message.role
    if len(texts) > 1 and role in form.lists:
        return _texts(texts), thought
    return "\n".join(texts), thought


def _said(message: ChatMessage, index: int) -> tuple[list[str], list[str]]:
    """The texts that are not empty, and the thoughts."""
    thoughts = [
        one for one in (message.reasoning_content, message.reasoning, message.thinking) if one is not None
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
    if field is None or (part.type in _OF_ANSWERS and not is_answer):
        where = "" if field is None else ", which belongs to a message of the assistant's"
        raise ApiError(400, f"expected text parts, got {part.type[:64]!r}{where}", param=place)
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
    return "".join(one.text for one in value) if isinstance(value, list) else value or ""


def _texts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts if text]


@functools.lru_cache(maxsize=32)
def content_form_of(tokenizer: Any, template: str, *, with_tools: bool) -> ContentFormat:
    """The form of contents that the template takes; with_tools: beside tools, for which there may be another one."""
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
        """Whether both texts come out, and not as a list that is written down."""
        _, found, behind = rendered(role, content).partition(_ONE)
        between, other, _ = behind.partition(_OTHER)
        return bool(found and other) and "text" not in between

    lists: set[str] = set()
    alone: set[str] = set()
    for role in _LEARNT:
        if shows(role, _texts([_ONE, _OTHER])):
            lists.add(role)
        if not shows(role, _ONE + _OTHER) and shows(role, _texts([_ONE + _OTHER])):
            alone.add(role)
            question = _texts(["q"]) if role == "user" else question
    named = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _ONE)
    takes_thoughts = _ONE not in rendered("assistant", _OTHER, **named) and shows(
        "assistant", [{"type": "thinking", "thinking": _ONE}, *_texts([_OTHER])]
    )
    return ContentFormat(frozenset(lists), frozenset(alone), takes_thoughts)
