"""`replay`: a workload through simulated replicas and a routing; `TraceFigures`: the result in numbers.

Cost: O(requests * blocks of a prompt), and that of the routing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quire.simulate.routing import Routing
from quire.simulate.simulated_replica import ServedRequest, SimulatedReplica
from quire.simulate.workload import Workload

__all__ = ["Replay", "TraceFigures", "replay"]


@dataclass(frozen=True)
class TraceFigures:
    """hit_rate: tokens of prompts found in memory, over all of them; store_rate: those loaded from the store.
    computed_tokens: the others. first_token_s_...: seconds since the arrival, by the cost line. decode_step_s_mean:
    seconds of a token of an answer behind its first. largest_over_mean: computed tokens of the busiest replica."""

    num_requests: int
    num_prompt_tokens: int
    hit_rate: float
    store_rate: float
    computed_tokens: int
    first_token_s_mean: float
    first_token_s_p50: float
    first_token_s_p99: float
    decode_step_s_mean: float
    largest_over_mean: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Replay:
    """served: each request in order. decision_s: seconds of each choice of a replica, measured, not simulated."""

    workload: Workload
    served: list[ServedRequest]
    decision_s: list[float]

    def figures(self, replicas: Sequence[SimulatedReplica]) -> TraceFigures:
        num_tokens = sum(request.num_prompt_tokens for request in self.workload.requests)
        first = np.array([served.first_token_s for served in self.served])
        computed = [replica.num_computed_tokens for replica in replicas]
        return TraceFigures(
            num_requests=len(self.served),
            num_prompt_tokens=num_tokens,
            hit_rate=sum(served.num_found_tokens for served in self.served) / num_tokens,
            store_rate=sum(served.num_loaded_tokens for served in self.served) / num_tokens,
            computed_tokens=sum(computed),
            first_token_s_mean=float(first.mean()),
            first_token_s_p50=float(np.percentile(first, 50)),
            first_token_s_p99=float(np.percentile(first, 99)),
            decode_step_s_mean=float(np.mean([served.step_s for served in self.served])),
            largest_over_mean=max(computed) / float(np.mean(computed)),
        )


def replay(workload: Workload, replicas: Sequence[SimulatedReplica], routing: Routing) -> Replay:
    """Sends each request of the workload, in order of arrival, to the replica that the routing chooses."""
    next_digest_s = 0.0 if routing.digest_s is not None else math.inf
    served: list[ServedRequest] = []
    decision_s: list[float] = []
    for request in workload.requests:
        if request.arrival_s >= next_digest_s and routing.digest_s is not None:
            routing.take_digests(replicas)
            next_digest_s = request.arrival_s + routing.digest_s
        began = time.perf_counter()
        replica = routing.choose(request, replicas)
        decision_s.append(time.perf_counter() - began)
        served.append(replica.serve(request))
        routing.note_served(request, served[-1])
    return Replay(workload, served, decision_s)
