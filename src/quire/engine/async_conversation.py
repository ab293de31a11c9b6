"""A conversation of an `AsyncEngine`, for servers: `conversation.Conversation` awaited, in one event loop."""

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

__all__ = ["AsyncConversation", "Outputs"]

Result = TypeVar("Result")


class RequestSource(Protocol):
    """What is needed of an `AsyncEngine`, which makes conversations; see there."""

    core: EngineCore

    def new_id(self) -> str: ...
    def submit(self, prompt: Prompt, options: RequestOptions) -> AsyncGenerator[RequestOutput, None]: ...
    def abort(self, request_id: str) -> None: ...
    async def between_steps(self, function: Callable[[], Result]) -> Result: ...
    def submit_between_steps(self, function: Callable[[], Result]) -> Future[Result]: ...


class Outputs(Protocol):
    """Of a request: an async generator, or an `AsyncEngine`'s stream."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def aclose(self) -> Awaitable[None]: ...


class AsyncConversation(ConversationCore):
    """Made by `AsyncEngine.conversation`, `AsyncEngine.resume` and `fork`."""

    def __init__(self, engine: RequestSource, transcript: Transcript) -> None:
        super().__init__(transcript)
        self._engine = engine
        self._answer: list[int] = []  # of the turn under way, so far

    async def generate(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        cache_priority: CachePriority = "normal",
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The model's turn as it grows. What has come is appended when it ends, or when the iterator is closed before.

        A loop that is left early closes it a moment later only; `contextlib.aclosing` does so at once.
        *raises:* as `AsyncEngine.generate`; an answer that ends with an error is not appended.
        """
        prompt, options = self.asked(
            params, priority=priority, request_id=request_id, cache_priority=cache_priority, deltas=deltas
        )
        async with aclosing(self.answered(options, self._engine.submit(prompt, options))) as outputs:
            async for output in outputs:
                yield output

    def asked(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        cache_priority: CachePriority = "normal",
        deltas: bool = False,
    ) -> tuple[Prompt, RequestOptions]:
        """The request that the turn is, for `AsyncEngine.begin`; `answered` then takes its outputs."""
        params, transcript = self._params_of_turn(params), self._transcript
        name = request_id or self._engine.new_id()
        options = RequestOptions(
            params, transcript.key, priority, cache_priority, stream=True, deltas=deltas, request_id=name
        )
        return Prompt(None, transcript.token_ids), options

    async def answered(
        self, options: RequestOptions, outputs: Outputs
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of what was `asked`, appended when they end. *raises:* ArgumentError: a turn is under way."""
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
            self._transcript = self._now()
            self._turn, self._answer = None, []

    def fork(self) -> AsyncConversation:
        """Another one, the same so far, that goes on by itself; during a turn, with what was shown of the answer."""
        self._require_open()
        return AsyncConversation(self._engine, self._now())

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

        *raises:* SnapshotsFullError: beyond them.
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
        """Ends a turn under way; the conversation cannot be used any more. Twice does nothing."""
        if not self._closed and self._turn is not None:
            self._engine.abort(self._turn)
        self._closed = True

    def _now(self) -> Transcript:
        return self._transcript.continued(self._answer) if self._answer else self._transcript
