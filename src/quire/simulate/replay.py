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

from quire.errors import ArgumentError
from quire.simulate.replica import Replica, ServedRequest
from quire.simulate.routing import Routing
from quire.simulate.workload import Workload

__all__ = ["Replay", "TraceFigures", "replay"]


@dataclass(frozen=True)
class TraceFigures:
    """hit_rate: tokens of prompts found in memory, over all of them; store_rate: those loaded from the store.
    computed_tokens: the others. first_token_s_...: seconds since the arrival, by the cost line. decode_step_s_mean:
    seconds of a token of an answer behind its first. largest_over_mean: computed tokens of the busiest replica.
    num_requests: that were served; num_refused: that no replica can hold, which the other figures leave out."""

    num_requests: int
    num_refused: int
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
    """served: each request in order, None for one that its replica can never hold. decision_s: seconds of each choice
    of a replica, measured, not simulated."""

    workload: Workload
    served: list[ServedRequest | None]
    decision_s: list[float]

    def figures(self, replicas: Sequence[Replica]) -> TraceFigures:
        """*raises:* ArgumentError: no request was served."""
        pairs = zip(self.workload.requests, self.served, strict=True)
        num_tokens = sum(request.num_prompt_tokens for request, one in pairs if one is not None)
        served = [one for one in self.served if one is not None]
        if not served:
            raise ArgumentError(
                f"expected a replica that holds a request of {self.workload.name}, got one that holds none - in "
                "`capacity`; raise it"
            )
        first = np.array([one.first_token_s for one in served])
        step_s = [one.step_s for one in served if one.step_s is not None]
        computed = [replica.num_computed_tokens for replica in replicas]
        return TraceFigures(
            num_requests=len(served),
            num_refused=len(self.served) - len(served),
            num_prompt_tokens=num_tokens,
            hit_rate=sum(one.num_found_tokens for one in served) / num_tokens,
            store_rate=sum(one.num_loaded_tokens for one in served) / num_tokens,
            computed_tokens=sum(computed),
            first_token_s_mean=float(first.mean()),
            first_token_s_p50=float(np.percentile(first, 50)),
            first_token_s_p99=float(np.percentile(first, 99)),
            decode_step_s_mean=float(np.mean(step_s or [0.0])),
            largest_over_mean=max(computed) / float(np.mean(computed)),
        )


def replay(workload: Workload, replicas: Sequence[Replica], routing: Routing) -> Replay:
    """Sends each request of the workload, in order of arrival, to the replica that the routing chooses."""
    next_digest_s = 0.0 if routing.digest_s is not None else math.inf
    served: list[ServedRequest | None] = [None] * len(workload.requests)
    decision_s: list[float] = []

    def note_served() -> None:
        for replica in replicas:
            for number, one in replica.pop_served():
                served[number] = one
                if one is not None:
                    routing.note_served(workload.requests[number], one)

    for number, request in enumerate(workload.requests):
        for replica in replicas:
            replica.advance(request.arrival_s)
        note_served()
        if request.arrival_s >= next_digest_s and routing.digest_s is not None:
            routing.take_digests(replicas)
            next_digest_s = request.arrival_s + routing.digest_s
        began = time.perf_counter()
        replica = routing.choose(request, replicas)
        decision_s.append(time.perf_counter() - began)
        replica.submit(number, request)
        note_served()
    for replica in replicas:
        replica.advance(math.inf)
    note_served()
    return Replay(workload, served, decision_s)
