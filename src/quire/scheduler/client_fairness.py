"""Places between clients: who joins next, and who gives a place back, where requests say which client's they are.

A client is a name that a request brings (`RequestOptions.client`); None is one as well. Of one client's requests the
first that came is the first to join. Between clients of the same priority

    joins next     one of the client that has the fewest sequences running or loading; of several such, of the one for
                   which none has joined for longest
    gives way      while one waits for room, the last sequence of the client that has the most of them: twice as many,
                   at least, as the one that waits would have then. Never the first of all
    out of memory  of the least urgent sequences, the last of the client that has the most

    in a step      at most `MAX_ROWS` sequences of one client decode: of more by turns, its first in every one. And one
                   client's requests join until they draw `MAX_JOINS` tokens, one request at least. A step of hundreds
                   of them would be long for all. So it is while there are several clients, and for `STEPS_BEHIND`
                   steps behind that: whoever asks for little again and again is not there when a step begins

So no client keeps another from running, whatever it sends and however long its answers are; alone, it has all there is.
Twice as many, so that nobody is stopped for an even share.

Not here: what a client may have waiting (a server's `admission`), and memory (`tenant_quotas`).

Cost: nothing to speak of where all requests are of one client; else O(waiting) a step with somebody waiting, and
O(live) where one has no room.
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
    """Those of the requests that are here. live, in what follows: the sequences that run or load, sorted by key."""

    def __init__(self) -> None:
        self.are_several = False
        self.step = 0  # the number of the last one; the scheduler sets it
        self.shared_until = 0  # a step's number, see the module's text
        self._num_requests: Counter[str | None] = Counter()
        self._joined: dict[
            str | None, int
        ] = {}  # a number that grows, the smallest first; also of some that left
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

    def joined(self, request: Request) -> None:
        """A sequence of it begins to run."""
        self._num_joined += 1
        self._joined.pop(request.client, None)
        self._joined[request.client] = self._num_joined
        if len(self._joined) > _MAX_REMEMBERED:
            del self._joined[next(iter(self._joined))]

    def in_order(
        self, waiting: Sequence[RequestSequence], live: Iterable[RequestSequence]
    ) -> Iterator[RequestSequence]:
        """Waiting sequences, sorted by key, in the order in which they are to join; who has joined by the time that the
        next one is asked for is RUNNING."""
        if not (self.are_several or self.step < self.shared_until):
            yield from waiting
            return
        counts = _counts(live)
        queues: dict[str | None, list[RequestSequence]] = {}
        for sequence in reversed(waiting):
            queues.setdefault(sequence.request.client, []).append(sequence)

        def entry(client: str | None) -> tuple[int, int, int, tuple[int, int, int], str | None]:
            first = queues[client][-1]  # keys differ: clients are not compared
            return first.request.priority, counts[client], self._joined.get(client, 0), first.key, client

        heap = [entry(client) for client in queues]
        heapq.heapify(heap)
        joined: Counter[str | None] = Counter()  # tokens that they draw
        while heap:
            client = heap[0][-1]
            sequence = queues[client].pop()
            yield sequence
            counts[client] += 1
            if sequence.state is SequenceStatus.RUNNING:
                joined[client] += 1 + len(sequence.unborn_siblings())
            if queues[client] and joined[client] < MAX_JOINS:
                heapq.heapreplace(heap, entry(client))
            else:
                heapq.heappop(heap)

    def of_step(self, decoding: list[RequestSequence]) -> list[RequestSequence]:
        """Of the sequences that decode, sorted by key, those that step `step` takes, where steps are shared."""
        if len(decoding) <= MAX_ROWS:
            return decoding
        by_client: dict[str | None, list[RequestSequence]] = {}
        for sequence in decoding:
            by_client.setdefault(sequence.request.client, []).append(sequence)
        left_out: set[int] = set()
        for sequences in by_client.values():
            num_others, num_taken = len(sequences) - 1, MAX_ROWS - 1  # beside the first
            for at in range(num_taken, num_others):
                left_out.add(id(sequences[1 + (self.step * num_taken + at) % num_others]))
        return [sequence for sequence in decoding if id(sequence) not in left_out]

    def beyond_share(self, wanted: RequestSequence, live: Sequence[RequestSequence]) -> list[RequestSequence]:
        """The sequences that may give way to one that waits for room, the first to go at the end."""
        counts = _counts(live)
        most = max(counts.values(), default=0)
        if most < 2 * (counts[wanted.request.client] + 1):
            return []
        return [
            sequence
            for sequence in live[1:]
            if counts[sequence.request.client] == most
            and sequence.request.priority >= wanted.request.priority
        ]

    def may_give_way(
        self, among: list[RequestSequence], live: Iterable[RequestSequence]
    ) -> list[RequestSequence]:
        """Of those (sorted) of whom the last is to give way, the first and those whose turn it is to."""
        if not self.are_several or len(among) < 3:
            return among
        counts = _counts(live)
        last = [s for s in among[1:] if s.request.priority == among[-1].request.priority]
        most = max(counts[sequence.request.client] for sequence in last)
        return among[:1] + [sequence for sequence in last if counts[sequence.request.client] == most]


def _counts(live: Iterable[RequestSequence]) -> Counter[str | None]:
    return Counter(sequence.request.client for sequence in live)
