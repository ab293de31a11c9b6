"""`PromptChunks`: how many tokens of each prompt a step computes.

A prompt is *long* if more than `long_prefill_tokens` of its tokens are left to compute. All long prompts together get
at most that many tokens of a step in which another sequence computes too; a step of long prompts alone is as large as
the scheduler allows. So a decode waits for a small step, and a short prompt finds room in the next one. A step decides
in two passes: before the admission at most half of the tokens that decodes leave go to long prompts, after it they get
the rest.

The limit would let clients with short prompts take the tokens that it withholds from others. So while a client with a
long prompt has less than another's share, the other gets, by weight, no more tokens of a step than long prompts do.

A prompt that is scored gets no more tokens than rows of it may be scored in the step (`sampling.prompt_scores`).

Without a limit (0), which the scheduler gives while all requests are of one call, no prompt is long: the prompts of a
batch are computed in the largest steps, which are the fastest.

The bits of a token do not depend on the chunks, so neither do outputs.

Cost: O(sequences of the step).
"""

from __future__ import annotations

from quire.sampling.prompt_scores import MAX_SCORED_ROWS
from quire.scheduler.request import RequestSequence

__all__ = ["Chosen", "PromptChunks", "num_left"]

Chosen = list[tuple[RequestSequence, int]]
_UNLIMITED = 2**62


class PromptChunks:
    """The chunks of one step. budget: tokens that no sequence has yet. long_prefill_tokens: 0 for no limit.

    chunk_limit: the most tokens of one sequence. is_shared: another sequence may join the step.
    """

    def __init__(self, budget: int, long_prefill_tokens: int, chunk_limit: int, *, is_shared: bool) -> None:
        self.budget = budget
        self._chunk_limit = chunk_limit
        self._threshold = long_prefill_tokens or _UNLIMITED
        self._long_limit = min(self._threshold, max(1, budget // 2)) if is_shared else budget
        self.client_limits: dict[str | None, int] = {}  # tokens that these clients' prompts may still get
        self._num_scored_rows = MAX_SCORED_ROWS
        self.num_withheld = 0  # tokens for which the step had room, and that the limit kept from long prompts

    def is_long(self, sequence: RequestSequence) -> bool:
        """Whether a running sequence's prompt is long."""
        return num_left(sequence) > self._threshold

    def has_room(self, sequence: RequestSequence) -> bool:
        """False if a waiting sequence would get no token."""
        if sequence.is_long and self._long_limit <= 0:
            return False
        return self.client_limits.get(sequence.request.client, 1) > 0

    def most(self, sequence: RequestSequence, num_left: int, num_taken: int = 0) -> int:
        """The most further tokens of a prompt with `num_left` tokens to compute, `num_taken` of them in this step."""
        n = min(num_left - num_taken, self.budget, self._chunk_limit - num_taken)
        if self.client_limits:
            n = min(n, self.client_limits.get(sequence.request.client, n))
        n = max(0, min(n, self._long_limit) if num_left > self._threshold else n)
        if sequence.request.scores is not None:
            first = sequence.num_tokens - num_left + num_taken
            n = sequence.request.scores.chunk(first, n, self._num_scored_rows)
        return n

    def withholds(self, num_left: int) -> bool:
        """Whether a waiting prompt with `num_left` tokens to compute gets none because it is long."""
        return num_left > self._threshold and self._long_limit <= 0

    def charge(self, sequence: RequestSequence, num_left: int, num_tokens: int, num_taken: int = 0) -> None:
        """Records that a prompt gets `num_tokens` further tokens of the step."""
        self.budget -= num_tokens
        if sequence.request.scores is not None:
            first = sequence.num_tokens - num_left + num_taken
            self._num_scored_rows -= len(sequence.request.scores.rows(first, first + num_tokens))
        if num_left > self._threshold:
            self._long_limit -= num_tokens
        if sequence.request.client in self.client_limits:
            self.client_limits[sequence.request.client] -= num_tokens

    def take(self, sequence: RequestSequence, num_taken: int = 0) -> int:
        """`most` for a running sequence, charged."""
        n = self.most(sequence, num_left(sequence), num_taken)
        self.charge(sequence, num_left(sequence), n, num_taken)
        return n

    def refill(self, chosen: Chosen, admitted: Chosen) -> tuple[Chosen, Chosen]:
        """Both with the tokens that the admission left; without sequences that get none."""
        step = chosen + admitted
        is_shared = any(n and not self.is_long(sequence) for sequence, n in step)
        num_long = sum(n for sequence, n in step if self.is_long(sequence))
        self._long_limit = self._threshold - num_long if is_shared else self.budget
        filled = [(sequence, n + self.take(sequence, n)) for sequence, n in step]
        if is_shared and self.budget:
            left = sum(num_left(sequence) - n for sequence, n in filled if self.is_long(sequence))
            self.num_withheld = min(self.budget, left)
        return [(sequence, n) for sequence, n in filled[: len(chosen)] if n], filled[len(chosen) :]


def num_left(sequence: RequestSequence) -> int:
    """The known tokens of a running sequence that are not computed."""
    return sequence.num_tokens - sequence.num_computed
