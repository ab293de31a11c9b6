"""`ReplicaGroup`: the replicas of one table, each reached by a request with a ticket.

A replica is lost if it has ended, cannot be reached, or gives no part, not even an empty one, for `hang_s` seconds.

Cost: a task for each part of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from quire.cluster.prompt_keys import RoutedPrompt
from quire.cluster.replica_server import AnswerEnd, AnswerHead, AnswerPart, CarriedRequest, OutputEvents
from quire.cluster.route_table import RouteTable

__all__ = ["BegunReply", "ReplicaGroup", "ReplicaLostError", "Send"]

Send = Callable[[CarriedRequest, int], AsyncGenerator[AnswerPart, None]]


class ReplicaLostError(Exception):
    """The replica of a request has ended, cannot be reached, or hangs."""


@dataclass(frozen=True)
class BegunReply:
    """An answer whose head has come, and the rest of its parts."""

    head: AnswerHead
    parts: AsyncGenerator[AnswerPart, None]
    ticket: int


class ReplicaGroup:
    """send: the parts of the answer to a request with a ticket of `table`. It raises ReplicaLostError, and names the
    replica in `table.note_sent`. hang_s: see the module's text."""

    def __init__(self, table: RouteTable, send: Send, hang_s: float) -> None:
        self.table = table
        self._send = send
        self._hang_s = hang_s

    async def begin(
        self, carried: CarriedRequest, prompt: RoutedPrompt, lost: set[str], wanted: str | None = None
    ) -> BegunReply:
        """Sends a request to a replica, and waits for the answer's head. *raises:* ReplicaLostError: it is in `lost`
        then, or is not the wanted one."""
        ticket = self.table.open(prompt.block_keys, prompt.num_tokens, wanted, lost)
        parts = self._watched(self._send(carried, ticket), ticket)
        try:
            head = await _head_of(parts)
            if wanted is not None and head.replica != wanted:
                raise ReplicaLostError(wanted)
            return BegunReply(head, parts, ticket)
        except BaseException:
            await self.give_up(parts, ticket, lost)
            raise

    async def _watched(
        self, parts: AsyncGenerator[AnswerPart, None], ticket: int
    ) -> AsyncGenerator[AnswerPart, None]:
        """The parts. *raises:* ReplicaLostError too: the replica was silent for `hang_s`. The time before the request
        has a replica does not count."""
        async with aclosing(parts):
            while True:
                coming = asyncio.ensure_future(anext(parts, None))
                try:
                    while not (await asyncio.wait({coming}, timeout=self._hang_s))[0]:
                        if (name := self.table.replica_of(ticket)) is not None:
                            self.table.note_silent(name)
                            raise ReplicaLostError(f"{name} was silent for {self._hang_s} s")
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait({coming})
                if (part := coming.result()) is None:
                    return
                yield part

    async def give_up(
        self, parts: AsyncGenerator[AnswerPart, None], ticket: int, lost: set[str] | None = None
    ) -> None:
        """Ends a request at its replica, which `lost` then has."""
        if lost is not None and (name := self.table.replica_of(ticket)) is not None:
            lost.add(name)
        self.table.close(ticket)
        await parts.aclose()

    async def whole(self, begun: BegunReply, lost: set[str]) -> bytes:
        """The rest of an answer. *raises:* ReplicaLostError: it is in `lost` then."""
        body, num_cached = bytearray(), None
        try:
            async for part in begun.parts:
                if isinstance(part, bytes):
                    body += part
                elif isinstance(part, OutputEvents):
                    body += part.events
                elif isinstance(part, AnswerEnd):
                    num_cached = part.num_cached_tokens
        except BaseException:
            await self.give_up(begun.parts, begun.ticket, lost)
            raise
        self.table.close(begun.ticket, num_cached)
        return bytes(body)


async def _head_of(parts: AsyncGenerator[AnswerPart, None]) -> AnswerHead:
    async for part in parts:
        if part:
            assert isinstance(part, AnswerHead)
            return part
    raise ReplicaLostError("the answer has no beginning")
