"""The ranking as a routing: it finds what one replica finds, splits the work, and sees the store."""

from __future__ import annotations

from typing import Any

from support.made_traces import chats

from quire.cluster.router import RouteCosts
from quire.cluster.simulated_routing import RankedRouting
from quire.simulate import CostLine, Workload
from quire.simulate.replay import TraceFigures, replay
from quire.simulate.routing import RandomRouting
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_replica import SimulatedReplica
from quire.simulate.simulated_store import SimulatedStore

COST = CostLine(0.0, 1e-3, 0.0)


def replicas(number: int, store: SimulatedStore | None = None) -> list[SimulatedReplica]:
    return [
        SimulatedReplica(
            f"r{index}", SimulatedCache(60, reports_blocks=True), COST, block_tokens=16, store=store
        )
        for index in range(number)
    ]


def ranked(found: list[SimulatedReplica], **costs: Any) -> RankedRouting:
    return RankedRouting(found, 16, RouteCosts(COST.token_s, **{"load_s": {}, **costs}), digest_s=0.5)


def figures(workload: Workload, found: list[SimulatedReplica], routing: Any) -> TraceFigures:
    return replay(workload, found, routing).figures(found)


def test_it_finds_more_than_chance_and_splits_the_work() -> None:
    workload = chats(0, 400, num_chats=16, every_s=0.05)
    found = replicas(4)
    ours = figures(workload, found, ranked(found))
    by_chance = figures(workload, replicas(4), RandomRouting())
    assert ours.hit_rate > 1.5 * by_chance.hit_rate
    assert ours.largest_over_mean < 1.5


def test_a_chat_stays_where_its_blocks_are() -> None:
    workload = chats(5, 120, num_chats=3)
    found = replicas(1)
    alone = figures(workload, found, ranked(found))
    found = replicas(3)
    assert figures(workload, found, ranked(found)).hit_rate > 0.9 * alone.hit_rate


def test_with_a_store_that_costs_nothing_all_replicas_have_its_blocks() -> None:
    workload = chats(0, 200, num_chats=16)
    store = SimulatedStore(10_000, CostLine(0.0, 0.0, 0.0))
    found = replicas(4, store)
    shared = figures(workload, found, ranked(found, load_s={"store": 0.0}))
    unlimited = SimulatedCache(10_000)
    hits = sum(
        min(request.num_prompt_tokens - 1, 16 * unlimited.serve(request, 0.0))
        for request in workload.requests
    )
    assert shared.computed_tokens == sum(request.num_prompt_tokens for request in workload.requests) - hits


def test_a_store_slower_than_computing_changes_no_choice() -> None:
    workload = chats(0, 200, num_chats=16, every_s=0.05)
    found, others = replicas(3, SimulatedStore(10_000, CostLine(0.0, 2e-3, 0.0))), replicas(3)
    with_store = figures(workload, found, ranked(found, load_s={"store": 2e-3}))
    assert with_store == figures(workload, others, ranked(others))


def test_the_same_trace_gives_the_same_figures() -> None:
    def run() -> TraceFigures:
        found = replicas(3)
        return figures(chats(2, 100), found, ranked(found))

    assert run() == run()
