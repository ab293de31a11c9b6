"""`Conversation`: tokens that grow turn by turn, fork, rewind, and outlive the process as named snapshots.

Between turns: `quire.sessions.conversation_core`. This file has the blocking calls: a turn is a request of an `LLM`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from quire.engine.blocking import begin
from quire.engine.core import EngineCore
from quire.engine.driver import Driver, Mailbox
from quire.engine.text_stream import TextStream
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import CachePriority, RequestOptions
from quire.sessions.conversation_core import ConversationCore, num_found
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.sessions.snapshots import Snapshot

__all__ = ["Conversation", "ConversationStream"]


class Conversation(ConversationCore):
    """Made by `LLM.conversation`, `LLM.resume` and `fork`; used by one thread at a time."""

    def __init__(self, core: EngineCore, driver: Driver, transcript: Transcript) -> None:
        super().__init__(transcript)
        self._core = core
        self.driver = driver
        self._stream: weakref.ref[ConversationStream] | None = None

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
        params = self._params_of_turn(params)
        transcript = self._transcript
        options = RequestOptions(params, transcript.key, priority, cache_priority, stream=True)
        prompt = Prompt(None, transcript.token_ids)
        request_id, mailbox = begin(self.driver, self._core, lambda engine: engine.submit(prompt, options))
        stream = ConversationStream(self, request_id, mailbox)
        # A stream that its reader drops closes itself: the conversation must not keep it alive.
        self._turn, self._stream = request_id, weakref.ref(stream)
        return stream

    def fork(self) -> Conversation:
        """A copy that continues separately; during a turn, with the answer so far."""
        self._require_open()
        transcript = self._transcript
        if self._turn is not None:
            turn = self._turn

            def so_far() -> list[int]:
                request = self._core.engine.scheduler.requests.get(turn)
                return [] if request is None else list(request.sequences[0].output_ids)

            answer = self.driver.call(so_far)
            if answer:
                transcript = transcript.continued(answer)
        return Conversation(self._core, self.driver, transcript)

    def rewind(self, position: int) -> int:
        """Forgets the tokens from `position` on. Returns how many of the others are in memory now.

        They are fewer than `position` if memory has evicted some, and behind a sliding window: a tier may still have
        them, else the next turn computes them.
        """
        self._require_idle()
        transcript, core = self._transcript.rewound(position), self._core
        found = self.driver.call_open(lambda: num_found(transcript, core.engine.tenants, core.cache))
        self._transcript = transcript
        return found

    def snapshot(self, name: str, *, overwrite: bool = False) -> Snapshot:
        """Saves the conversation under a name in the disk cache, keys and values included; see `LLM.snapshots`."""
        self._require_idle()
        self.driver.require_open()
        return self._core.save_snapshot(name, self._transcript, self.driver.call_open, overwrite=overwrite)

    def close(self) -> None:
        """Ends a turn under way, and the conversation. A second call does nothing."""
        if not self._closed:
            stream = None if self._stream is None else self._stream()
            if stream is not None:
                stream.discard()
            self._closed = True

    def end_turn(self, output: RequestOutput | None) -> None:
        """Called by its stream: appends the answer; None: nothing to append."""
        self._turn = self._stream = None
        if output is not None and output.error is None:
            self._transcript = self._transcript.continued(output.outputs[0].token_ids)


class ConversationStream(TextStream):
    """A turn under way. `close` appends the answer so far, `discard` does not."""

    def __init__(self, conversation: Conversation, request_id: str, mailbox: Mailbox) -> None:
        super().__init__(conversation.driver, request_id, mailbox)
        self._conversation: Conversation | None = conversation

    def close(self) -> None:
        super().close()
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.end_turn(self.result)

    def discard(self) -> None:
        """Ends the turn as if it had never begun."""
        conversation, self._conversation = self._conversation, None
        super().close()
        if conversation is not None:
            conversation.end_turn(None)
