"""`/quire/conversations`: tokens that grow turn by turn, branch, go back and are kept; our extension.

A turn is a request like any other, admitted, counted and preempted as such. What it appends becomes the conversation's
when it ends, or when the client leaves it with some of the answer; an error changes nothing.
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
from quire.server.conversation_store import ConversationEntry, kept_bytes
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, beside_if_large
from quire.server.messages import template_options
from quire.server.outputs.output_format import OutputFormat
from quire.server.outputs.requested_format import api_field_names
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

_TAIL_TOKENS = 16  # where a prompt that opens thoughts says so

router = APIRouter(tags=["Conversations"], route_class=BodyRoute, responses=ERRORS)


def _card(talk: ConversationEntry) -> ConversationCard:
    return ConversationCard(id=talk.id, created=talk.created, num_tokens=len(talk.state), turns=talk.starts)


def _one_of(body: NewConversation | Turn, *names: str) -> str | None:
    """The only one of the fields that is given, if one is."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) > 1:
        raise ApiError(400, f"expected at most one of {', '.join(names)}, got {' and '.join(given)}")
    return given[0] if given else None


@router.post("/quire/conversations", status_code=201)
async def make(
    service: TheService, tenant: TheTenant, body: NewConversation | None = None
) -> ConversationCard:
    """A conversation that begins with this, or with nothing. Nothing is computed before its first turn."""
    body = body or NewConversation()  # type: ignore[call-arg]
    service.conversations.check_room(tenant)
    engine, salt = service.engine, body.cache_salt or None
    given = _one_of(body, "messages", "text", "tokens", "snapshot")
    if given == "snapshot":
        name = body.snapshot or ""
        try:
            found = await engine.resume(name, recompute=body.recompute, **tenant.key(salt))
        except NoSnapshotError as error:
            raise _no_snapshot(name, "snapshot") from error
        return _card(service.conversations.add(tenant, ConversationEntry(found, salt)))
    state = engine.conversation(**tenant.key(salt))
    if given == "messages":  # kept as they are: what the first turn adds is framed with them
        text = await service.render(body.messages or [])
        tokens = await service.encode(text, add_special_tokens=False)
        await engine.between_steps(lambda: engine.core.engine.check_tokens(tokens))
    elif given is not None:
        state.append(await _plain_tokens(service, body, is_first=True))
    return _card(service.conversations.add(tenant, ConversationEntry(state, salt, body.messages or ())))


@router.get("/quire/conversations")
async def conversations(service: TheService, tenant: TheTenant) -> ConversationList:
    """Those of this tenant."""
    return ConversationList(data=[_card(talk) for talk in service.conversations.of(tenant)])


@router.get("/quire/conversations/{conversation_id}")
async def conversation(conversation_id: str, service: TheService, tenant: TheTenant) -> ConversationDetails:
    """How it stands: all of its tokens."""
    talk = service.conversations.get(tenant, conversation_id)
    tokens = talk.state.token_ids
    text = None if service.tokenizer is None else await service.decode(tokens)
    return ConversationDetails(**_card(talk).model_dump(), tokens=tokens, text=text)


@router.delete("/quire/conversations/{conversation_id}")
async def delete(conversation_id: str, service: TheService, tenant: TheTenant) -> Deleted:
    """Forgets it; a turn under way ends."""
    service.conversations.remove(tenant, conversation_id)
    return Deleted(id=conversation_id)


@router.post("/quire/conversations/{conversation_id}/fork", status_code=201)
async def fork(conversation_id: str, service: TheService, tenant: TheTenant) -> ConversationCard:
    """Another one, the same so far, that goes on by itself; also while a turn is answered."""
    talk = service.conversations.get(tenant, conversation_id)
    return _card(service.conversations.add(tenant, talk.fork()))


@router.post("/quire/conversations/{conversation_id}/rewind")
async def rewind(conversation_id: str, body: Rewind, service: TheService, tenant: TheTenant) -> Rewound:
    """Forgets what comes behind a position, or the last turns."""
    talk = service.conversations.get(tenant, conversation_id)
    talk.require_rest()
    if (body.position is None) == (body.turns is None):
        raise ApiError(400, "expected either a position or turns")
    position = body.position
    if body.turns is not None:
        if body.turns > len(talk.starts):
            raise ApiError(400, f"expected at most {len(talk.starts)} turns, got {body.turns}", param="turns")
        position = talk.starts[-body.turns]
    base, rewound = talk.state, talk.state.fork()
    found = await rewound.rewind(position or 0)
    talk.begin(base, rewound)  # a turn may have begun meanwhile
    talk.end(rewound, is_kept=True)
    talk.starts = [start for start in talk.starts if start < len(rewound)]
    return Rewound(**_card(talk).model_dump(), num_cached_tokens=found)


