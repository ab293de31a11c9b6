"""A replica that runs the engine's steps: times by hand, hits of a live engine, a store, and equal figures again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.made_traces import chats

from quire.cluster.router import RouteCosts
from quire.cluster.simulated_routing import RankedRouting
from quire.engine.engine_parts import StepLimits
from quire.errors import ArgumentError
from quire.simulate import CostLine, TraceRequest, Workload
from quire.simulate.engine_replica import EngineReplica
from quire.simulate.replay import Replay, replay
from quire.simulate.replica import ServedRequest
from quire.simulate.routing import LongestPrefix, RoundRobin
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_replica import SimulatedReplica
from quire.simulate.simulated_store import SimulatedStore

BLOCK = 16
COST = CostLine(fixed_s=1.0, token_s=0.01, context_s=0.001)


def made(workload: Workload, number: int = 1, num_blocks: int = 1000, **options: Any) -> list[EngineReplica]:
    given = {"cost": COST, "limits": StepLimits(64), **options}
    cost = given.pop("cost")
    return [EngineReplica(f"r{index}", workload, num_blocks, cost, **given) for index in range(number)]


def run(*requests: TraceRequest, number: int = 1, **options: Any) -> list[ServedRequest]:
    workload = Workload("made", requests, block_tokens=BLOCK)
    replicas = made(workload, number, **options)
    found = replay(workload, replicas, RoundRobin()).served
    for one in replicas:
        one.check()
        assert not one.engine.has_work
    return [served for served in found if served is not None]


def test_a_request_alone_takes_its_steps_and_those_of_its_answer() -> None:
    [served] = run(TraceRequest(2.0, 100, 3, tuple(range(7))))
    prompt_s = (1 + 0.64 + 0.064) + (1 + 0.36 + 0.1)  # steps of 64 and 36 tokens
    decode_s = [1 + 0.01 + 0.101, 1 + 0.01 + 0.102]
    assert served.first_token_s == served.prefill_s == pytest.approx(prompt_s)
    assert served.step_s == pytest.approx(sum(decode_s) / 2)


def test_a_prompt_joins_the_step_of_a_decode() -> None:
    """The second arrives within the first's second decode: it waits for that step's end, and shares the next."""
    first, second = run(TraceRequest(0.0, 16, 11, (1,)), TraceRequest(3.0, 16, 1, (2,)))
    starts_s = (1 + 0.16 + 0.016) + (1 + 0.01 + 0.017) + (1 + 0.01 + 0.018)
    shared_s = 1 + 0.17 + 0.019 + 0.016
    assert first.first_token_s == pytest.approx(1 + 0.16 + 0.016)
    assert second.prefill_s == pytest.approx(shared_s)
    assert second.first_token_s == pytest.approx(starts_s + shared_s - 3.0)


def test_prompts_that_arrive_together_share_steps() -> None:
    found = run(*(TraceRequest(0.0, 30, 1, (number, 100 + number)) for number in range(2)))
    assert [served.first_token_s for served in found] == [pytest.approx(1 + 0.60 + 0.06)] * 2


def test_a_prompt_waits_for_the_blocks_that_another_computes() -> None:
    first, second = run(*(TraceRequest(0.0, 100, 1, tuple(range(7))) for _ in range(2)))
    assert (first.num_computed_tokens, second.num_computed_tokens) == (100, 1)
    assert second.first_token_s > first.first_token_s


def test_requests_that_do_not_meet_take_the_time_of_the_queue() -> None:
    workload = chats(0, 30, every_s=1000.0)
    stepped = made(workload)
    queued = [
        SimulatedReplica("r0", SimulatedCache(1000), COST, block_tokens=BLOCK, step_tokens=64),
    ]
    one, other = (replay(workload, replicas, RoundRobin()) for replicas in (stepped, queued))
    for a, b in zip(one.served, other.served, strict=True):
        assert a is not None
        assert b is not None
        assert a[:6] == b[:6]
        assert a.first_token_s == pytest.approx(b.first_token_s)
    figures = one.figures(stepped)
    assert figures.hit_rate == pytest.approx(other.figures(queued).hit_rate)
    assert figures.decode_step_s_mean == 0, "answers of one token have none"


@pytest.mark.parametrize("time_of_load", ["1us/token", "100s"])
def test_a_replica_loads_from_the_store_what_takes_less_time(time_of_load: str) -> None:
    store = SimulatedStore(100, CostLine.parse(time_of_load))
    request = TraceRequest(0.0, 100, 1, tuple(range(6)))
    again = [replace(request, arrival_s=at_s) for at_s in (0.0, 50.0, 100.0, 150.0)]
    first, second, _, fourth = run(*again, number=2, store=store)
    loads = time_of_load == "1us/token"
    assert (first.num_loaded_tokens, second.num_loaded_tokens) == (0, 96 if loads else 0)
    assert second.num_computed_tokens == (4 if loads else 100)
    assert fourth.num_found_tokens == 96, "loaded blocks are in memory"
    if loads:
        assert second.first_token_s == pytest.approx(96e-6 + 1 + 0.04 + 0.1)


def test_others_compute_while_one_loads() -> None:
    store = SimulatedStore(100, CostLine.parse("0.9s"))
    requests = [TraceRequest(0.0, 100, 1, tuple(range(6)))]  # on the first replica, which stores it
    requests += [TraceRequest(50.0, 9, 1), TraceRequest(100.0, 9, 1)]  # the second and the first, elsewhere
    requests += [
        TraceRequest(200.0, 100, 1, tuple(range(6))),
        TraceRequest(200.1, 9, 1),
        TraceRequest(200.2, 32, 1),
    ]
    found = run(*requests, number=2, store=store)
    assert found[3].num_loaded_tokens == 96
    assert found[5].first_token_s < 1 + 0.33 + 0.04, "it does not wait for the load"


def test_a_block_is_in_the_store_when_it_is_computed() -> None:
    store = SimulatedStore(100, CostLine(0.0, 0.0, 0.0))
    workload = Workload("one", (TraceRequest(0.0, 100, 1, tuple(range(6))),), block_tokens=BLOCK)
    [one] = made(workload, store=store)
    one.submit(0, workload.requests[0])
    one.advance(1.0)
    assert len(store) == 0
    one.advance(math.inf)
    assert len(store) == 6


@pytest.mark.parametrize("routing", [RoundRobin, LongestPrefix])
def test_every_token_is_found_loaded_or_computed(routing: Any) -> None:
    workload = chats(4, 150, every_s=0.2)
    requests = tuple(replace(request, num_output_tokens=6) for request in workload.requests)
    workload = replace(workload, requests=requests)
    store = SimulatedStore(80, CostLine(0.0, 1e-6, 0.0))

    def once() -> Replay:
        replicas = made(workload, 3, 60, store=store, cost=CostLine(0.05, 1e-3, 1e-6))
        found = replay(workload, replicas, routing())
        figures = found.figures(replicas)
        assert figures.num_requests == 150
        assert (
            figures.hit_rate + figures.store_rate + figures.computed_tokens / figures.num_prompt_tokens
            == (pytest.approx(1))
        )
        for one in replicas:
            one.check()
            assert one.queue_s(0.0) == 0
        return found

    found = once()
    for request, served in zip(requests, found.served, strict=True):
        assert served is not None
        parts = served.num_found_tokens, served.num_loaded_tokens, served.num_computed_tokens
        assert min(parts) >= 0
        assert sum(parts) == request.num_prompt_tokens
        assert served.first_token_s >= served.prefill_s > 0
    assert sum(served.num_loaded_tokens for served in found.served if served) > 0
    store = SimulatedStore(80, CostLine(0.0, 1e-6, 0.0))
    assert once().served == found.served


def test_the_ranking_reads_its_blocks_and_its_queue() -> None:
    workload = chats(0, 400, num_chats=16, every_s=0.05)
    hits = {}
    for name in ("ranked", "round-robin"):
        replicas = made(workload, 4, 60, cost=CostLine(0.0, 1e-3, 0.0), limits=None)
        routing = (
            RankedRouting(replicas, BLOCK, RouteCosts(1e-3, {}), 0.5) if name == "ranked" else RoundRobin()
        )
        hits[name] = replay(workload, replicas, routing).figures(replicas).hit_rate
    assert hits["ranked"] > 1.5 * hits["round-robin"]


def test_the_blocks_that_it_reports_are_those_of_the_trace_in_memory() -> None:
    workload = chats(1, 40, every_s=1000.0)
    [one] = made(workload, num_blocks=40)
    for number, request in enumerate(workload.requests):
        one.advance(request.arrival_s)
        found = one.match(request)
        one.submit(number, request)
        one.advance(request.arrival_s + 999)
        [(_, served)] = one.pop_served()
        assert served is not None
        assert served.num_found_blocks == found
        assert set(request.content_ids[:-1]) <= set(one.block_ids()), "the last is a partial block"
        assert len(one.block_ids()) <= 40


def test_a_request_larger_than_memory_is_counted_apart() -> None:
    requests = TraceRequest(0.0, 400, 1, tuple(range(25))), TraceRequest(1.0, 20, 1, (1, 2))
    workload = Workload("two", requests, block_tokens=BLOCK)
    replicas = made(workload, num_blocks=10)
    figures = replay(workload, replicas, RoundRobin()).figures(replicas)
    assert (figures.num_requests, figures.num_refused, figures.num_prompt_tokens) == (1, 1, 20)
    alone = Workload("one", requests[:1], block_tokens=BLOCK)
    replicas = made(alone, num_blocks=10)
    with pytest.raises(
        ArgumentError, match="expected a replica that holds a request of one, got one that holds none"
    ):
        replay(alone, replicas, RoundRobin()).figures(replicas)


def test_sessions_keep_what_their_tools_wait_for() -> None:
    def turn(at_s: float, path: range, session: str, **more: bool) -> TraceRequest:
        return TraceRequest(at_s, BLOCK * len(path), 1, tuple(path), session, 1.0, **more)

    requests = [
        turn(0.0, range(100), "a", has_calls=True),
        *(turn(2.0 + 0.1 * number, range(1000 * number, 1000 * number + 50), "b") for number in range(1, 4)),
        turn(4.0, range(101), "a"),
    ]
    hits = {}
    for policy in ("lru", "sessions"):
        cost = CostLine(0.0, 1e-7, 0.0)
        hits[policy] = run(*requests, num_blocks=206, policy=policy, cost=cost)[-1].num_found_blocks
    assert hits["sessions"] == 100 > hits["lru"]
