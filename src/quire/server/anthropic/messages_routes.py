"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic's clients call them.

A request becomes a chat request (`messages_prompt`) and goes its way: the same prompt, limits and engine. Keys are read
from `x-api-key` or `Authorization`; the headers `anthropic-version` and `anthropic-beta` change nothing.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from quire.scheduler.request_options import MAX_SESSION_CHARS
from quire.server.anthropic.messages_answer import MessagesWriter
from quire.server.anthropic.messages_bodies import (
    CountedTokens,
    CountTokensRequest,
    MessageAnswer,
    MessagesErrorBody,
    MessagesRequest,
)
from quire.server.anthropic.messages_errors import PATH
from quire.server.anthropic.messages_prompt import chat_of_messages, field_names
from quire.server.api_errors import ApiError
from quire.server.chat import chat_params, next_turn_preparation
from quire.server.chat_prompt import kept_prefixes, prompt_of_chat
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, run_in_thread_if_large
from quire.server.outputs.output_format import OutputFormat
from quire.server.outputs.requested_format import api_field_names
from quire.server.schemas.common import ERRORS

__all__ = ["router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    **{status: {**described, "model": MessagesErrorBody} for status, described in ERRORS.items()},
    529: {"model": MessagesErrorBody, "description": "All places of the server are taken."},
}

router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)


@router.post(
    PATH,
    response_model=MessageAnswer,
    responses={**_ERRORS, 200: {"content": {"text/event-stream": {}}, "description": "The answer."}},
)
async def messages(body: MessagesRequest, request: Request, service: TheService, tenant: TheTenant) -> Any:
    """Answers a conversation."""
    service.check_model(body.model)
    if (
        body.thread is not None
    ):  # by this code the client's helpers know that they have to send the whole history
        raise ApiError(
            400,
            "expected no thread: this server keeps no messages; send all of them",
            param="thread",
            code="thread_unsupported_request",
        )
    tokenizer = service.tokenizer
    made = await run_in_thread_if_large(request, chat_of_messages, body, tokenizer)
    chat = made.chat
    if chat.session_id is None and service.settings.session_from_user_id:
        chat.session_id = _user_id(body)
    with field_names(made.places):
        prompt = await prompt_of_chat(chat, chat.messages, request, service, add_special_tokens=False)
        output_format = OutputFormat.of(tokenizer, prompt.text, tools=prompt.tools, must_call=chat.must_call)
        if body.thinking is not None and body.thinking.type == "disabled" and output_format.in_thoughts:
            raise ApiError(
                400,
                "expected enabled or adaptive: this model's chat template begins every answer with thinking",
                param="thinking.type",
            )
        params = await run_in_thread_if_large(
            request, chat_params, chat, service, output_format, prompt.tools
        )
        kept = await kept_prefixes(chat, prompt, service)
        when_answered = next_turn_preparation(
            chat, service, tenant, prompt.tools, thoughts_back="with answers"
        )
        writer = MessagesWriter(body, service, params, output_format, when_answered)
        with api_field_names(chat):
            requests = service.requests(tenant, chat, [prompt.token_ids], params)
            running = await service.begin(tenant, chat, requests, [kept])
    return await writer.respond(running)


def _user_id(body: MessagesRequest) -> str | None:
    """`metadata.user_id` as a session's name. *raises:* ApiError: too long."""
    name = None if body.metadata is None else body.metadata.user_id
    if name is not None and len(name) > MAX_SESSION_CHARS:
        raise ApiError(
            400,
            f"expected at most {MAX_SESSION_CHARS} characters, got {len(name)}: it is the session's name here",
            param="metadata.user_id",
        )
    return name


@router.post(f"{PATH}/count_tokens", responses=_ERRORS)
async def count_tokens(
    body: CountTokensRequest, request: Request, service: TheService, tenant: TheTenant
) -> CountedTokens:
    """The number of tokens of the prompt that `/v1/messages` makes of the same fields."""
    service.check_model(body.model)
    made = await run_in_thread_if_large(request, chat_of_messages, body, service.tokenizer)
    with field_names(made.places):
        prompt = await prompt_of_chat(
            made.chat, made.chat.messages, request, service, add_special_tokens=False, is_counted_only=True
        )
    return CountedTokens(input_tokens=len(prompt.token_ids))
