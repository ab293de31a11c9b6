"""A conversation of an `AsyncEngine`, for one event loop: the calls of a `ConversationCore`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.engine.conversation_core import ConversationCore
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import CachePriority, RequestOptions
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.engine.open_engine import OpenEngine
    from quire.sessions.snapshots import Snapshot, SnapshotLimits

__all__ = ["AsyncConversation", "AsyncOutputs"]

Result = TypeVar("Result")


class RequestSource(Protocol):
    """The part of `AsyncEngine` that a conversation needs; see there."""

    def submit(self, prompt: Prompt, options: RequestOptions) -> AsyncGenerator[RequestOutput, None]: ...
    def abort(self, request_id: str) -> None: ...
    async def between_steps(self, function: Callable[[], Result]) -> Result: ...
    def submit_between_steps(self, function: Callable[[], Result]) -> Future[Result]: ...


class AsyncOutputs(Protocol):
    """The outputs of a request: an async generator, or a `RequestStream`."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def aclose(self) -> Awaitable[None]: ...


class AsyncConversation(ConversationCore):
    """Made by `AsyncEngine.conversation`, `AsyncEngine.resume` and `fork`."""

    def __init__(self, opened: OpenEngine, engine: RequestSource, transcript: Transcript) -> None:
        super().__init__(opened, transcript)
        self._engine = engine
        self._answer: list[int] = []  # of the turn under way

    async def generate(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        cache_priority: CachePriority = "normal",
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The model's turn as it grows. The answer so far is appended when it ends, or when the iterator is closed.

        A loop left early closes the iterator only later; `contextlib.aclosing` does so at once.
        *raises:* as `AsyncEngine.generate`; an answer that ends with an error is not appended.
        """
        prompt, options = self.turn_request(
            params, priority=priority, request_id=request_id, cache_priority=cache_priority, deltas=deltas
        )
        async with aclosing(self.turn_outputs(options, self._engine.submit(prompt, options))) as outputs:
            async for output in outputs:
                yield output

    async def turn_outputs(
        self, options: RequestOptions, outputs: AsyncOutputs
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a `turn_request`, appended at their end. A turn's request is for `AsyncEngine.begin`.

        *raises:* ArgumentError: a turn is under way."""
        self._require_idle()
        self._turn, self._answer = options.request_id, []
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    token_ids = output.outputs[0].token_ids
                    if options.deltas:
                        self._answer += token_ids
                    else:
                        self._answer = token_ids
                    yield output
        except Exception:
            self._answer = []
            raise
        finally:
            self._end_turn(self._answer)
            self._answer = []

    def fork(self) -> AsyncConversation:
        """A copy that continues separately; during a turn, with the answer shown so far."""
        self._require_open()
        return AsyncConversation(self._opened, self._engine, self._with_answer(self._answer))

    async def rewind(self, position: int) -> int:
        """See `Conversation.rewind`."""
        return await self._engine.between_steps(lambda: self._rewind(position))

    async def snapshot(
        self, name: str, *, overwrite: bool = False, limits: SnapshotLimits | None = None
    ) -> Snapshot:
        """See `Conversation.snapshot`; steps go on meanwhile. limits: of all snapshots of its tenant.

        *raises:* SnapshotsFullError: beyond the limits.
        """

        def in_engine(function: Callable[[], Result]) -> Result:
            return self._engine.submit_between_steps(function).result()

        return await asyncio.to_thread(self._save, in_engine, name, overwrite=overwrite, limits=limits)

    def close(self) -> None:
        """Ends a turn under way, and the conversation. A second call does nothing."""
        if not self._closed and self._turn is not None:
            self._engine.abort(self._turn)
        self._closed = True
