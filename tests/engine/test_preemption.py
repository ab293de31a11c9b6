"""Preempted requests, swapped out or recomputed, get the same bits as alone; the oldest request always makes
progress."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.cache_case import BACKENDS, LONG_BACKENDS
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens, window_spec

from quire import LLM, SamplingParams
from quire.errors import ArgumentError, CapacityError
from quire.memory.placement import unsupported_reason
from quire.offload.swap import Mode
from quire.offload.throughputs import Throughputs
from quire.scheduler.request import RequestOutput, RequestSequence

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)
PROMPTS = [[(7 * i + j) % 90 + 5 for j in range(20 + 5 * i)] for i in range(12)]
STORAGES: list[dict[str, str]] = [{"storage": "paged"}]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})


def answers(llm: LLM) -> list[Any]:
    """What must not change: tokens and the bits of logprobs; of the Python back end, which is not exact, the tokens."""
    return [answer_of(llm, output) for output in llm.generate(PROMPTS, GREEDY)]


def answer_of(llm: LLM, output: RequestOutput) -> Any:
    [completion] = output.outputs
    return completion.token_ids, completion.logprobs if llm.cache.backend == "native" else None


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Tokens and logprobs of each request with all the memory there is, one at a time, by back end."""
    found = {}
    for backend in BACKENDS:
        with tiny_llm.llm(backend=backend, max_num_seqs=1, prefix_caching=False) as llm:
            found[backend] = answers(llm)
    return found


