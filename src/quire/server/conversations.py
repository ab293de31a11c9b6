"""`/quire/conversations`: tokens that grow turn by turn, fork, rewind and are saved; an extension of Quire's.

A turn is a request like any other: admitted, counted and preempted. Its tokens become the conversation's when it
ends, or when the client leaves after a part of the answer; an error changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request

from quire.engine.async_conversation import AsyncConversation
from quire.scheduler.request import RequestOutput
from quire.server.api_errors import ApiError
from quire.server.chat import ChatWriter, chat_params
from quire.server.conversation_store import ConversationEntry, conversation_bytes
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, run_in_thread_if_large
from quire.server.messages import template_options
from quire.server.outputs.output_format import OutputFormat
from quire.server.outputs.requested_format import api_field_names
from quire.server.prompt_caching import kept_of_prompt, with_own_fields
from quire.server.schemas.common import ERRORS
from quire.server.schemas.conversation_bodies import (
    ConversationAnswer,
    ConversationCard,
    ConversationDetails,
    ConversationList,
    Deleted,
    NewConversation,
    Rewind,
    Rewound,
    SnapshotCard,
    SnapshotList,
    SnapshotRequest,
    Turn,
)
from quire.server.service import Service
from quire.sessions.snapshot_files import NoSnapshotError, SnapshotExistsError, SnapshotsFullError
from quire.sessions.snapshots import SnapshotLimits

__all__ = ["router"]

_TAIL_TOKENS = 16  # tokens at a prompt's end that show whether it opens reasoning

router = APIRouter(tags=["Conversations"], route_class=BodyRoute, responses=ERRORS)


def _card(entry: ConversationEntry) -> ConversationCard:
    return ConversationCard(
        id=entry.id, created=entry.created, num_tokens=len(entry.state), turns=entry.starts
    )


def _one_of(body: NewConversation | Turn, *names: str) -> str | None:
    """The field among `names` that is given, None if none is. *raises:* ApiError: several are."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) > 1:
        raise ApiError(400, f"expected at most one of {', '.join(names)}, got {' and '.join(given)}")
    return given[0] if given else None


@router.post("/quire/conversations", status_code=201)
async def make(
    service: TheService, tenant: TheTenant, body: NewConversation | None = None
) -> ConversationCard:
    """Makes a conversation, empty or with a beginning. Nothing is computed before its first turn."""
    body = body or NewConversation()  # type: ignore[call-arg]
    service.conversations.check_room(tenant)
    engine, salt = service.engine, body.cache_salt or None
    given = _one_of(body, "messages", "text", "tokens", "snapshot")
    if given == "snapshot":
        name = body.snapshot or ""
        try:
            state = await engine.resume(name, recompute=body.recompute, **tenant.key(salt))
        except NoSnapshotError as error:
            raise _no_snapshot(name, "snapshot") from error
        return _card(service.conversations.add(tenant, ConversationEntry(state, salt)))
    state = engine.conversation(**tenant.key(salt))
    if given == "messages":  # held as messages: the first turn renders them together with its own
        text = await service.render(body.messages or [])
        tokens = await service.encode(text, add_special_tokens=False)
        engine.conversation(tokens)  # refuses what no turn could begin with
    elif given is not None:
        state.append(await _plain_tokens(service, body, is_first=True))
    return _card(service.conversations.add(tenant, ConversationEntry(state, salt, body.messages or ())))


@router.get("/quire/conversations")
async def conversations(service: TheService, tenant: TheTenant) -> ConversationList:
    """This tenant's conversations."""
    return ConversationList(data=[_card(entry) for entry in service.conversations.entries_of(tenant)])


@router.get("/quire/conversations/{conversation_id}")
async def conversation(conversation_id: str, service: TheService, tenant: TheTenant) -> ConversationDetails:
    """A conversation with all of its tokens."""
    entry = service.conversations.get(tenant, conversation_id)
    tokens = entry.state.token_ids
    text = None if service.tokenizer is None else await service.decode(tokens)
    return ConversationDetails(**_card(entry).model_dump(), tokens=tokens, text=text)


@router.delete("/quire/conversations/{conversation_id}")
async def delete(conversation_id: str, service: TheService, tenant: TheTenant) -> Deleted:
    """Removes a conversation; a turn under way ends."""
    service.conversations.remove(tenant, conversation_id)
    return Deleted(id=conversation_id)


