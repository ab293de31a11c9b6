"""A request's body from a file: of a chat or a completion, and the tokens of its prompts as a server makes them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from quire.errors import ArgumentError
from quire.server.api_errors import ApiError
from quire.server.messages import render, template_options
from quire.server.schemas.chat_bodies import ChatRequest
from quire.server.schemas.completion_bodies import CompletionRequest
from quire.server.settings import ServerLimits

__all__ = ["Body", "body_of", "tokens_of"]

Body = ChatRequest | CompletionRequest


def body_of(fields: Any, place: str) -> Body:
    """The body of these JSON fields. place: for messages. *raises:* ArgumentError: it is another one, or wrong."""
    if not isinstance(fields, dict) or not ({"messages", "prompt"} & fields.keys()):
        raise ArgumentError(f"expected a body with messages or a prompt, got another one - in {place}")
    kind = ChatRequest if "messages" in fields else CompletionRequest
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, wrong["loc"]))
        raise ArgumentError(
            f"expected a request's body, got {wrong['msg']} - in `{field}`, {place}"
        ) from error


def tokens_of(tokenizer: Any, body: Body, place: str) -> list[list[int]]:
    """The tokens of each prompt. tokenizer: None for a model without one.

    *raises:* ArgumentError: the template refuses the messages, or there is text and no tokenizer.
    """
    if isinstance(body, ChatRequest):
        texts: list[Any] = [_text_of(tokenizer, body, place)]
        special = bool(body.add_special_tokens)
    else:
        if body.suffix:
            raise ArgumentError(f"expected a prompt without suffix, got one with it - in `suffix`, {place}")
        prompt: Any = body.prompt
        texts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
        special = body.add_special_tokens is not False
    return [
        body.cut(_encoded(tokenizer, text, special, place) if isinstance(text, str) else text)
        for text in texts
    ]


def _encoded(tokenizer: Any, text: str, special: bool, place: str) -> list[int]:
    if tokenizer is None:
        raise ArgumentError(f"expected token ids, got text; this model has no tokenizer - in {place}")
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def _text_of(tokenizer: Any, body: ChatRequest, place: str) -> str:
    try:
        tools = body.described_tools
        return render(tokenizer, body.messages, ServerLimits(), tools, template_options(tokenizer, body))
    except ApiError as error:
        raise ArgumentError(f"{error} - in {place}") from error