@router.post(
    "/quire/conversations/{conversation_id}/append",
    response_model=ConversationAnswer | ConversationCard,
    responses={200: {"content": {"text/event-stream": {}}, "description": "The answer, or how it stands."}},
)
async def append(
    conversation_id: str, request: Request, service: TheService, tenant: TheTenant, body: Turn | None = None
) -> Any:
    """A turn: what is given is appended, and the model answers, whole or as events like those of chat."""
    body = body or Turn()  # type: ignore[call-arg]
    talk = service.conversations.get(tenant, conversation_id)
    talk.require_rest()
    service.check_model(body.model)
    if body.tools:
        raise ApiError(400, "expected no tools: a conversation has none", param="tools")
    if body.cache_salt is not None and body.cache_salt != talk.cache_salt:
        raise ApiError(400, "expected the conversation's own cache_salt, or none", param="cache_salt")
    body = body.model_copy(update={"cache_salt": talk.cache_salt})
    base = talk.state
    turn = base.fork()
    if tokens := await _turn_tokens(service, talk, body, len(base)):
        service.conversations.check_bytes(tenant, kept_bytes((), len(tokens)))
        turn.append(tokens)
    if not body.generate:
        talk.begin(base, turn)
        talk.end(turn, is_kept=True)
        return _card(talk)
    form = OutputFormat()
    if body.messages or (len(base) == 0 and talk.first):  # an answer to messages, rather than more of a text
        tail = service.tokenizer.decode(turn.token_ids[-_TAIL_TOKENS:])
        form = OutputFormat.of(service.tokenizer, tail)
    params = await beside_if_large(request, chat_params, body, service, form)
    if params.n != 1:
        raise ApiError(400, f"expected n=1, got {params.n}; fork the conversation instead", param="n")
    one = ChatWriter(body, service, params, form, more=lambda: {"conversation": _card(talk).model_dump()})
    talk.begin(base, turn)
    try:
        with api_field_names(body):
            asked = turn.turn_request(
                params,
                priority=body.priority or 0,
                request_id=service.take_name(),
                cache_priority=body.cache_priority or "normal",
                deltas=True,
            )
            begun = await service.begin(tenant, body, [asked])
    except BaseException:
        talk.end(turn, is_kept=False)
        raise
    begun.when_over = lambda: talk.end(turn, is_kept=False)  # where no output was asked for
    outputs = begun.outputs(through=lambda stream: turn.turn_outputs(asked[1], stream))
    return await one.respond(begun, _answered(talk, turn, outputs))


async def _turn_tokens(service: Service, talk: ConversationEntry, body: Turn, num_before: int) -> list[int]:
    """What a turn adds."""
    given = _one_of(body, "messages", "text", "tokens")
    first = list(talk.first) if num_before == 0 else []
    if not (given == "messages" or first):  # what a chat template would have to be told
        for name in ("chat_template_kwargs", "reasoning_effort", "enable_thinking"):
            if getattr(body, name) not in (None, {}):
                raise ApiError(400, f"expected messages with {name}, got none", param=name)
    if not body.generate and given not in ("text", "tokens"):
        raise ApiError(400, "expected text or tokens to append without an answer", param="generate")
    if given in ("text", "tokens"):
        if first:
            raise ApiError(400, "expected messages: this conversation begins with some", param=given)
        return await _plain_tokens(service, body, is_first=num_before == 0)
    messages = [*first, *(body.messages or [])]
    if not messages:
        return []
    options = template_options(service.tokenizer, body)
    if num_before == 0:
        text = await service.render(messages, options=options)
    else:
        text = await service.render(messages, options=options, goes_on=True)
        last = talk.state.token_ids[-1]
        if last in service.tokenizer.all_special_ids:  # the answer's end is there already
            text = text.removeprefix(service.tokenizer.decode([last]))
    return await service.encode(text, add_special_tokens=False)


async def _plain_tokens(service: Service, body: NewConversation | Turn, *, is_first: bool) -> list[int]:
    if body.tokens is not None:
        return body.tokens
    if not body.text:
        raise ApiError(400, "expected some text, got an empty one", param="text")
    return await service.encode(body.text, add_special_tokens=is_first)


async def _answered(
    talk: ConversationEntry, turn: AsyncConversation, counted: AsyncGenerator[RequestOutput]
) -> AsyncGenerator[RequestOutput]:
    """The answer's outputs; at their end the turn becomes the conversation's."""
    is_kept = False
    try:
        async with aclosing(counted) as outputs:
            async for output in outputs:
                is_kept = True
                if output.finished:
                    # Before the client hears of the end, so that the next turn finds it; the generator ends with it.
                    await anext(outputs, None)
                    talk.end(turn, is_kept)
                yield output
    except Exception:
        is_kept = False
        raise
    finally:
        talk.end(turn, is_kept)


@router.post("/quire/conversations/{conversation_id}/snapshot", status_code=201)
async def snapshot(
    conversation_id: str, body: SnapshotRequest, service: TheService, tenant: TheTenant
) -> SnapshotCard:
    """Keeps it under a name in the disk cache, beyond the server's end."""
    talk = service.conversations.get(tenant, conversation_id)
    talk.require_rest()
    try:
        limits = SnapshotLimits(
            service.settings.limits.max_snapshots, service.settings.limits.max_snapshot_bytes
        )
        kept = await talk.state.fork().snapshot(body.name, overwrite=body.overwrite, limits=limits)
        return SnapshotCard.of(kept)
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
    """Those of this tenant and salt."""
    found = await service.engine.snapshots(**tenant.key(cache_salt))
    return SnapshotList(data=[SnapshotCard.of(one) for one in found])


@router.delete("/v1/snapshots/{name}", status_code=204)
async def remove_snapshot(
    name: str, service: TheService, tenant: TheTenant, cache_salt: str | None = None
) -> None:
    """Forgets one; its keys and values stay until their room is needed."""
    try:
        await service.engine.remove_snapshot(name, **tenant.key(cache_salt))
    except NoSnapshotError as error:
        raise _no_snapshot(name, None) from error


def _no_snapshot(name: str, param: str | None) -> ApiError:
    return ApiError(404, f"there is no snapshot {name!r}", param=param, code="snapshot_not_found")
