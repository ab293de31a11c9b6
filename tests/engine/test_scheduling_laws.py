"""Laws of scheduling: in any pool and any order of arrival, every request gets the same tokens as alone; a beam search
the answers of a search over plain token lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.at_length import at_length
from support.beam_twin import beam_answers
from support.drafts import SteadySpeculation, TruthProposer
from support.fake_engine import STATE_BLOCKS, FakeEngine
from support.fake_model import VOCAB, expected_logits, expected_tokens, full_spec, window_spec
from support.faulty_tier import FaultyTier

from quire.cache.block_counts import num_blocks_for
from quire.config import MAX_STEP_DRAFTS
from quire.offload.store import POLICIES, Policy
from quire.offload.swap import MODES, Mode
from quire.sampling.params import SamplingParams
from quire.tiers.host import HostTier

SHARED = [(11 * i + i * i) % 90 for i in range(24)]


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    priority: int
    abort_after: int | None
    client: str | None = None
    beam_width: int = 1
    stop_ids: tuple[int, ...] = ()


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    shared = draw(st.integers(0, len(SHARED)))
    own = draw(st.lists(st.integers(0, 3), min_size=0 if shared else 1, max_size=6))
    return Arrival(
        step=draw(st.integers(0, 12)),
        prompt=(*SHARED[:shared], *own),
        max_tokens=draw(st.integers(1, 9)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        abort_after=draw(st.sampled_from([None, None, None, 0, 2, 5])),
        client=draw(st.sampled_from([None, None, "a", "b"])),
        beam_width=draw(st.sampled_from([1, 1, 1, 2, 4])),
        stop_ids=draw(st.sampled_from([(), (), (5, 17, 40, 77)])),
    )


def run(
    requests: list[Arrival],
    num_blocks: int,
    block_size: int,
    window: int,
    budget: int,
    max_seqs: int,
    caching: bool,
    preemption: Mode = "recompute",
    tier_bytes: int | None = None,
    policy: Policy = "eviction",
    faults: int = 0,
    pauses: Sequence[tuple[int, int]] = (),
    num_states: int = 0,
    right_drafts: float | None = None,
) -> tuple[FakeEngine, dict[int, list[list[int]]], list[tuple[int, ...]]]:
    """pauses: (step, index) of requests that nobody reads until all others have ended, the last one first then.
    num_states: state slots, where not 0 two that must be there, and others whose memory the longest may need.
    right_drafts: the share of drafts that are right, None for none."""
    spec = window_spec(window) if window else full_spec()
    longest = max(len(r.prompt) + r.max_tokens - 1 for r in requests)
    least = num_blocks_for(spec, longest, block_size)
    if tier_bytes is not None:
        num_states = 0
    speculation = None
    num_draft_slots = 0 if right_drafts is None or not num_states else 1 + num_states
    if right_drafts is not None:
        texts = [[*r.prompt, *expected_tokens(spec, list(r.prompt), r.max_tokens)] for r in requests]
        proposer = TruthProposer(texts, right_drafts, VOCAB)
        speculation = SteadySpeculation(proposer, 3, num_draft_slots or MAX_STEP_DRAFTS)
    engine = FakeEngine(
        num_blocks=max(1, least + num_blocks - STATE_BLOCKS * max(0, num_states - 2)),
        num_state_slots=num_states,
        num_draft_slots=num_draft_slots,
        block_size=block_size,
        spec=spec,
        prefix_caching=caching,
        max_batch_tokens=budget,
        max_num_seqs=max_seqs,
        preemption=preemption,
        tiers=() if tier_bytes is None or not caching else [FaultyTier(HostTier(tier_bytes), faults)],
        policy=policy,
        speculation=speculation,
    )
    ids: dict[str, int] = {}
    to_abort: list[tuple[int, str]] = []
    history: list[tuple[int, ...]] = []
    for step in range(4000):
        for index, request in enumerate(requests):
            if request.step == step:
                width, stop_ids = request.beam_width, request.stop_ids if request.beam_width > 1 else ()
                n = request.n if width == 1 else min(request.n, width)
                params = SamplingParams(
                    max_tokens=request.max_tokens, n=n, beam_width=width, stop_token_ids=stop_ids
                )
                request_id = engine.submit(
                    list(request.prompt), params, priority=request.priority, client=request.client
                )
                ids[request_id] = index
                if request.abort_after is not None:
                    to_abort.append((step + request.abort_after, request_id))
        for when, request_id in to_abort:
            if when == step and (output := engine.engine.abort(request_id)) is not None:
                engine.outputs[request_id] = output
        for when, index in pauses:
            if when == step:
                for request_id in [one for one, number in ids.items() if number == index]:
                    engine.engine.pause(request_id)
        engine.step()
        under_way = engine.scheduler.requests.values()
        if step > 12 and under_way and all(request.is_paused for request in under_way):
            engine.engine.resume(list(engine.scheduler.requests)[-1])
        history.append(tuple(sequence.key[1] for sequence in engine.scheduler.running))
        if step > 12 and not engine.engine.has_work:
            break
    engine.check_empty()  # no livelock: everything ended
    assert len(engine.outputs) == len(requests)
    tokens = {ids[i]: [one.token_ids for one in output.outputs] for i, output in engine.outputs.items()}
    return engine, tokens, history


def check_search(engine: FakeEngine, request: Arrival, answers: list[list[int]]) -> None:
    if request.abort_after is not None:
        return
    expected = beam_answers(
        partial(expected_logits, engine.spec),
        list(request.prompt),
        width=request.beam_width,
        max_tokens=request.max_tokens,
        stop_ids=request.stop_ids,
    )
    assert answers == [tokens for tokens, _ in expected[: min(request.n, request.beam_width)]]


CASES = {
    "requests": st.lists(arrivals(), min_size=1, max_size=7),
    "num_blocks": st.integers(0, 12),
    "block_size": st.sampled_from([1, 2, 3, 4, 16]),
    "window": st.sampled_from([0, 0, 1, 5, 8]),
    "budget": st.integers(1, 40),
    "max_seqs": st.integers(1, 6),
    "caching": st.booleans(),
    "preemption": st.sampled_from(MODES),
    "tier_bytes": st.sampled_from([None, None, 2000, 1 << 20]),
    "policy": st.sampled_from(POLICIES),
    "faults": st.sampled_from([0, 0, 2, 3, 7]),
    "num_states": st.sampled_from([0, 0, 2, 3, 9]),
    "right_drafts": st.sampled_from([None, None, 0.0, 0.6, 1.0]),
    "pauses": st.lists(st.tuples(st.integers(0, 16), st.integers(0, 6)), max_size=5),
}


def check_case(
    requests: list[Arrival],
    num_blocks: int,
    block_size: int,
    window: int,
    budget: int,
    max_seqs: int,
    caching: bool,
    preemption: Mode,
    tier_bytes: int | None,
    policy: Policy,
    faults: int,
    pauses: Sequence[tuple[int, int]] = (),
    num_states: int = 0,
    right_drafts: float | None = None,
) -> None:
    case = (
        requests, num_blocks, block_size, window, budget, max_seqs, caching, preemption, tier_bytes, policy, faults,
        pauses, num_states, right_drafts
    )  # fmt: skip
    engine, tokens, history = run(*case)
    for index, request in enumerate(requests):
        if request.beam_width > 1:
            check_search(engine, request, tokens[index])
            continue
        for ids in tokens[index]:
            if request.abort_after is None:
                assert len(ids) == request.max_tokens
            assert ids == expected_tokens(engine.spec, list(request.prompt), len(ids))
    _, again, history_again = run(*case)
    assert tokens == again
    assert history == history_again  # the scheduler is a function of what arrives


@settings(max_examples=30, deadline=None)
@given(**CASES)
def test_every_request_gets_the_tokens_it_gets_alone(**case: object) -> None:
    check_case(**case)  # type: ignore[arg-type]


def test_who_joins_an_attempt_that_finds_no_room_has_its_swapped_bytes_dropped() -> None:
    """It comes back alone, does not fit, and runs in a smaller chunk: an attempt later, in which nobody joins."""
    prompt = (0, 12, 26, 42)
    check_case(
        requests=[
            Arrival(step=0, prompt=prompt, max_tokens=7, n=2, priority=0, abort_after=None),
            Arrival(step=1, prompt=prompt, max_tokens=1, n=1, priority=-1, abort_after=None),
        ],
        num_blocks=0, block_size=1, window=5, budget=4, max_seqs=2, caching=True,
        preemption="auto", tier_bytes=None, policy="eviction", faults=0,
    )  # fmt: skip


@pytest.mark.parametrize("num_states", [2, 3])
def test_idle_beams_leave_for_a_beam_that_has_no_room_to_compute(num_states: int) -> None:
    """There is room for the blocks of the last beams, but not for their states too: admitted and preempted in turn,
    they would never compute."""
    prompt = (0, 12, 26, 42, 60, 80, 12, 36, 62)
    twice = Arrival(step=10, prompt=prompt, max_tokens=9, n=2, priority=1, abort_after=None)
    search = Arrival(
        step=3, prompt=(0, 12, 2, 2, 3), max_tokens=9, n=1, priority=-1, abort_after=None, client="a", beam_width=4,
        stop_ids=(5, 17, 40, 77),
    )  # fmt: skip
    aborted = Arrival(step=3, prompt=(0, 12, 3, 2), max_tokens=5, n=1, priority=0, abort_after=0)
    check_case(
        requests=[twice, aborted, twice, search],
        num_blocks=11, block_size=2, window=1, budget=28, max_seqs=3, caching=False, preemption="swap",
        tier_bytes=None, policy="eviction", faults=3, num_states=num_states, right_drafts=1.0,
        pauses=[(9, 0), (13, 5), (5, 5), (12, 3), (4, 1)],
    )  # fmt: skip


@pytest.mark.ci
@settings(max_examples=at_length(1500), deadline=None)
@given(**CASES)
def test_every_request_gets_the_tokens_it_gets_alone_at_length(**case: object) -> None:
    check_case(**case)  # type: ignore[arg-type]
