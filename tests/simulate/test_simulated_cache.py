"""The simulated cache finds the blocks that a live engine finds; policies and sessions as in `quire.Cache`."""

from __future__ import annotations

import pytest
from support.made_traces import chats

from quire import LLM, SamplingParams, plan
from quire.errors import ArgumentError
from quire.simulate import CostLine, TraceRequest
from quire.simulate.engine_replica import EngineReplica
from quire.simulate.replay import replay
from quire.simulate.routing import RoundRobin
from quire.simulate.simulated_cache import SimulatedCache

BLOCK = 16


@pytest.mark.parametrize(
    ("seed", "num_blocks", "num_different"),
    [
        (0, 20, 0),
        (1, 40, 2),
        *(
            pytest.param(seed, num_blocks, number, marks=pytest.mark.ci)
            for seed, num_blocks, number in [
                (0, 40, 0), (0, 60, 1), (1, 20, 1), (1, 60, 0), (2, 20, 1), (2, 40, 1), (2, 60, 0)
            ]
        ),
    ],
)  # fmt: skip
def test_each_hit_is_that_of_a_live_engine(seed: int, num_blocks: int, num_different: int) -> None:
    """With the live tokens, all hits are equal. Without them a few may differ: the hash of a block's tokens chooses its
    place in the table of ghosts."""
    workload = chats(seed)
    sized = plan(block_size=BLOCK, kv_memory="4MiB")
    block_bytes = sized.budget_bytes // sized.num_blocks
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    with LLM(block_size=BLOCK, kv_memory=num_blocks * block_bytes) as llm:
        live, vocab_size = [], llm.vocab_size
        for number in range(len(workload.requests)):
            [output] = llm.generate([workload.token_ids(number, vocab_size).tolist()], params)
            live.append(output.num_cached_tokens)
    replica = EngineReplica("one", workload, num_blocks, CostLine(0.0, 1e-6, 0.0), vocab_size=vocab_size)
    served = replay(workload, [replica], RoundRobin()).served
    assert [one.num_found_tokens for one in served if one is not None] == live
    cache = SimulatedCache(num_blocks)
    simulated = [cache.serve(request, request.arrival_s) * BLOCK for request in workload.requests]
    cache.check()
    assert sum(one != other for one, other in zip(simulated, live, strict=True)) == num_different
    unlimited = SimulatedCache(4096)
    assert sum(live) < BLOCK * sum(unlimited.serve(request, 0.0) for request in workload.requests), (
        "it evicted"
    )


@pytest.mark.parametrize("policy", ["lru", "frequency", "sessions"])
def test_both_back_ends_find_the_same(policy: str) -> None:
    workload = chats(3, 200)
    found = []
    for backend in ("native", "python"):
        cache = SimulatedCache(40, policy, backend=backend)
        found.append([cache.serve(request, request.arrival_s) for request in workload.requests])
        cache.check()
    assert found[0] == found[1]


def test_a_session_gives_up_what_it_left_and_keeps_what_its_tools_wait_for() -> None:
    def turn(at_s: float, path: range, session: str, **more: bool) -> TraceRequest:
        return TraceRequest(at_s, len(path), 1, tuple(path), session, 1.0, **more)

    requests = [
        turn(0.0, range(100), "a", has_calls=True),
        *(turn(2.0 + 0.1 * number, range(1000 * number, 1000 * number + 50), "b") for number in range(1, 4)),
        turn(4.0, range(101), "a"),
    ]
    found = {}
    for policy in ("lru", "sessions"):
        cache = SimulatedCache(202, policy)
        found[policy] = [cache.serve(request, request.arrival_s) for request in requests][-1]
    assert found == {"lru": 52, "sessions": 100}


def test_match_changes_nothing_and_the_blocks_are_reported() -> None:
    workload = chats(1, 40)
    cache, other = SimulatedCache(30, reports_blocks=True), SimulatedCache(30)
    for request in workload.requests:
        found = cache.match(request)
        assert found == cache.serve(request, 0.0) == other.serve(request, 0.0)
        ids = set(cache.block_ids())
        assert set(request.content_ids[:30]) <= ids
        assert len(ids) <= 30


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected lru, frequency, sessions, got 'fifo'"):
        SimulatedCache(10, "fifo")
