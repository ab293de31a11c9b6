"""`ConversationCore`: a conversation without its waiting: tokens that grow turn by turn, fork, rewind, and snapshots.

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

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request_options import CachePriority, RequestOptions
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.engine.open_engine import OpenEngine
    from quire.offload.offloaded_sequence import InEngine
    from quire.sessions.snapshots import Snapshot, SnapshotLimits

__all__ = ["ConversationCore"]

_ids = itertools.count()


class ConversationCore:
    """See the module's text. For one thread, or one event loop, at a time."""

    def __init__(self, opened: OpenEngine, transcript: Transcript) -> None:
        self._opened = opened
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

    def turn_request(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        cache_priority: CachePriority = "normal",
        deltas: bool = False,
    ) -> tuple[Prompt, RequestOptions]:
        """The request of a turn. *raises:* ArgumentError: no turn can begin now, or not with these parameters."""
        self._require_idle()
        params, transcript = params or SamplingParams(), self._transcript
        if (num_beams := params.num_beams(self._opened.model.loaded.sampling_defaults)) != 1:
            by_model = ", num_beams of the model's generation config" * (params.beam_width is None)
            raise ArgumentError(
                f"expected beam_width=1 for a conversation's turn, got {num_beams}{by_model}; give a search to generate"
            )
        if params.n != 1:
            raise ArgumentError(
                f"expected n=1 for a conversation's turn, got n={params.n}; fork it for several answers"
            )
        name = request_id or f"turn-{next(_ids)}"
        options = RequestOptions(
            params, transcript.key, priority, cache_priority, stream=True, deltas=deltas, request_id=name
        )
        return Prompt(None, transcript.token_ids), options

    def _end_turn(self, answer: Sequence[int]) -> None:
        self._turn = None
        self._transcript = self._with_answer(answer)

    def _with_answer(self, answer: Sequence[int]) -> Transcript:
        return self._transcript.continued(answer) if answer else self._transcript

    def _rewind(self, position: int) -> int:
        """See `Conversation.rewind`. For the engine's thread."""
        self._require_idle()
        transcript = self._transcript.rewound(position)
        key = self._opened.engine.tenants.resolve(transcript.key, transcript.token_ids)
        found = self._opened.cache.match(transcript.token_ids, **key.content)
        self._transcript = transcript
        return found.num_tokens

    def _save(
        self, in_engine: InEngine, name: str, *, overwrite: bool, limits: SnapshotLimits | None = None
    ) -> Snapshot:
        """See `Conversation.snapshot`. in_engine: runs the calls that touch the engine."""
        self._require_idle()
        return self._opened.save_snapshot(
            name, self._transcript, in_engine, overwrite=overwrite, limits=limits
        )

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
