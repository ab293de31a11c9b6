"""`ClientFairness`: shares the engine between clients: order of their prompts, and choice for preemption.

A client is a name that a request brings (`RequestOptions.client`, or its tenant); requests without a name form one
client. Requests of one client join in order of arrival. Clients of the same priority share the computed tokens of the
last `WINDOW_TOKENS` by weight: the share of a client is its tokens divided by its weight, and older tokens count less,
by e for each `WINDOW_TOKENS` that the engine has computed since

    prompts        the next tokens are of the client with the smallest share: of its running prompt, or of its next
                   waiting sequence
    no room        while a sequence waits for room, the last sequence of the client with the most sequences (by weight)
                   is preempted, if that client has at least twice as many as the waiting one's client would then have,
                   and the larger share of tokens: it would else be admitted again at once.
                   The first sequence of all is never preempted
    out of memory  among the sequences of the lowest priority, the last one of the client with the most is preempted

    a step         at most `MAX_ROWS` sequences of one client decode: its first in each step, the rest in turn. Requests
                   of one client join until they draw `MAX_JOINS` tokens, but at least one joins. A step with hundreds
                   would be long for all clients. Both limits hold while there are several clients and for
                   `STEPS_BEHIND` steps after that: a client with short requests is often absent when a step begins

So no client keeps another from running, a client that asks for less than its share gets all of it, and a client that is
alone uses the whole batch. The factor two keeps a client with an even share from being preempted.

Not here: the limit of waiting requests per client (the server's `api_admission`), and memory (`tenant_quotas`).

Cost: O(1) while all requests are of one client; else O(waiting) per step with a waiting sequence, and
O(running + loading) if a sequence has no room.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from quire.scheduler.prompt_chunks import Chosen, num_left
from quire.scheduler.request import Request, RequestSequence, SequenceStatus

__all__ = ["ClientFairness"]

MAX_ROWS = 64
MAX_JOINS = 16
STEPS_BEHIND = 64
WINDOW_TOKENS = 16384
_MAX_REMEMBERED = 1024


class ClientFairness:
    """The clients of the queued and running requests. live: the sequences that run or load, sorted by key."""

    def __init__(self) -> None:
        self.are_several = False
        self.step = 0  # number of the last step; the scheduler sets it
        self.shared_until = 0  # number of the step at which the limits of a step end
        self._num_requests: Counter[str | None] = Counter()
        # Computed tokens by weight, of clients that have left too. The newest token counts `_scale`, which grows.
        self._used: dict[str | None, float] = {}
        self._scale = 1.0
        # Tokens of steps of decodes of one client, which `record_decodes` is still to record, and a request of it.
        self.unrecorded = 0
        self.unrecorded_of: Request | None = None
        # By tenant, since the start: tokens computed for it, and tokens of others computed while it waited.
        self.computed_tokens: Counter[str | None] = Counter()
        self.passed_by_tokens: Counter[str | None] = Counter()

    def add(self, request: Request) -> None:
        self.record_decodes()
        self._num_requests[request.client] += 1
        self.are_several = len(self._num_requests) > 1

    def remove(self, request: Request) -> None:
        if self.are_several:
            self.shared_until = self.step + STEPS_BEHIND
        self._num_requests[request.client] -= 1
        if not self._num_requests[request.client]:
            del self._num_requests[request.client]
            self.are_several = len(self._num_requests) > 1

    def record_step(
        self,
        chosen: Sequence[tuple[RequestSequence, int]],
        num_tokens: int,
        waiting: Iterable[RequestSequence],
    ) -> None:
        """Records the tokens of a step, `num_tokens` in all. waiting: the sequences that may join the next one."""
        self.record_decodes()
        if self.are_several:
            used = self._used
            by_tenant: Counter[str | None] = Counter()
            for sequence, n in chosen:
                request = sequence.request
                by_tenant[request.tenant] += n
                used[request.client] = used.get(request.client, 0.0) + n * self._scale / request.weight
            self.computed_tokens.update(by_tenant)
            for tenant in {sequence.request.tenant for sequence in waiting}:
                self.passed_by_tokens[tenant] += num_tokens - by_tenant[tenant]
            self._age(num_tokens)
        else:
            self._record(chosen[0][0].request, num_tokens)

    def record_decodes(self) -> None:
        """Records the tokens of `unrecorded`."""
        if self.unrecorded and self.unrecorded_of is not None:
            self._record(self.unrecorded_of, self.unrecorded)
        self.unrecorded, self.unrecorded_of = 0, None

    def _record(self, request: Request, num_tokens: int) -> None:
        """Records tokens that are all of one client."""
        added = num_tokens * self._scale / request.weight
        self._used[request.client] = self._used.get(request.client, 0.0) + added
        self.computed_tokens[request.tenant] += num_tokens
        self._age(num_tokens)

    def _age(self, num_tokens: int) -> None:
        """Has all tokens before the newest `num_tokens` count less."""
        self._scale *= math.exp(num_tokens / WINDOW_TOKENS)
        if self._scale > 1e100 or len(self._used) > 2 * _MAX_REMEMBERED:
            largest = heapq.nlargest(_MAX_REMEMBERED, self._used.items(), key=lambda entry: entry[1])
            self._used = {client: tokens / self._scale for client, tokens in largest}
            self._scale = 1.0

    def forget_step(self, sequences: Iterable[RequestSequence], num_tokens: Iterable[int]) -> None:
        """Takes a step that was not computed out of the tenants' counts; the shares keep it for a window."""
        self.record_decodes()
        for sequence, n in zip(sequences, num_tokens, strict=True):
            self.computed_tokens[sequence.request.tenant] -= n

    def share(self, client: str | None) -> float:
        """The client's computed tokens of the window, divided by its weight."""
        return self._used.get(client, 0.0) / self._scale

    def rank(self, sequence: RequestSequence) -> tuple[int, float, tuple[int, int, int]]:
        """The order in which sequences get tokens of a step for their prompts, the smallest first."""
        request = sequence.request
        return request.priority, self.share(request.client) if self.are_several else 0.0, sequence.key

    def limits_beside(
        self,
        long: Iterable[RequestSequence],
        num_long: int,
        chosen: Chosen,
        waiting: Iterable[RequestSequence],
    ) -> dict[str | None, int]:
        """The further tokens of a step for clients with more than the smallest share of those with long prompts.

        long: running and waiting long prompts, which get `num_long` tokens of a step together; chosen: the sequences
        of the step so far.
        """
        with_long = {sequence.request.client: sequence.request.weight for sequence in long}
        if not with_long:
            return {}
        per_weight = num_long / sum(with_long.values())
        smallest = min(map(self.share, with_long))
        tokens: Counter[str | None] = Counter()
        weights = {sequence.request.client: sequence.request.weight for sequence in waiting}
        for sequence, n in chosen:
            tokens[sequence.request.client] += n
            weights[sequence.request.client] = sequence.request.weight
        return {
            client: math.ceil(per_weight * weight) - tokens[client]
            for client, weight in weights.items()
            if self.share(client) > smallest
        }

    def admission_order(self, waiting: Sequence[RequestSequence]) -> Iterator[RequestSequence]:
        """Yields the waiting sequences (sorted by key) in the order of admission. The caller sets an admitted sequence
        to RUNNING before it takes the next one."""
        if not (self.are_several or self.step < self.shared_until):
            yield from waiting
            return
        queues: dict[str | None, list[RequestSequence]] = {}
        for sequence in reversed(waiting):
            queues.setdefault(sequence.request.client, []).append(sequence)
        shares = {client: self.share(client) for client in queues}

        def entry(client: str | None) -> tuple[int, float, tuple[int, int, int], str | None]:
            first = queues[client][-1]  # keys differ, so that clients are never compared
            return first.request.priority, shares[client], first.key, client

        heap = [entry(client) for client in queues]
        heapq.heapify(heap)
        num_drawn: Counter[str | None] = Counter()  # tokens that each client's admitted sequences draw
        while heap:
            client = heap[0][-1]
            sequence = queues[client].pop()
            yield sequence
            if sequence.state is SequenceStatus.RUNNING:
                num_drawn[client] += 1 + len(sequence.unforked_siblings())
                shares[client] += num_left(sequence) / sequence.request.weight
            if queues[client] and num_drawn[client] < MAX_JOINS:
                heapq.heapreplace(heap, entry(client))
            else:
                heapq.heappop(heap)

    def select_decodes(self, decoding: list[RequestSequence]) -> list[RequestSequence]:
        """The sequences that decode in step `step`, if several clients share it. decoding: all, sorted by key."""
        if len(decoding) <= MAX_ROWS:
            return decoding
        by_client: dict[str | None, list[RequestSequence]] = {}
        for sequence in decoding:
            by_client.setdefault(sequence.request.client, []).append(sequence)
        left_out: set[int] = set()
        for sequences in by_client.values():
            num_others, num_taken = len(sequences) - 1, MAX_ROWS - 1  # without the first
            for offset in range(num_taken, num_others):
                left_out.add(id(sequences[1 + (self.step * num_taken + offset) % num_others]))
        return [sequence for sequence in decoding if id(sequence) not in left_out]

    def candidates_over_share(
        self, waiting: RequestSequence, live: Sequence[RequestSequence]
    ) -> list[RequestSequence]:
        """The sequences that may be preempted for a waiting sequence, the first to go last in the list."""
        if not self.are_several:
            return []
        counts, request = _counts(live), waiting.request
        most = max(counts.values(), default=0)
        if most < 2 * (counts[request.client] + 1 / request.weight):
            return []
        return [
            sequence
            for sequence in live[1:]
            if counts[sequence.request.client] == most and self.rank(sequence)[:2] > self.rank(waiting)[:2]
        ]

    def preemption_candidates(
        self, candidates: list[RequestSequence], live: Iterable[RequestSequence]
    ) -> list[RequestSequence]:
        """The first candidate, and those of the client with the most; the caller preempts the last of them."""
        if not self.are_several or len(candidates) < 3:
            return candidates
        counts = _counts(live)
        last = [s for s in candidates[1:] if s.request.priority == candidates[-1].request.priority]
        most = max(counts[sequence.request.client] for sequence in last)
        return candidates[:1] + [sequence for sequence in last if counts[sequence.request.client] == most]


def _counts(live: Iterable[RequestSequence]) -> dict[str | None, float]:
    """The number of sequences of each client, divided by its weight."""
    numbers = Counter((sequence.request.client, sequence.request.weight) for sequence in live)
    counts: defaultdict[str | None, float] = defaultdict(float)
    for (client, weight), number in numbers.items():
        counts[client] += number / weight
    return counts
