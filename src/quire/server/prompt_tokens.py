"""The tokens of a request's prompt, from its path and body alone: for a router in front of several engines.

The same bodies, templates and tokenizer as in the routes, without an engine. Not here: a prompt that continues stored
content (`previous_response_id`, `conversation`) or has a `suffix`; of several prompts the first counts.

Cost: a body's reading, the template and the tokenizer; a long text that begins as a known one pays for its end only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import TypeAdapter

from quire.scheduler.known_texts import KnownTexts
from quire.server.anthropic.messages_bodies import MessagesRequest
from quire.server.anthropic.messages_prompt import chat_of_messages
from quire.server.api_keys import ApiTenant
from quire.server.http.bodies import parse_body
from quire.server.messages import render, template_options
from quire.server.response_input import (
    chat_of_response,
    conversation_id_of,
    messages_of_items,
    parsed_items,
)
from quire.server.schemas.chat_bodies import ChatRequest
from quire.server.schemas.completion_bodies import CompletionRequest
from quire.server.schemas.response_bodies import ResponseRequest
from quire.server.settings import ServerLimits

__all__ = ["GENERATING_PATHS", "PromptReader", "PromptTokens"]

_BODIES: dict[str, TypeAdapter[Any]] = {
    "/v1/chat/completions": TypeAdapter(ChatRequest),
    "/v1/completions": TypeAdapter(CompletionRequest),
    "/v1/messages": TypeAdapter(MessagesRequest),
    "/v1/responses": TypeAdapter(ResponseRequest),
}
GENERATING_PATHS = frozenset(_BODIES)


class PromptTokens(NamedTuple):
    """token_ids: None where the body alone does not give them. cache_salt: of the request's namespace. continued:
    the stored object that the prompt continues, as in its path: ("v1/responses", id) or ("v1/conversations", id)."""

    token_ids: list[int] | None
    cache_salt: str | None
    continued: tuple[str, str] | None = None


class PromptReader:
    """tokenizer: the model's; None if it has none."""

    def __init__(self, tokenizer: Any, limits: ServerLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._texts = KnownTexts(tokenizer)

    def read(self, path: str, body: bytes, tenant: ApiTenant) -> PromptTokens:
        """path: one of `GENERATING_PATHS`. tenant: whose texts are remembered.

        *raises:* any error of a body that its route would refuse, or of the chat template.
        """
        request = parse_body(body, _BODIES[path], self._limits.max_body_values)
        if isinstance(request, CompletionRequest):
            return self._of_completion(request, tenant)
        if isinstance(request, ResponseRequest):
            if request.previous_response_id is not None:
                return PromptTokens(None, request.cache_salt, ("v1/responses", request.previous_response_id))
            if (name := conversation_id_of(request)) is not None:
                return PromptTokens(None, request.cache_salt, ("v1/conversations", name))
            items = request.input
            if isinstance(items, str):
                items = parsed_items([{"role": "user", "content": items}])
            request = chat_of_response(request, messages_of_items(items or ()))
        elif isinstance(request, MessagesRequest):
            request = chat_of_messages(request, self._tokenizer).chat
        return self._of_chat(request, tenant)

    def _of_chat(self, chat: ChatRequest, tenant: ApiTenant) -> PromptTokens:
        text = render(
            self._tokenizer,
            chat.messages,
            self._limits,
            chat.described_tools,
            template_options(self._tokenizer, chat),
        )
        tokens = self._encode(text, bool(chat.add_special_tokens), chat.cache_salt, tenant)
        return PromptTokens(None if tokens is None else chat.cut(tokens), chat.cache_salt)

    def _of_completion(self, body: CompletionRequest, tenant: ApiTenant) -> PromptTokens:
        prompt: Any = body.prompt
        if not isinstance(prompt, str) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if body.suffix:
            return PromptTokens(None, body.cache_salt)
        tokens = (
            self._encode(prompt, body.add_special_tokens is not False, body.cache_salt, tenant)
            if isinstance(prompt, str)
            else list(prompt)
        )
        return PromptTokens(None if tokens is None else body.cut(tokens), body.cache_salt)

    def _encode(
        self, text: str, add_special_tokens: bool, cache_salt: str | None, tenant: ApiTenant
    ) -> list[int] | None:
        if self._tokenizer is None:
            return None
        return self._texts.encode(
            text, add_special_tokens=add_special_tokens, owner=tenant.texts_of(cache_salt)
        )
