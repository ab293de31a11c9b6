"""`ConversationCore`: the part of a conversation that blocking and awaited conversations share.

Between turns it is only its tokens and holds no block, so that an idle conversation takes no KV memory. A turn is a
request over all tokens so far, which finds their keys and values in memory (blocks shared, at most a partial one
copied) or in a tier (loaded), or computes them again. The bits are the same, only the time differs. So `fork` and
`rewind` cost at most a copy of the token ids.

Not here: waiting. `quire.engine.conversation` blocks, `quire.engine.async_conversation` awaits.

Invariants
    V1  `token_ids` changes only as a whole: a call that raises leaves it as it was.
    V2  at most one turn is under way; until it has ended, only `fork` and `close` are possible.

Cost: O(tokens) host memory, 4 bytes each; a turn is one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.cache.protocol import KVCache
from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.scheduler.tenants import Tenants
from quire.sessions.transcript import Transcript

__all__ = ["ConversationCore", "num_found"]


class ConversationCore:
    """See the module's text. For one thread, or one event loop, at a time."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._turn: str | None = None  # request under way
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_tokens={len(self)})"

    def __len__(self) -> int:
        return len(self._transcript.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens: prompts and answers."""
        return self._transcript.token_ids.tolist()

    def append(
        self, content: str | Sequence[int] | np.ndarray, *, extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """Appends the user's tokens: text (special tokens only at the very beginning) or ids. Returns the new length.

        extra_keys: {position within the appended tokens: bytes}, see `quire.Cache.match`.
        *raises:* PromptError, also beyond the longest sequence.
        """
        self._require_idle()
        self._transcript = self._transcript.appended(content, extra_keys or {})
        return len(self)

    def _params_of_turn(self, params: SamplingParams | None) -> SamplingParams:
        """*raises:* ArgumentError: no turn can begin now, or not with these parameters."""
        self._require_idle()
        params = params or SamplingParams()
        if params.n != 1:
            raise ArgumentError(
                f"expected n=1 for a conversation's turn, got n={params.n}; fork it for several answers"
            )
        return params

    def _require_open(self) -> None:
        if self._closed:
            raise ArgumentError("expected an open conversation, got one that was closed")

    def _require_idle(self) -> None:
        self._require_open()
        if self._turn is not None:
            raise ArgumentError(
                "expected a conversation whose last turn has ended, got one that is being answered; read the answer "
                "to its end, close it, or fork the conversation"
            )


def num_found(transcript: Transcript, tenants: Tenants, cache: KVCache) -> int:
    """Leading tokens of a transcript that memory has now. For the engine's thread."""
    key = tenants.resolve(transcript.key, transcript.token_ids)
    return cache.match(transcript.token_ids, **key.content).num_tokens
