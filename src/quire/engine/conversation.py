"""`Conversation`: tokens that grow turn by turn, fork, rewind, and outlive the process as named snapshots.

This file has the blocking calls of a `ConversationCore`: a turn is a request of an `LLM`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from quire.engine.conversation_core import ConversationCore
from quire.engine.driver import Mailbox
from quire.engine.text_stream import TextStream
from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import CachePriority

if TYPE_CHECKING:
    from quire.engine.driver import Driver
    from quire.sessions.snapshots import Snapshot

__all__ = ["Conversation", "ConversationStream"]


class Conversation(ConversationCore):
    """Made by `LLM.conversation`, `LLM.resume` and `fork`; used by one thread at a time."""

    # A stream that its reader drops closes itself: the conversation must not keep it alive.
    _stream: weakref.ref[ConversationStream] | None = None

    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_priority: CachePriority = "normal",
    ) -> RequestOutput:
        """The model's turn: its answer, which is appended. An error leaves the conversation as it was."""
        stream = self.stream(params, priority=priority, cache_priority=cache_priority)
        try:
            for _ in stream:
                pass
        except BaseException:
            stream.discard()
            raise
        assert stream.result is not None
        return stream.result

    def stream(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_priority: CachePriority = "normal",
    ) -> ConversationStream:
        """The model's turn piece by piece: `for piece in conversation.stream(): ...`.

        The answer so far is appended when the stream ends, or is closed.
        """
        request = self.turn_request(params, priority=priority, cache_priority=cache_priority)
        driver = self._opened.driver
        driver.require_open()
        self._opened.changes.refuse_autocast()
        request_id, mailbox = driver.begin(lambda engine: engine.submit(*request))
        stream = ConversationStream(self, driver, request_id, mailbox)
        self._turn, self._stream = request_id, weakref.ref(stream)
        return stream

    def fork(self) -> Conversation:
        """A copy that continues separately; during a turn, with the answer so far."""
        self._require_open()
        turn, engine = self._turn, self._opened.engine

        def answer() -> list[int]:
            request = None if turn is None else engine.scheduler.requests.get(turn)
            return [] if request is None else list(request.sequences[0].output_ids)

        so_far = [] if turn is None else self._opened.driver.call(answer)
        return Conversation(self._opened, self._with_answer(so_far))

    def rewind(self, position: int) -> int:
        """Forgets the tokens from `position` on. Returns how many of the others are in memory now.

        They are fewer than `position` if memory has evicted some, and behind a sliding window: a tier may still have
        them, else the next turn computes them.
        """
        return self._opened.driver.call_open(lambda: self._rewind(position))

    def snapshot(self, name: str, *, overwrite: bool = False) -> Snapshot:
        """Saves the conversation under a name in the disk cache, keys and values included; see `LLM.snapshots`."""
        self._opened.driver.require_open()
        return self._save(self._opened.driver.call_open, name, overwrite=overwrite)

    def close(self) -> None:
        """Ends a turn under way, and the conversation. A second call does nothing."""
        stream = None if self._closed or self._stream is None else self._stream()
        if stream is not None:
            stream.discard()
        self._closed = True


class ConversationStream(TextStream):
    """A turn under way. `close` appends the answer so far, `discard` does not."""

    def __init__(self, conversation: Conversation, driver: Driver, request_id: str, mailbox: Mailbox) -> None:
        super().__init__(driver, request_id, mailbox)
        self._conversation: Conversation | None = conversation

    def close(self) -> None:
        super().close()
        output = self.result
        self._end([] if output is None or output.error is not None else output.outputs[0].token_ids)

    def discard(self) -> None:
        """Ends the turn as if it had never begun."""
        self._end([])
        super().close()

    def _end(self, answer: list[int]) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation._end_turn(answer)
