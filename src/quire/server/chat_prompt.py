"""The prompt of a chat: one way from a body to tokens, for the chat route and for /tokenize."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fastapi import Request

from quire.server.api_errors import ApiError
from quire.server.http.bodies import run_in_thread_if_large
from quire.server.kept_prefixes import KeptPrefix
from quire.server.messages import template_options
from quire.server.prompt_caching import kept_of_chat
from quire.server.schemas.chat_bodies import (
    AllowedChoice,
    ChatMessage,
    ChatRequest,
    NamedTool,
    PromptFields,
    Tool,
    WholePromptFields,
)
from quire.server.service import Service

__all__ = ["ChatPrompt", "kept_prefixes", "prompt_of_chat"]


@dataclass(frozen=True)
class ChatPrompt:
    """tools: the tools described to the model."""

    text: str
    token_ids: list[int]
    tools: list[Tool]


async def prompt_of_chat(
    body: WholePromptFields,
    messages: Sequence[ChatMessage],
    request: Request,
    service: Service,
    *,
    add_special_tokens: bool,
    is_counted_only: bool = False,
    owner: Hashable | None = None,
) -> ChatPrompt:
    """owner: of the text, see `Service.encode`. is_counted_only: the prompt may be longer than the model's longest
    sequence. *raises:* ApiError.
    """
    tools = await run_in_thread_if_large(request, _tools, body, service)
    text = await service.render(messages, tools, template_options(service.tokenizer, body))
    tokens = await service.encode(
        text, add_special_tokens=add_special_tokens, is_prompt=not is_counted_only, owner=owner
    )
    return ChatPrompt(text, tokens, tools)


async def kept_prefixes(body: ChatRequest, prompt: ChatPrompt, service: Service) -> list[KeptPrefix]:
    """The beginnings of the prompt that the body's caching fields keep, the longest first. prompt: of all messages."""

    async def encode(text: str) -> list[int]:
        return await service.encode(text, add_special_tokens=bool(body.add_special_tokens))

    return await kept_of_chat(body, prompt.text, prompt.token_ids, encode)


def _tools(body: PromptFields, service: Service) -> list[Tool]:
    limits, tools, choice = service.settings.limits, body.tools or [], body.tool_choice
    if len(tools) > limits.max_tools:
        raise ApiError(400, f"expected at most {limits.max_tools} tools, got {len(tools)}", param="tools")
    for tool in tools:
        service.check_schema(tool.function.parameters, "tools")
    chosen = [choice] if isinstance(choice, NamedTool) else []
    if isinstance(choice, AllowedChoice):
        chosen = choice.allowed_tools.tools
    names = {tool.function.name for tool in tools}
    if unknown := [one.function.name for one in chosen if one.function.name not in names]:
        raise ApiError(400, f"expected the name of one of the tools, got {unknown[0]!r}", param="tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "expected tools with tool_choice, got none", param="tool_choice")
    return body.described_tools
