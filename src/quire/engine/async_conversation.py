"""A conversation of an `AsyncEngine`, for one event loop: `conversation.Conversation` with awaited calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import CachePriority, RequestOptions
from quire.sessions.conversation_core import ConversationCore, num_found
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.sessions.snapshots import Snapshot, SnapshotLimits

__all__ = ["AsyncConversation", "AsyncOutputs"]

Result = TypeVar("Result")


class RequestSource(Protocol):
    """The part of `AsyncEngine` that a conversation needs; see there."""

    core: EngineCore

    def new_id(self) -> str: ...
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

    def __init__(self, engine: RequestSource, transcript: Transcript) -> None:
        super().__init__(transcript)
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

    def turn_request(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        cache_priority: CachePriority = "normal",
        deltas: bool = False,
    ) -> tuple[Prompt, RequestOptions]:
        """The request of a turn, for `AsyncEngine.begin`; pass its outputs to `turn_outputs`."""
        params, transcript = self._params_of_turn(params), self._transcript
        name = request_id or self._engine.new_id()
        options = RequestOptions(
            params, transcript.key, priority, cache_priority, stream=True, deltas=deltas, request_id=name
        )
        return Prompt(None, transcript.token_ids), options

    async def turn_outputs(
        self, options: RequestOptions, outputs: AsyncOutputs
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a `turn_request`, appended at their end. *raises:* ArgumentError: a turn is under way."""
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
            self._transcript = self._transcript_so_far()
            self._turn, self._answer = None, []

    def fork(self) -> AsyncConversation:
        """A copy that continues separately; during a turn, with the answer shown so far."""
        self._require_open()
        return AsyncConversation(self._engine, self._transcript_so_far())

    async def rewind(self, position: int) -> int:
        """See `Conversation.rewind`."""
        self._require_idle()
        transcript, core = self._transcript.rewound(position), self._engine.core
        found = await self._engine.between_steps(
            lambda: num_found(transcript, core.engine.tenants, core.cache)
        )
        self._transcript = transcript
        return found

    async def snapshot(
        self, name: str, *, overwrite: bool = False, limits: SnapshotLimits | None = None
    ) -> Snapshot:
        """See `Conversation.snapshot`; steps go on meanwhile. limits: of all snapshots of its tenant.

        *raises:* SnapshotsFullError: beyond the limits.
        """
        self._require_idle()
        save, engine = self._engine.core.save_snapshot, self._engine
        return await asyncio.to_thread(
            save,
            name,
            self._transcript,
            lambda function: engine.submit_between_steps(function).result(),
            overwrite=overwrite,
            limits=limits,
        )

    def close(self) -> None:
        """Ends a turn under way, and the conversation. A second call does nothing."""
        if not self._closed and self._turn is not None:
            self._engine.abort(self._turn)
        self._closed = True

    def _transcript_so_far(self) -> Transcript:
        return self._transcript.continued(self._answer) if self._answer else self._transcript
