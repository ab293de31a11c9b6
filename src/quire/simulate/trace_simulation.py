"""`simulate_trace`: a trace at several capacities, by policies and routings; one row each.

Real: blocks, prefix tree and eviction (`quire.Cache`), sessions, the ranking of replicas; with time "scheduler" the
step loop too (`engine_replica`). Modelled: the time, by cost lines, with time "queue" as one prompt after another
(`simulated_replica`); and the shared store (`simulated_store`).

Cost: a replay for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.engine_parts import StepLimits
from quire.errors import ArgumentError
from quire.simulate.cost_line import CostLine
from quire.simulate.engine_replica import EngineReplica
from quire.simulate.replay import TraceFigures, replay
from quire.simulate.replica import Replica
from quire.simulate.routing import Routing
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_replica import SimulatedReplica
from quire.simulate.simulated_store import SimulatedStore
from quire.simulate.workload import Workload

__all__ = ["MakeRouting", "SimulatedRow", "TraceSimulation", "simulate_trace"]

MakeRouting = Callable[[list[Replica]], Routing]
_TIMES = ("queue", "scheduler")


@dataclass(frozen=True)
class TraceSimulation:
    """The settings of all rows. capacities: blocks of a replica. policies: of `SIMULATED_POLICIES`. routings: by name.
    store_blocks, store_cost: of the shared store; 0: there is none. limits: of a step; time "queue" reads the tokens of
    a step alone. time: "queue" or "scheduler", see the module's text."""

    workload: Workload
    capacities: Sequence[int]
    policies: Sequence[str]
    routings: Mapping[str, MakeRouting]
    cost: CostLine
    num_replicas: int = 1
    store_blocks: int = 0
    store_cost: CostLine | None = None
    limits: StepLimits = field(default_factory=StepLimits)
    time: str = "queue"

    def __post_init__(self) -> None:
        if self.time not in _TIMES:
            raise ArgumentError(f"expected {' or '.join(_TIMES)}, got {self.time!r} - in `time`")
        if not any(request.content_ids for request in self.workload.requests):
            raise ArgumentError(
                f"expected a trace that says which content is equal, got lengths alone ({self.workload.name}); "
                "`quire compare --simulate --trace` takes it"
            )
        if "sessions" in self.policies and not any(request.session for request in self.workload.requests):
            raise ArgumentError(
                f"expected a trace with sessions for policy 'sessions', got {self.workload.name}; give lru or frequency"
            )


@dataclass(frozen=True)
class SimulatedRow:
    """num_blocks: of a replica."""

    num_blocks: int
    policy: str
    routing: str
    figures: TraceFigures

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_blocks": self.num_blocks,
            "policy": self.policy,
            "router": self.routing,
            **self.figures.as_dict(),
        }


def simulate_trace(simulation: TraceSimulation) -> Iterator[SimulatedRow]:
    """The rows: policy by policy, in each routing by routing, in each from the first capacity to the last."""
    for policy in simulation.policies:
        for routing, make_routing in simulation.routings.items():
            for num_blocks in simulation.capacities:
                replicas = _replicas(simulation, policy, num_blocks)
                run = replay(simulation.workload, replicas, make_routing(replicas))
                yield SimulatedRow(num_blocks, policy, routing, run.figures(replicas))


def _replicas(simulation: TraceSimulation, policy: str, num_blocks: int) -> list[Replica]:
    store = None
    if simulation.store_blocks and simulation.store_cost is not None:
        store = SimulatedStore(simulation.store_blocks, simulation.store_cost)
    names = [f"replica-{number}" for number in range(simulation.num_replicas)]
    if simulation.time == "scheduler":
        return [
            EngineReplica(
                name,
                simulation.workload,
                num_blocks,
                simulation.cost,
                policy=policy,
                limits=simulation.limits,
                store=store,
            )
            for name in names
        ]
    return [
        SimulatedReplica(
            name,
            SimulatedCache(num_blocks, policy, reports_blocks=simulation.num_replicas > 1),
            simulation.cost,
            block_tokens=simulation.workload.block_tokens,
            step_tokens=simulation.limits.max_batch_tokens,
            store=store,
        )
        for name in names
    ]
