"""A conversation of an `AsyncEngine`, for servers: `conversation.Conversation` awaited, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.request import RequestOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.tenants import Retention
from quire.engine.transcript import Transcript
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncEngine
    from quire.engine.snapshots import Snapshot

__all__ = ["AsyncConversation"]


class AsyncConversation:
    """Made by `AsyncEngine.conversation`, `AsyncEngine.resume` and `fork`. V1 and V2 of `conversation` hold."""

    def __init__(
        self,
        engine: AsyncEngine,
        transcript: Transcript,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._engine = engine
        self._transcript = transcript
        self._whose: dict[str, Any] = {"tenant": tenant, "cache_salt": cache_salt}
        self._answer: list[int] = []  # of the turn under way, so far
        self._turn: str | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._transcript.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens: prompts and answers."""
        return self._transcript.token_ids.tolist()

    def append(self, what: Any, *, extra_keys: Mapping[int, bytes] | None = None) -> int:
        """See `Conversation.append`."""
        self._require_rest()
        self._transcript = self._transcript.appended(what, extra_keys or {})
        return len(self)

    async def generate(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        retention: Retention = "normal",
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The model's turn as it grows. What has come is appended when it ends, or when the iterator is closed before.

        A loop that is left early closes it a moment later only; `contextlib.aclosing` does so at once.
        *raises:* as `AsyncEngine.generate`; an answer that ends with an error is not appended.
        """
        self._require_rest()
        params = params or SamplingParams()
        if params.n != 1:
            raise ArgumentError(
                f"expected n=1 for a conversation's turn, got n={params.n}; fork it for several answers"
            )
        transcript, name = self._transcript, request_id or self._engine._new_id()
        self._turn, self._answer = name, []
        outputs = self._engine.generate(
            transcript.token_ids,
            params,
            request_id=name,
            priority=priority,
            namespace=transcript.namespace,
            extra_keys=transcript.extra_keys,
            retention=retention,
            deltas=deltas,
            **self._whose,
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    token_ids = output.outputs[0].token_ids
                    if deltas:
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
        return AsyncConversation(self._engine, self._now(), **self._whose)

    async def rewind(self, position: int) -> int:
        """See `Conversation.rewind`."""
        self._require_rest()
        transcript = self._transcript.rewound(position)
        llm = self._engine.llm

        def num_found() -> int:
            tokens = transcript.token_ids
            where = {"namespace": transcript.namespace, "extra_keys": transcript.extra_keys}
            place = llm.engine.tenants.place(tokens, **self._whose, **where)
            return llm.cache.match(tokens, namespace=place.namespace, extra_keys=place.extra_keys).num_tokens

        found = await self._engine.between_steps(num_found)
        self._transcript = transcript
        return found

    async def snapshot(self, name: str, *, overwrite: bool = False) -> Snapshot:
        """See `Conversation.snapshot`; steps go on meanwhile."""
        self._require_rest()
        transcript, tenants = self._transcript, self._engine.llm.engine.tenants
        own = tenants.namespace_of(**self._whose, base=transcript.namespace)
        return await asyncio.to_thread(
            self._engine.llm._snapshots().save,
            name,
            replace(transcript, namespace=own),
            overwrite=overwrite,
            in_engine=lambda function: self._engine.submit_between_steps(function).result(),
        )

    def close(self) -> None:
        """Ends a turn under way; the conversation cannot be used any more. Twice does nothing."""
        if not self._closed and self._turn is not None:
            self._engine.abort(self._turn)
        self._closed = True

    def _now(self) -> Transcript:
        return self._transcript.continued(self._answer) if self._answer else self._transcript

    def _require_open(self) -> None:
        if self._closed:
            raise ArgumentError("expected an open conversation, got one that was closed")

    def _require_rest(self) -> None:
        self._require_open()
        if self._turn is not None:
            raise ArgumentError(
                "expected a conversation whose last turn has ended, got one that is being answered; wait for its end, "
                "leave the iteration, or fork the conversation"
            )
