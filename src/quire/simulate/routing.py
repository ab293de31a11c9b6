"""How a simulated request gets its replica: `Routing`, and three rules that know no content.

`quire.cluster.simulated_routing` has the rule of `rank_replicas`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.simulate.replica import Replica, ServedRequest
from quire.simulate.workload import TraceRequest

__all__ = ["LongestPrefix", "RandomRouting", "RoundRobin", "Routing"]


class Routing:
    """A rule. digest_s: seconds between two reports of the replicas' blocks; None: it reads none."""

    digest_s: float | None = None

    def choose(self, request: TraceRequest, replicas: Sequence[Replica]) -> Replica:
        """The replica of a request that arrives now."""
        raise NotImplementedError

    def take_digests(self, replicas: Sequence[Replica]) -> None:
        """Reads the blocks of all replicas; called each `digest_s` seconds of the trace."""

    def note_served(self, request: TraceRequest, served: ServedRequest) -> None:
        """Hears of a request that the rule sent and that has ended."""


class RandomRouting(Routing):
    """Any replica, from a fixed seed."""

    def __init__(self) -> None:
        self._generator = random.Random(0)

    def choose(self, request: TraceRequest, replicas: Sequence[Replica]) -> Replica:
        return self._generator.choice(replicas)


class RoundRobin(Routing):
    """One replica after the other."""

    def __init__(self) -> None:
        self._num_requests = 0

    def choose(self, request: TraceRequest, replicas: Sequence[Replica]) -> Replica:
        self._num_requests += 1
        return replicas[(self._num_requests - 1) % len(replicas)]


class LongestPrefix(Routing):
    """The replica that has most of the prompt now, the first of equals."""

    def choose(self, request: TraceRequest, replicas: Sequence[Replica]) -> Replica:
        return max(replicas, key=lambda replica: replica.match(request))
