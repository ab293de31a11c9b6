"""`StreamProgress`: which tokens of a stream its client has, so that another engine can go on behind them.

A stream is followed if it is of one sequence: one prompt, n=1, no beams, of a route that begins one
(`CONTINUABLE_PATHS`). Its seed is known then, so that the tokens behind any position are those of every engine of the
model. The owner of the application, which takes its events (`quire.cluster.replica_server`), puts a progress in the
ASGI scope.

    first engine     events of token 1 | events of tokens 2, 3 | lost
    second engine    [events of tokens 1, 2, 3: dropped] | events of token 4 | ...

Cost: none without a progress; else two calls an output.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from quire.engine.async_engine import RequestStream
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import BegunAnswer, RequestOptions

__all__ = ["CONTINUABLE_PATHS", "StreamProgress", "StreamStart"]

CONTINUABLE_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))


@dataclass(frozen=True)
class StreamStart:
    """All that an engine needs to go on with a stream, in addition to its request. seed: of its draws. created: the
    answer's time, seconds since 1970. token_ids: those whose events the client has."""

    seed: int
    created: int
    token_ids: tuple[int, ...] = ()


class StreamProgress:
    """continued: the stream that another engine began, or None. when_written: called with the tokens of an output when
    all of its events have been sent, except of the last one.

    start: of this stream, None if it is not followed. created: as of `StreamStart`. is_writing: events of an output are
    being sent; is_dropped: events that the client has are.
    """

    def __init__(
        self, continued: StreamStart | None, when_written: Callable[[tuple[int, ...]], Awaitable[None]]
    ) -> None:
        self.start: StreamStart | None = None
        self.created = int(time.time()) if continued is None else continued.created
        self.is_writing = self.is_dropped = False
        self._continued = continued
        self._when_written = when_written

    def options(self, options: RequestOptions) -> RequestOptions:
        """The options of the stream's request, from those of one that begins here."""
        if self._continued is None:
            return options
        return replace(options, begun=BegunAnswer(self._continued.seed, self._continued.token_ids))

    def begin(self, stream: RequestStream) -> None:
        """The engine has taken the stream's request."""
        assert stream.seed is not None, "it has begun"
        self.start = StreamStart(stream.seed, self.created)

    async def followed(
        self, drawn: RequestOutput | None, outputs: AsyncGenerator[RequestOutput]
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs, behind that of the tokens which the client has (`RequestStream.drawn`)."""
        async with aclosing(outputs):
            if drawn is not None:
                self.is_dropped = True
                yield drawn
                self.is_dropped = False
            async for output in outputs:
                self.is_writing = True
                yield output
                if not output.finished:
                    self.is_writing = False
                    await self._when_written(tuple(output.outputs[0].token_ids))
