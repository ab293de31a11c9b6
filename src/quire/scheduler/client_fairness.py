"""`ClientFairness`: shares the places of the batch between clients: order of admission, and choice for preemption.

A client is a name that a request brings (`RequestOptions.client`); requests without a name form one client. Requests of
one client join in order of arrival. Between clients of the same priority

    admission      the next sequence is of the client with the fewest sequences running or loading; among equals, of
                   the client whose last admission is the longest ago
    no room        while a sequence waits for room, the last sequence of the client with the most sequences is
                   preempted, if that client has at least twice as many as the waiting one's client would then have.
                   The first sequence of all is never preempted
    out of memory  among the sequences of the lowest priority, the last one of the client with the most is preempted

    a step         at most `MAX_ROWS` sequences of one client decode: its first in each step, the rest in turn. Requests
                   of one client join until they draw `MAX_JOINS` tokens, but at least one joins. A step with hundreds
                   would be long for all clients. Both limits hold while there are several clients and for
                   `STEPS_BEHIND` steps after that: a client with short requests is often absent when a step begins

So no client keeps another from running, and a client that is alone uses the whole batch. The factor two keeps a client
with an even share from being preempted.

Not here: the limit of waiting requests per client (the server's `api_admission`), and memory (`tenant_quotas`).

Cost: O(1) while all requests are of one client; else O(waiting) per step with a waiting sequence, and
O(running + loading) if a sequence has no room.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from quire.scheduler.request import Request, RequestSequence, SequenceStatus

__all__ = ["ClientFairness"]

MAX_ROWS = 64
MAX_JOINS = 16
STEPS_BEHIND = 64
_MAX_REMEMBERED = 1024


class ClientFairness:
    """The clients of the queued and running requests. live: the sequences that run or load, sorted by key."""

    def __init__(self) -> None:
        self.are_several = False
        self.step = 0  # number of the last step; the scheduler sets it
        self.shared_until = 0  # number of the step at which the limits of a step end
        self._num_requests: Counter[str | None] = Counter()
        # Number of each client's last admission, oldest first; includes some clients that have left.
        self._joined: dict[str | None, int] = {}
        self._num_joined = 0

    def add(self, request: Request) -> None:
        self._num_requests[request.client] += 1
        self.are_several = len(self._num_requests) > 1

    def remove(self, request: Request) -> None:
        if self.are_several:
            self.shared_until = self.step + STEPS_BEHIND
        self._num_requests[request.client] -= 1
        if not self._num_requests[request.client]:
            del self._num_requests[request.client]
            self.are_several = len(self._num_requests) > 1

    def record_join(self, request: Request) -> None:
        """Records that a sequence of the request begins to run."""
        self._num_joined += 1
        self._joined.pop(request.client, None)
        self._joined[request.client] = self._num_joined
        if len(self._joined) > _MAX_REMEMBERED:
            del self._joined[next(iter(self._joined))]

    def admission_order(
        self, waiting: Sequence[RequestSequence], live: Iterable[RequestSequence]
    ) -> Iterator[RequestSequence]:
        """Yields the waiting sequences (sorted by key) in the order of admission. The caller sets an admitted sequence
        to RUNNING before it takes the next one."""
        if not (self.are_several or self.step < self.shared_until):
            yield from waiting
            return
        counts = _counts(live)
        queues: dict[str | None, list[RequestSequence]] = {}
        for sequence in reversed(waiting):
            queues.setdefault(sequence.request.client, []).append(sequence)

        def entry(client: str | None) -> tuple[int, int, int, tuple[int, int, int], str | None]:
            first = queues[client][-1]  # keys differ, so that clients are never compared
            return first.request.priority, counts[client], self._joined.get(client, 0), first.key, client

        heap = [entry(client) for client in queues]
        heapq.heapify(heap)
        num_drawn: Counter[str | None] = Counter()  # tokens that each client's admitted sequences draw
        while heap:
            client = heap[0][-1]
            sequence = queues[client].pop()
            yield sequence
            counts[client] += 1
            if sequence.state is SequenceStatus.RUNNING:
                num_drawn[client] += 1 + len(sequence.unforked_siblings())
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
        counts = _counts(live)
        most = max(counts.values(), default=0)
        if most < 2 * (counts[waiting.request.client] + 1):
            return []
        return [
            sequence
            for sequence in live[1:]
            if counts[sequence.request.client] == most
            and sequence.request.priority >= waiting.request.priority
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


def _counts(live: Iterable[RequestSequence]) -> Counter[str | None]:
    return Counter(sequence.request.client for sequence in live)
