"""`NextTurns`: computes the beginning of a session's next prompt while the engine has nothing else to do.

A chat template shows an answer in another way once a message follows it: it leaves thoughts out, or writes calls anew.
So the next prompt leaves the cached content where the answer began, although its text is known when the answer ends. It
is rendered then with a stand-in for the next message (a tool's result behind calls, else a user's message), tokenized
up to that message, and computed by ordinary prefills, which other requests find by its tokens.

Invariants
    T1  a prefill begins only while no request runs or waits, and takes about `_PIECE_S`: the most that a request waits.
    T2  a turn computes at most `max_tokens` tokens; a newer turn of the session replaces one that waits.
    T3  content is that of the session's tenant and salt, with the cache priority of its request.

Cost: a rendering and two encodings in a thread, then the missing tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from quire.engine.async_engine import AsyncEngine
from quire.errors import QuireError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request_options import RequestOptions
from quire.server.api_errors import ApiError
from quire.server.message_content import has_thoughts
from quire.server.metrics import Metrics
from quire.server.schemas.chat_bodies import ChatMessage, Tool

__all__ = ["EndedTurn", "NextTurns", "ThoughtsBack", "compute_ahead", "options_ahead"]

_log = logging.getLogger("quire")

_MAX_WAITING = 256  # sessions
_PIECE_S = 0.05  # of computing at a time
_PIECE_TOKENS = 64  # before a rate is measured
_POLL_S = 0.02
_ONLY_PROMPT = SamplingParams(max_tokens=0)


ThoughtsBack = Literal["with calls", "with answers", "always"]
"""The thoughts of an answer that come back in the next request. `always`: the server has the history. Else clients
send thoughts back as they sent earlier ones. Behind a first answer, chat clients do so `with calls` alone, whose
message they repeat as a whole; those of Anthropic's and of the responses API repeat all blocks or items, so `with
answers` too."""


@dataclass(frozen=True, eq=False)
class EndedTurn:
    """A request of a session, and its answer.

    messages, tools, template_options, add_special_tokens: of its prompt, see `prompt_of_chat`. answer: as the client
    got it. key: the keywords of `PrefixKey` of its content. cache_priority: of that. owner: of its text, see
    `Service.encode`. thoughts_back: which thoughts the next prompt has.
    """

    messages: Sequence[ChatMessage]
    answer: ChatMessage
    tools: Sequence[Tool]
    template_options: Mapping[str, Any]
    add_special_tokens: bool
    key: Mapping[str, Any]
    cache_priority: Any = "normal"
    owner: Hashable | None = None
    thoughts_back: ThoughtsBack = "with calls"


class ServerParts(Protocol):
    """The part of `quire.server.service.Service` that preparing needs."""

    engine: AsyncEngine
    metrics: Metrics
    draining: bool

    @property
    def num_open(self) -> int: ...
    async def encode(
        self, text: str, *, add_special_tokens: bool = True, owner: Hashable | None = None
    ) -> list[int]: ...
    async def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), options: Any = None
    ) -> str: ...


class NextTurns:
    """The turns of one server's sessions. For its event loop alone. max_tokens: of a turn; 0: nothing is prepared."""

    def __init__(self, service: ServerParts, max_tokens: int) -> None:
        self._service = service
        self.max_tokens = max_tokens
        self._waiting: OrderedDict[tuple[str, str], EndedTurn] = OrderedDict()
        # By session, the newest range of tokens computed for it and the digest of all tokens up to its end; its key.
        self._prepared: OrderedDict[tuple[str, str], tuple[tuple[int, int, bytes], Mapping[str, Any]]] = (
            OrderedDict()
        )
        self._task: asyncio.Task[None] | None = None

    def add(self, tenant: str, session: str, turn: EndedTurn) -> None:
        """Prepares the turn behind `turn` once the engine is idle; if too many wait, the oldest is dropped."""
        if not self.max_tokens:
            return
        self._waiting.pop((tenant, session), None)
        self._waiting[tenant, session] = turn
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def num_prepared(
        self, tenant: str, session: str, tokens: Sequence[int], num_found: int, key: Mapping[str, Any]
    ) -> int:
        """How many of the first `num_found` tokens of a prompt were prepared for it. key: as in `EndedTurn`."""
        prepared = self._prepared.get((tenant, session))
        if prepared is None:
            return 0
        (start, stop, digest), of = prepared
        if of != key or stop > len(tokens) or digest != _digest(tokens[:stop]):
            return 0
        return max(0, min(stop, num_found) - start)

    def withdraw(self, tenant: str, session: str) -> None:
        """A newer request of the session has come."""
        self._waiting.pop((tenant, session), None)

    @property
    def is_done(self) -> bool:
        """Whether no turn waits or is being prepared. Any thread may ask."""
        return not self._waiting and (self._task is None or self._task.done())

    async def _run(self) -> None:
        while self._waiting:
            await self._wait_until_idle()
            if self._service.draining or not self._waiting:
                self._waiting.clear()
                return
            session, turn = self._waiting.popitem(last=False)
            try:
                await self._prepare(session, turn)
                outcome = "done"
            except (
                ApiError,
                QuireError,
            ) as error:  # a template, or no room: the next request computes its tokens
                outcome = "failed"
                _log.debug("the next turn of a session is not prepared: %s", error)
            self._service.metrics.prepared_turns.labels(outcome).inc()

    async def _wait_until_idle(self) -> None:
        while self._service.num_open and not self._service.draining:
            await asyncio.sleep(_POLL_S)

    async def _prepare(self, session: tuple[str, str], turn: EndedTurn) -> None:
        tokens = await self._tokens(turn)
        if not tokens:
            return
        engine, options = self._service.engine, options_ahead(turn.cache_priority, turn.key)
        left, before, first = self.max_tokens, -1, -1
        while left > 0:
            await self._wait_until_idle()
            if self._service.draining:
                return
            start = await engine.num_cached(tokens, options)
            if start >= len(tokens) - 1 or start <= before:
                return
            # A state is kept at each end of a computation: one, where there are states.
            piece = len(tokens) if engine.spec.states else await self._piece()
            stop = min(len(tokens), start + min(piece, left))
            await compute_ahead(engine, tokens[:stop], options)
            first = start if first < 0 else first
            self._remember(session, (first, stop, _digest(tokens[:stop])), turn.key)
            left -= stop - start
            self._service.metrics.prepared_tokens.inc(stop - start)
            before = start
            if stop == len(tokens):
                return

    def _remember(
        self, session: tuple[str, str], prepared: tuple[int, int, bytes], key: Mapping[str, Any]
    ) -> None:
        self._prepared.pop(session, None)
        self._prepared[session] = prepared, key
        if len(self._prepared) > _MAX_WAITING:
            self._prepared.popitem(last=False)

    async def _piece(self) -> int:
        """Tokens that the engine computes in `_PIECE_S`, by the rate measured so far."""
        rate = (await self._service.engine.stats())["prefill_tokens_per_second"]
        return max(self._service.engine.block_size, int(rate * _PIECE_S)) if rate else _PIECE_TOKENS

    async def _tokens(self, turn: EndedTurn) -> list[int]:
        """The tokens of the next prompt that do not depend on its last message; none if the template hides them."""
        marker = f"turn-{secrets.token_hex(8)}"
        messages = [*turn.messages, _as_sent_back(turn), _next_message(turn.answer, marker)]
        text = await self._service.render(messages, turn.tools, turn.template_options)
        head, found, _ = text.partition(marker)
        if not found:
            return []
        first, second = [
            await self._service.encode(
                head + behind, add_special_tokens=turn.add_special_tokens, owner=turn.owner
            )
            for behind in ("a", "\n")
        ]
        num_common = next(
            (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
            min(len(first), len(second)),
        )
        return first[:num_common]


def options_ahead(cache_priority: Any, key: Mapping[str, Any]) -> RequestOptions:
    """Of a prompt that is computed before it is asked for, below every request. key: the keywords of `PrefixKey`."""
    return RequestOptions.of(
        _ONLY_PROMPT, priority=2**20, cache_priority=cache_priority, is_preparation=True, **key
    )


async def compute_ahead(engine: AsyncEngine, token_ids: list[int], options: RequestOptions) -> int:
    """Computes a prompt and keeps it; how many of its tokens were cached. *raises:* as the engine."""
    num_cached = 0
    (stream,) = await engine.begin([(Prompt(None, token_ids), options)])
    async with aclosing(stream):
        async for output in stream:
            if output.error is not None:
                raise output.error
            num_cached = output.num_cached_tokens
    return num_cached


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(tokens, "<i4").data).digest()


def _as_sent_back(turn: EndedTurn) -> ChatMessage:
    """The answer as the next request will have it, see `ThoughtsBack`."""
    earlier = [message for message in turn.messages if message.role == "assistant"]
    if turn.thoughts_back == "always":
        with_thoughts = True
    elif earlier:
        with_thoughts = any(map(has_thoughts, earlier))
    else:
        with_thoughts = turn.thoughts_back == "with answers" or bool(turn.answer.tool_calls)
    return turn.answer if with_thoughts else turn.answer.model_copy(update={"reasoning_content": None})


def _next_message(answer: ChatMessage, content: str) -> ChatMessage:
    """The first message behind the answer."""
    if not answer.tool_calls:
        return ChatMessage(role="user", content=content)
    call = answer.tool_calls[0]
    return ChatMessage(role="tool", content=content, tool_call_id=call.id, name=call.function.name)