@router.post("/quire/conversations/{conversation_id}/fork", status_code=201)
async def fork(conversation_id: str, service: TheService, tenant: TheTenant) -> ConversationCard:
    """Makes a new conversation with the same tokens; also while a turn is answered."""
    entry = service.conversations.get(tenant, conversation_id)
    return _card(service.conversations.add(tenant, entry.fork()))


@router.post("/quire/conversations/{conversation_id}/rewind")
async def rewind(conversation_id: str, body: Rewind, service: TheService, tenant: TheTenant) -> Rewound:
    """Removes the tokens behind a position, or the last turns."""
    entry = service.conversations.get(tenant, conversation_id)
    entry.require_idle()
    if (body.position is None) == (body.turns is None):
        raise ApiError(400, "expected either a position or turns")
    position = body.position
    if body.turns is not None:
        if body.turns > len(entry.starts):
            raise ApiError(
                400, f"expected at most {len(entry.starts)} turns, got {body.turns}", param="turns"
            )
        position = entry.starts[-body.turns]
    base, rewound = entry.state, entry.state.fork()
    num_cached_tokens = await rewound.rewind(position or 0)
    entry.begin(base, rewound)  # raises if a turn has begun meanwhile
    entry.end(rewound, is_kept=True)
    entry.starts = [start for start in entry.starts if start < len(rewound)]
    return Rewound(**_card(entry).model_dump(), num_cached_tokens=num_cached_tokens)


@router.post(
    "/quire/conversations/{conversation_id}/append",
    response_model=ConversationAnswer | ConversationCard,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "The answer, or the conversation."}
    },
)
async def append(
    conversation_id: str, request: Request, service: TheService, tenant: TheTenant, body: Turn | None = None
) -> Any:
    """A turn: appends the given messages, text or tokens; the model answers, as a chat completion does."""
    body = body or Turn()  # type: ignore[call-arg]
    entry = service.conversations.get(tenant, conversation_id)
    entry.require_idle()
    service.check_model(body.model)
    if body.tools:
        raise ApiError(400, "expected no tools: conversations do not support them", param="tools")
    if body.cache_salt is not None and body.cache_salt != entry.cache_salt:
        raise ApiError(400, "expected the conversation's own cache_salt, or none", param="cache_salt")
    if body.prompt_cache_options is not None and body.prompt_cache_options.prewarm:
        raise ApiError(
            400,
            "expected no prewarm: a turn has an answer; send generate: false and text, or POST /v1/chat/completions",
            param="prompt_cache_options.prewarm",
        )
    body = with_own_fields(body, service.engine.tiers)
    body = body.model_copy(update={"cache_salt": entry.cache_salt})
    base = entry.state
    turn = base.fork()
    if tokens := await _turn_tokens(service, entry, body, len(base)):
        service.conversations.check_bytes(tenant, conversation_bytes((), len(tokens)))
        turn.append(tokens)
    if not body.generate:
        entry.begin(base, turn)
        entry.end(turn, is_kept=True)
        return _card(entry)
    output_format = OutputFormat()
    if body.messages or (len(base) == 0 and entry.first):  # the model answers messages, not a plain text
        tail = service.tokenizer.decode(turn.token_ids[-_TAIL_TOKENS:])
        output_format = OutputFormat.of(service.tokenizer, tail)
    params = await run_in_thread_if_large(request, chat_params, body, service, output_format)
    if params.n != 1:
        raise ApiError(400, f"expected n=1, got {params.n}; fork the conversation instead", param="n")
    if params.num_beams(service.engine.sampling_defaults) != 1:
        raise ApiError(
            400,
            "expected use_beam_search: false: a conversation's answers are not searched",
            param="use_beam_search",
        )
    writer = ChatWriter(
        body, service, params, output_format, more=lambda: {"conversation": _card(entry).model_dump()}
    )
    entry.begin(base, turn)
    try:
        with api_field_names(body):
            turn_request = turn.turn_request(
                params,
                priority=body.priority or 0,
                request_id=service.take_name(),
                cache_priority=body.cache_priority or "normal",
                deltas=True,
            )
            kept = kept_of_prompt(body, len(turn))
            running = await service.begin(tenant, body, [turn_request], [kept])
    except BaseException:
        entry.end(turn, is_kept=False)
        raise
    running.when_over = lambda: entry.end(turn, is_kept=False)  # for a request whose outputs are never read
    outputs = running.outputs(through=lambda stream: turn.turn_outputs(turn_request[1], stream))
    return await writer.respond(running, _answered(entry, turn, outputs))


