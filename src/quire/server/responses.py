"""`/v1/responses`: OpenAI's answers that can be continued by their id.

A response is a chat in other words (`response_input`): its prompt, parameters and answer are those of a chat. It is
stored when it has ended, before the client gets its end; a failed one, or one whose client has left, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from quire.server.api_errors import ApiError
from quire.server.chat import chat_params, next_turn_preparation
from quire.server.chat_prompt import ChatPrompt, kept_prefixes, prompt_of_chat
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, run_in_thread_if_large
from quire.server.outputs.output_format import OutputFormat
from quire.server.outputs.requested_format import api_field_names
from quire.server.prompt_caching import with_own_fields
from quire.server.response_input import (
    answer_of_items,
    chat_of_response,
    conversation_id_of,
    encrypted_thought,
    first_role,
    messages_of_items,
    parsed_items,
    response_field_names,
    stored_item,
    without_first_messages,
)
from quire.server.response_writer import ResponseWriter
from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.schemas.common import ERRORS
from quire.server.schemas.response_bodies import (
    DeletedResponse,
    Include,
    InputTokens,
    ItemList,
    ModelResponse,
    PromptOfResponse,
    ResponseRequest,
)
from quire.server.schemas.response_items import ItemReference
from quire.server.service import Service
from quire.server.tenant_records import TenantRecords, items_page, new_record_id, with_new_ids

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute, responses=ERRORS)

After = Annotated[str | None, Query(max_length=256)]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
IncludeQuery = Annotated[
    list[Include] | None,
    Query(description="Log probabilities are there if the request that made the text included them."),
]


def _included(
    include: IncludeQuery = None,
    include_in_brackets: Annotated[list[Include] | None, Query(alias="include[]")] = None,
) -> frozenset[str]:
    """The query's `include`, also as OpenAI's client writes it."""
    return frozenset([*(include or ()), *(include_in_brackets or ())])


Included = Annotated[frozenset[str], Depends(_included)]


def with_included(items: Sequence[dict[str, Any]], included: frozenset[str]) -> list[dict[str, Any]]:
    """Stored items with the fields that a query includes."""
    if "reasoning.encrypted_content" not in included:
        return list(items)
    return [
        {**item, "encrypted_content": encrypted_thought("".join(part["text"] for part in item["content"]))}
        if item["type"] == "reasoning" and item.get("content") and not item.get("encrypted_content")
        else item
        for item in items
    ]


@router.post(
    "/v1/responses",
    response_model=ModelResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "The answer."}},
)
async def create_response(
    body: ResponseRequest, request: Request, service: TheService, tenant: TheTenant
) -> Any:
    """Answers a history and an input."""
    service.check_model(body.model)
    records, response_id = TenantRecords(service, tenant), new_record_id("resp")
    history, items, session = await _items_of(body, records)
    is_stored = body.store is not False
    own = await run_in_thread_if_large(request, _own_items, items, records if is_stored else None)
    with response_field_names():
        messages, prompt = await _prompt_of(body, history, items, request, service)
        chat = with_own_fields(chat_of_response(body, messages, session), service.engine.tiers)
        output_format = OutputFormat.of(
            service.tokenizer, prompt.text, tools=prompt.tools, must_call=chat.must_call
        )
        params = await run_in_thread_if_large(
            request, chat_params, chat, service, output_format, prompt.tools
        )
        conversation_id = conversation_id_of(body)
        is_continued = body.previous_response_id is not None or conversation_id is not None
        when_answered = next_turn_preparation(
            chat,
            service,
            tenant,
            prompt.tools,
            thoughts_back="always" if is_continued else "with answers",
        )

        async def keep(response: dict[str, Any]) -> None:
            owned = with_new_ids(own, response["output"], response_id)
            if is_stored:
                await records.keep_response(response, owned)
            is_answered = params.max_tokens != 0  # a prompt that is only computed changes no conversation
            if conversation_id is not None and is_answered:
                await _keep_in_conversation(records, conversation_id, [*owned, *response["output"]])
            if when_answered is not None and (answer := answer_of_items(response["output"])) is not None:
                when_answered(answer)

        writer = ResponseWriter(body, service, params, output_format, response_id, conversation_id, keep)
        with api_field_names(chat):
            kept = await kept_prefixes(chat, prompt, service)
            requests = service.requests(tenant, chat, [prompt.token_ids], params)
            running = await service.begin(tenant, chat, requests, [kept])
    return await writer.respond(running, bool(body.stream))


async def _keep_in_conversation(
    records: TenantRecords, conversation_id: str, items: Sequence[dict[str, Any]]
) -> None:
    """Adds the items of a response. A conversation that was deleted meanwhile gets none."""
    try:
        await records.add_items(conversation_id, items, is_checked=True)
    except ApiError as error:
        if error.status != 404:
            raise


async def _items_of(
    body: PromptOfResponse, records: TenantRecords
) -> tuple[list[dict[str, Any]], list[Any], str | None]:
    """(stored items of the history, the input's own items with references replaced, the id of the conversation or of
    the history's first response). *raises:* ApiError."""
    conversation_id = conversation_id_of(body)
    if body.previous_response_id is not None and conversation_id is not None:
        raise ApiError(
            400, "expected previous_response_id or conversation, got both", param="previous_response_id"
        )
    if conversation_id is not None:
        history, origin = (
            (await records.conversation(conversation_id, "conversation"))["items"],
            conversation_id,
        )
    else:
        history, origin = await records.history(body.previous_response_id)
    if isinstance(body.input, str):
        return history, parsed_items([{"role": "user", "content": body.input}]), origin
    items: list[Any] = []
    for number, item in enumerate(body.input or ()):
        if isinstance(item, ItemReference):
            found = await records.item(item.id, f"input.{number}.id")
            items += parsed_items([found])
        else:
            items.append(item)
    return history, items, origin


def _own_items(items: Sequence[Any], records: TenantRecords | None) -> list[dict[str, Any]]:
    """The input's items as they are stored, if they fit in `records`. *raises:* ApiError."""
    own = [stored_item(item, "") for item in items]
    if records is not None:
        records.check_size(own, "input")
    return own


def _messages_of(history: Sequence[dict[str, Any]], items: Sequence[Any]) -> list[ChatMessage]:
    return messages_of_items([*parsed_items(history), *items])


async def _prompt_of(
    body: PromptOfResponse,
    history: Sequence[dict[str, Any]],
    items: Sequence[Any],
    request: Request,
    service: Service,
) -> tuple[Sequence[ChatMessage], ChatPrompt]:
    """(messages, their prompt). With truncation auto, the first messages are left out of one that is too long."""
    messages = await service.threads.run(_messages_of, history, items)
    num_answer = body.max_output_tokens if isinstance(body, ResponseRequest) else None
    num_answer = 1 if num_answer is None else num_answer
    max_tokens = service.engine.max_model_len - num_answer

    async def prompt_of(some: Sequence[ChatMessage]) -> ChatPrompt:
        chat = chat_of_response(body, some)
        return await prompt_of_chat(chat, chat.messages, request, service, add_special_tokens=False)

    async def short_prompt_of(some: Sequence[ChatMessage]) -> ChatPrompt | None:
        try:
            prompt = await prompt_of(some)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return prompt if len(prompt.token_ids) <= max_tokens else None

    async def longest(
        some: Sequence[Sequence[ChatMessage]],
    ) -> tuple[Sequence[ChatMessage], ChatPrompt] | None:
        low, high, found = 0, len(some), None
        while low < high:
            middle = (low + high) // 2
            if (prompt := await short_prompt_of(some[middle])) is not None:
                found, high = (some[middle], prompt), middle
            else:
                low = middle + 1
        return found

    if body.truncation != "auto":
        return messages, await prompt_of(messages)
    if (prompt := await short_prompt_of(messages)) is not None:
        return messages, prompt
    shorter = without_first_messages(messages)
    try:
        found = await longest(shorter)
    except ApiError as error:
        if error.param != "messages":
            raise
        # A template that refuses a history which an answer begins.
        found = await longest([some for some in shorter if first_role(some) == "user"])
    return found or (messages, await prompt_of(messages))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: PromptOfResponse, request: Request, service: TheService, tenant: TheTenant
) -> InputTokens:
    """Counts the tokens of a response's prompt; nothing is computed."""
    service.check_model(body.model)
    history, items, _ = await _items_of(body, TenantRecords(service, tenant))
    with response_field_names():
        _, prompt = await _prompt_of(body, history, items, request, service)
    return InputTokens(input_tokens=len(prompt.token_ids))


