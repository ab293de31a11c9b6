"""A conversation: tokens that grow turn by turn, branch, go back, and outlive the process under a name.

Between turns it is nothing but its tokens: it holds no block, so that an idle one is never in anybody's way. A turn
is a request over all tokens so far, which finds their keys and values wherever they are by then: in memory (blocks
shared, at most one partial one copied), in a tier (loaded), or nowhere (computed again). The bits are the same, only
the time differs. So `fork` and `rewind` cost a copy of the token ids at most, and nothing can be lost but time.

Invariants
    V1  `token_ids` changes only as a whole: a call that raises leaves it as it was.
    V2  at most one turn is under way; until it has ended, only `fork` and `close` are possible.

Cost: O(tokens) host memory, 4 bytes each; a turn is one request.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.llm import LLM
from quire.engine.request import RequestOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.text_stream import TextStream
from quire.engine.transcript import Transcript
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.engine.snapshots import Snapshot

__all__ = ["Conversation", "ConversationStream"]


class Conversation:
    """Made by `LLM.conversation`, `LLM.resume` and `fork`; used by one thread at a time."""

    def __init__(self, llm: LLM, transcript: Transcript) -> None:
        self._llm = llm
        self._transcript = transcript
        self._turn: str | None = None  # request under way
        self._stream: weakref.ref[ConversationStream] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Conversation(num_tokens={len(self)})"

    def __len__(self) -> int:
        return len(self._transcript.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens: prompts and answers."""
        return self._transcript.token_ids.tolist()

    def append(
        self, what: str | Sequence[int] | np.ndarray, *, extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """More tokens, the user's: text (special tokens are added at the very beginning only) or ids. Its length then.

        extra_keys: {position within what is appended: bytes}, see `quire.Cache.match`.
        *raises:* PromptError; the longest sequence counts.
        """
        self._require_rest()
        self._transcript = self._transcript.appended(what, extra_keys or {})
        return len(self)

    def generate(self, params: SamplingParams | None = None, *, priority: int = 0) -> RequestOutput:
        """The model's turn: its answer, which is appended. Where it raises, the conversation is as before."""
        stream = self.stream(params, priority=priority)
        try:
            for _ in stream:
                pass
        except BaseException:
            stream.discard()
            raise
        assert stream.result is not None
        return stream.result

    def stream(self, params: SamplingParams | None = None, *, priority: int = 0) -> ConversationStream:
        """The model's turn piece by piece: `for piece in conversation.stream(): ...`.

        What has come is appended when the stream ends, or is closed before.
        """
        self._require_rest()
        params = params or SamplingParams()
        if params.n != 1:
            raise ArgumentError(
                f"expected n=1 for a conversation's turn, got n={params.n}; fork it for several answers"
            )
        transcript = self._transcript
        with self._llm._lock:
            self._llm._require_open()
            request_id = self._llm.engine.submit(
                transcript.token_ids,
                params,
                stream=True,
                priority=priority,
                namespace=transcript.namespace,
                extra_keys=transcript.extra_keys,
            )
            self._llm._turns.expect(request_id)
            stream = ConversationStream(self, request_id)
        # Whoever drops the stream has closed it: the conversation does not keep it alive.
        self._turn, self._stream = request_id, weakref.ref(stream)
        return stream

    def fork(self) -> Conversation:
        """Another one, the same so far, that goes on by itself; during a turn, with what there is of the answer."""
        self._require_open()
        transcript = self._transcript
        if self._turn is not None:
            with self._llm._lock:
                request = self._llm.engine.scheduler.requests.get(self._turn)
                if request is not None:
                    transcript = transcript.continued(request.samples[0].output_ids)
        return Conversation(self._llm, transcript)

    def rewind(self, position: int) -> int:
        """Forgets the tokens from `position` on. How many of those left need not be computed again, as of now.

        That is fewer than `position` where memory has given some up, and behind a sliding window: a tier may still have
        them, else they are computed by the next turn.
        """
        self._require_rest()
        transcript = self._transcript.rewound(position)
        with self._llm._lock:
            self._llm._require_open()
            found = self._llm.cache.match(
                transcript.token_ids, namespace=transcript.namespace, extra_keys=transcript.extra_keys
            )
        self._transcript = transcript
        return found.num_tokens

    def snapshot(self, name: str, *, overwrite: bool = False) -> Snapshot:
        """Keeps the conversation under a name in the disk cache, its keys and values too; see `snapshots`."""
        self._require_rest()
        return self._llm._snapshots().save(
            name, self._transcript, overwrite=overwrite, in_engine=self._llm._in_engine
        )

    def close(self) -> None:
        """Ends a turn under way; the conversation cannot be used any more. Twice does nothing."""
        if not self._closed:
            stream = None if self._stream is None else self._stream()
            if stream is not None:
                stream.discard()
            self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ArgumentError("expected an open conversation, got one that was closed")

    def _require_rest(self) -> None:
        self._require_open()
        if self._turn is not None:
            raise ArgumentError(
                "expected a conversation whose last turn has ended, got one that streams; read the stream to its end, "
                "close it, or fork the conversation"
            )

    def _end_turn(self, output: RequestOutput | None) -> None:
        self._turn = self._stream = None
        if output is not None and output.error is None:
            self._transcript = self._transcript.continued(output.outputs[0].token_ids)


class ConversationStream(TextStream):
    """A turn under way. `close` appends what has come so far, `discard` nothing."""

    def __init__(self, conversation: Conversation, request_id: str) -> None:
        super().__init__(conversation._llm._turns, request_id)
        self._conversation: Conversation | None = conversation

    def close(self) -> None:
        super().close()
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation._end_turn(self.result)

    def discard(self) -> None:
        """Ends the turn as if it had never begun."""
        conversation, self._conversation = self._conversation, None
        super().close()
        if conversation is not None:
            conversation._end_turn(None)