@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: s["storage"])
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_under_a_tenth_of_the_memory_every_request_gets_the_bits_it_gets_alone(
    backend: str, preemption: Mode, storage: dict[str, str], alone: dict[str, Any]
) -> None:
    load = sum(len(prompt) + 40 for prompt in PROMPTS)
    memory = {} if preemption == "recompute" else {"swap_memory": "1MiB"}
    with tiny_llm.llm(backend=backend, preemption=preemption, max_num_seqs=12, **memory, **storage) as llm:
        tokens = max(load // 10, 120)
        llm.resize(-(-tokens // llm.block_size) * llm._opened.storage.block_bytes)
        assert answers(llm) == alone[backend]
        stats = llm.stats()
        llm.cache.check()
    assert stats["num_preemptions"] > 0
    assert stats["swapped_bytes"] == 0
    if preemption == "swap":
        assert stats["num_swapped"] > 0
        assert stats["num_restored_tokens"] > 0
    if preemption == "recompute":
        assert stats["num_swapped"] == 0


@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: s["storage"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_what_windows_have_left_is_swapped_bit_for_bit(backend: str, storage: dict[str, str]) -> None:
    """Sequences of 60 tokens and more over windows of 16: all that comes back has given blocks up."""
    with tiny_llm.llm(window=16, backend=backend, max_num_seqs=1, prefix_caching=False) as llm:
        alone = answers(llm)
    options: dict[str, Any] = {"window": 16, "backend": backend, "preemption": "swap", "max_num_seqs": 12}
    with tiny_llm.llm(swap_memory="1MiB", **options, **storage) as llm:
        size = llm.block_size
        llm.resize(2 * -(-160 // size) * llm._opened.storage.block_bytes)
        copied = []
        read_blocks = llm._opened.storage.read_blocks

        def noted_read(block_ids: np.ndarray, num_tokens: int, **where: Any) -> np.ndarray:
            payload = read_blocks(block_ids, num_tokens, **where)
            copied.append((bool((block_ids < 0).any()), len(payload) < num_tokens * llm.spec.bytes_per_token))
            return payload

        llm._opened.storage.read_blocks = noted_read
        assert answers(llm) == alone
        stats = llm.stats()
        llm.cache.check()
    assert stats["num_restored_tokens"] > 0
    assert stats["swapped_bytes"] == 0
    if size <= 16:
        assert any(is_cut for is_cut, _ in copied)
    assert all(is_cut == is_shorter for is_cut, is_shorter in copied), "only what is left takes memory"


def test_swapped_bytes_stay_within_their_cap() -> None:
    """With room for one swapped out sequence the others are computed again."""
    for cap in (0, 2500, 10**6):
        engine = FakeEngine(num_blocks=12, preemption="swap", swap_bytes=cap, max_num_seqs=8)
        ids = {}
        for i in range(8):
            prompt = [(i * 7 + j) % 90 for j in range(10 + i)]
            ids[engine.submit(prompt, SamplingParams(max_tokens=12))] = prompt
        outputs = engine.run()
        for request_id, prompt in ids.items():
            assert outputs[request_id].outputs[0].token_ids == expected_tokens(engine.spec, prompt, 12)
        stats = engine.engine.stats()
        assert stats["num_preemptions"] > 0
        assert (stats["num_swapped"] > 0) == (cap > 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_sequence_longer_than_its_window_is_swapped_and_comes_back(fails: bool) -> None:
    """fails: there is no memory behind the blocks at every second attempt, so it is computed again."""
    engine = FakeEngine(num_blocks=40, spec=window_spec(6), preemption="swap", max_num_seqs=8)
    had, came_back = {}, []
    swap_out, restore, run_copies = (
        engine.engine.swap.swap_out,
        engine.engine.swap.restore,
        engine.runner.run_copies,
    )
    num_settled = 0

    def tables(cache_sequence: Any, num_tokens: int) -> list[list[bool]]:
        num_blocks = -(-num_tokens // engine.cache.block_size)
        return [
            (cache_sequence.block_table(g)[:num_blocks] >= 0).tolist() for g in range(engine.cache.num_groups)
        ]

    def noted_swap(sequence: RequestSequence) -> bool:
        had[id(sequence)] = (sequence.num_computed, tables(sequence.cache_sequence, sequence.num_computed))
        return swap_out(sequence)

    def noted_restore(sequence: RequestSequence, cache_sequence: Any) -> int | None:
        found, before = cache_sequence.num_computed_tokens, engine.runner.slots.copy()
        needed = engine.cache.num_blocks_to_restore(cache_sequence, sequence.swapped.num_tokens)
        num_free = engine.cache.num_free_blocks
        restored = restore(sequence, cache_sequence)
        if restored is not None and restored > found:
            num_tokens, kept = had[id(sequence)]
            assert (restored, tables(cache_sequence, restored)) == (num_tokens, kept)
            assert engine.cache.num_free_blocks >= num_free - needed
            held = {u for g in (0, 1) for u in cache_sequence.block_table(g).tolist() if u >= 0}
            changed = set((np.argwhere(engine.runner.slots != before)[:, 1] // 4).tolist())
            assert changed <= held, "only blocks of its own are written"
            came_back.append(not all(map(all, kept)))
        engine.cache.check()
        return restored

    def failing_settle(plan: Any) -> None:
        nonlocal num_settled
        num_settled += 1
        if fails and num_settled % 2:
            raise CapacityError("no memory")
        run_copies(plan)

    swap: Any = engine.engine.swap
    swap.swap_out, swap.restore, engine.runner.run_copies = noted_swap, noted_restore, failing_settle  # type: ignore[method-assign]
    ids = {}
    for i in range(8):
        prompt = [(i * 7 + j) % 90 for j in range(14 + i)]
        ids[engine.submit(prompt, SamplingParams(max_tokens=30))] = prompt
    outputs = engine.run()
    for request_id, prompt in ids.items():
        assert outputs[request_id].outputs[0].token_ids == expected_tokens(engine.spec, prompt, 30)
    assert any(came_back), "one that had given blocks up"
    assert engine.engine.stats()["num_preemptions"] > 0
    assert engine.engine.stats()["swapped_bytes"] == 0
    engine.check_empty()


def test_auto_takes_what_is_expected_to_be_quicker() -> None:
    speeds = Throughputs()
    assert speeds.copy_s(10**9) > 0
    speeds.add_copy(1000, 1.0)
    speeds.add_computation(100, 10.0)
    speeds.add_computation(1, 10.0)  # too few to tell
    assert speeds.copy_s(2000) == pytest.approx(2.0)
    assert speeds.compute_s(20) == pytest.approx(2.0)
    speeds.add_copy(1000, 2.0)
    assert speeds.copy_s(1000) == pytest.approx(1.2)
    for copy_s, num_swapped in ((1e-6, True), (1.0, False)):
        engine = FakeEngine(num_blocks=12, preemption="auto", max_num_seqs=8)
        engine.engine._speeds.add_copy(1, copy_s)
        engine.engine._speeds.copied = lambda *_: None  # type: ignore[method-assign]
        for i in range(8):
            engine.submit([(i * 7 + j) % 90 for j in range(10 + i)], SamplingParams(max_tokens=12))
        engine.run()
        assert engine.engine.stats()["num_preemptions"] > 0
        assert (engine.engine.stats()["num_swapped"] > 0) is num_swapped


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_oldest_request_gets_a_token_in_every_step_that_it_could_alone(preemption: Mode) -> None:
    """No livelock: whatever else runs, the oldest of those that run computes something in every step."""
    engine = FakeEngine(num_blocks=14, preemption=preemption, max_num_seqs=8, max_batch_tokens=9)
    rng = np.random.default_rng(3)
    for _ in range(30):
        engine.submit(rng.integers(0, 90, rng.integers(1, 20)).tolist(), SamplingParams(max_tokens=20))
    num_steps = 0
    while engine.engine.has_work:
        running = engine.scheduler.running
        oldest = running[0] if running else None
        before = oldest.num_computed if oldest is not None else 0
        engine.step()
        num_steps += 1
        if oldest is not None and not oldest.finished:
            assert oldest.state.value == "running"
            assert oldest.num_computed > before
    engine.check_empty()
    assert engine.engine.stats()["num_preemptions"] > 5
    assert num_steps <= 30 * (20 + 20)


def test_options_are_checked() -> None:
    with pytest.raises(ArgumentError, match="expected auto, swap or recompute, got 'drop' - in `preemption`"):
        tiny_llm.llm(preemption="drop")
    with pytest.raises(ArgumentError, match="expected a storage whose blocks can be copied out"):
        tiny_llm.llm(preemption="swap", storage="contiguous")