@router.post("/v1/responses/compact")
async def compact_response(service: TheService, tenant: TheTenant) -> ModelResponse:
    """Refused: histories are not compacted."""
    raise ApiError(
        400,
        "expected POST /v1/responses: this server compacts no histories; send truncation: auto, or ask the model for a "
        "summary and begin a new history with it",
        code="not_supported",
    )


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    response_id: str,
    service: TheService,
    tenant: TheTenant,
    stream: bool = False,
    starting_after: int | None = None,
    include_obfuscation: bool = False,
    included: Included = frozenset(),
) -> ModelResponse:
    """A stored response."""
    record = await TenantRecords(service, tenant).response(response_id)
    if stream or starting_after is not None:
        raise ApiError(
            400,
            "expected stream: false: a stored response is whole, and its events are not sent again",
            param="stream" if stream else "starting_after",
        )
    if include_obfuscation:
        raise ApiError(400, "expected false: events are not padded", param="include_obfuscation")
    response = record["response"]
    return ModelResponse.model_validate({**response, "output": with_included(response["output"], included)})


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, service: TheService, tenant: TheTenant) -> DeletedResponse:
    """Removes a stored response. Responses that continue it cannot be continued any more."""
    await TenantRecords(service, tenant).remove_response(response_id)
    return DeletedResponse(id=response_id)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    service: TheService,
    tenant: TheTenant,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    included: Included = frozenset(),
) -> ItemList:
    """The items that a response answers: those of the responses before it, and its own input."""
    records = TenantRecords(service, tenant)
    record = await records.response(response_id)
    before = record["response"]["previous_response_id"]
    history, _ = await records.history(before, None)
    items = with_included([*history, *record["input"]], included)
    return ItemList(**items_page(items, after, limit, order))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, service: TheService, tenant: TheTenant) -> ModelResponse:
    """Refused: only background responses can be cancelled, and there are none."""
    await TenantRecords(service, tenant).response(response_id)
    raise ApiError(
        400,
        "expected a response made with background: true, got one that has ended; close the connection to end an answer",
        param="response_id",
    )