async def _turn_tokens(service: Service, entry: ConversationEntry, body: Turn, num_before: int) -> list[int]:
    """The tokens that a turn appends."""
    given = _one_of(body, "messages", "text", "tokens")
    first = list(entry.first) if num_before == 0 else []
    if not (given == "messages" or first):  # options of the chat template, which is not used
        for name in ("chat_template_kwargs", "reasoning_effort", "enable_thinking"):
            if getattr(body, name) not in (None, {}):
                raise ApiError(400, f"expected messages with {name}, got none", param=name)
    if not body.generate and given not in ("text", "tokens"):
        raise ApiError(400, "expected text or tokens with generate: false", param="generate")
    if given in ("text", "tokens"):
        if first:
            raise ApiError(400, "expected messages: this conversation begins with messages", param=given)
        return await _plain_tokens(service, body, is_first=num_before == 0)
    messages = [*first, *(body.messages or [])]
    if not messages:
        return []
    options = template_options(service.tokenizer, body)
    if num_before == 0:
        text = await service.render(messages, options=options)
    else:
        text = await service.render(messages, options=options, is_continuation=True)
        last = entry.state.token_ids[-1]
        if last in service.tokenizer.all_special_ids:  # the end of the answer is there already
            text = text.removeprefix(service.tokenizer.decode([last]))
    return await service.encode(text, add_special_tokens=False)


async def _plain_tokens(service: Service, body: NewConversation | Turn, *, is_first: bool) -> list[int]:
    if body.tokens is not None:
        return body.tokens
    if not body.text:
        raise ApiError(400, "expected text, got an empty one", param="text")
    return await service.encode(body.text, add_special_tokens=is_first)


async def _answered(
    entry: ConversationEntry, turn: AsyncConversation, generated: AsyncGenerator[RequestOutput]
) -> AsyncGenerator[RequestOutput]:
    """The answer's outputs; at their end the turn's tokens become the conversation's."""
    is_kept = False
    try:
        async with aclosing(generated) as outputs:
            async for output in outputs:
                is_kept = True
                if output.finished:
                    # Ended before the client sees the last output, so that its next turn finds the tokens.
                    await anext(outputs, None)
                    entry.end(turn, is_kept)
                yield output
    except Exception:
        is_kept = False
        raise
    finally:
        entry.end(turn, is_kept)


@router.post("/quire/conversations/{conversation_id}/snapshot", status_code=201)
async def snapshot(
    conversation_id: str, body: SnapshotRequest, service: TheService, tenant: TheTenant
) -> SnapshotCard:
    """Saves the conversation under a name in the disk cache, where it outlives the server."""
    entry = service.conversations.get(tenant, conversation_id)
    entry.require_idle()
    try:
        limits = SnapshotLimits(
            service.settings.limits.max_snapshots, service.settings.limits.max_snapshot_bytes
        )
        saved = await entry.state.fork().snapshot(body.name, overwrite=body.overwrite, limits=limits)
        return SnapshotCard.of(saved)
    except SnapshotExistsError as error:
        raise ApiError(
            409,
            f"expected a new name for a snapshot, got {body.name!r}, which is taken; say overwrite: true, or delete it",
            param="name",
            code="snapshot_exists",
        ) from error
    except SnapshotsFullError as error:
        raise ApiError(429, str(error), param="name", code="snapshots_full", retry_after_s=1) from error


@router.get("/v1/snapshots")
async def snapshots(service: TheService, tenant: TheTenant, cache_salt: str | None = None) -> SnapshotList:
    """The snapshots of this tenant and salt."""
    found = await service.engine.snapshots(**tenant.key(cache_salt))
    return SnapshotList(data=[SnapshotCard.of(snapshot) for snapshot in found])


@router.delete("/v1/snapshots/{name}", status_code=204)
async def remove_snapshot(
    name: str, service: TheService, tenant: TheTenant, cache_salt: str | None = None
) -> None:
    """Removes a snapshot; its keys and values stay until their room is needed."""
    try:
        await service.engine.remove_snapshot(name, **tenant.key(cache_salt))
    except NoSnapshotError as error:
        raise _no_snapshot(name, None) from error


def _no_snapshot(name: str, param: str | None) -> ApiError:
    return ApiError(404, f"there is no snapshot {name!r}", param=param, code="snapshot_not_found")
