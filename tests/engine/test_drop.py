"""Content dropped while requests hold it: it is not found again, answers stay, and all of it is free at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.cache_case import BACKENDS, LONG_BACKENDS
from support.fake_engine import FakeEngine

from quire import LLM, SamplingParams
from quire.cache.prefix_key import ResolvedKey
from quire.memory.placement import unsupported_reason
from quire.offload.swap import Mode
from quire.scheduler.request import Request

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPT = [(7 * j) % 90 + 5 for j in range(40)]
STORAGES: list[dict[str, Any]] = [{"storage": "paged"}]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})


def run(llm: LLM, num_steps: int = 10**6) -> dict[str, list[list[int]]]:
    """So many steps; the tokens of the requests that ended."""
    ended: dict[str, list[list[int]]] = {}
    for _ in range(num_steps):
        if not llm.engine.has_work:
            break
        for output in llm.engine.step():
            ended[output.request_id] = [one.token_ids for one in output.outputs]
    return ended


def found(llm: LLM, tokens: list[int]) -> int:
    return llm.cache.match([*tokens, 7]).num_tokens


def drop(llm: LLM, tokens: list[int]) -> Any:
    return llm.engine.drop(np.asarray(tokens, np.int32))


def is_as_new(llm: LLM) -> bool:
    llm.cache.check()
    return llm.stats()["free"] == llm.num_blocks and llm.stats()["swapped_bytes"] == 0


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("storage", STORAGES, ids=lambda one: one["storage"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_running_request_gets_its_answer_and_leaves_nothing(
    backend: str, storage: dict[str, Any], window: int
) -> None:
    with tiny_llm.llm(backend=backend, window=window, **storage) as llm:
        [alone] = llm.generate([PROMPT], GREEDY)
        answer = alone.outputs[0].token_ids
        llm.trim()
        first = llm.engine.submit(PROMPT, GREEDY)
        run(llm, 6)
        dropped = drop(llm, PROMPT[:3])
        assert (dropped.num_freed, dropped.num_held) != (0, 0)
        assert found(llm, PROMPT) == 0
        assert run(llm) == {first: [answer]}
        assert found(llm, [*PROMPT, *answer]) == 0
        assert is_as_new(llm)
        assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == answer
        assert found(llm, PROMPT) == len(PROMPT), "computed anew it is found again"


@pytest.mark.parametrize("through", ["engine", "cache"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_prefill_under_way_and_its_samples(backend: str, through: str) -> None:
    """Chunks, and three sequences: whoever computes the prompt has been dropped after its first chunk."""
    three = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    options: dict[str, Any] = {"backend": backend, "max_batch_tokens": 16, "max_num_seqs": 2}
    with tiny_llm.llm(**options) as llm:
        [alone] = llm.generate([PROMPT], three)
        llm.trim()
        request = llm.engine.submit(PROMPT, three)
        run(llm, 1)
        other = llm.engine.submit(PROMPT, GREEDY)  # computes it for itself
        if through == "engine":
            drop(llm, PROMPT[:3])
        else:
            llm.cache.drop(PROMPT[:3])
        ended = run(llm)
        assert ended[request] == [one.token_ids for one in alone.outputs]
        assert len(ended[other][0]) == 24
        assert llm.stats()["cached"] == 4, "the other's 63 tokens alone"
        assert drop(llm, PROMPT[:3]) == (4, 0)
        assert is_as_new(llm)


def preempt(llm: LLM, preemption: str) -> None:
    num_swapped = llm.stats()["num_swapped"]
    llm.engine.scheduler._preempt_last()
    assert llm.stats()["num_swapped"] - num_swapped == (preemption == "swap")


@pytest.mark.parametrize("is_dropped_first", [True, False], ids=["dropped first", "preempted first"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("storage", STORAGES, ids=lambda one: one["storage"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_preempted_request_that_comes_back_is_not_found_either(
    backend: str, storage: dict[str, Any], preemption: Mode, is_dropped_first: bool
) -> None:
    memory = {"swap_memory": "1MiB"} if preemption == "swap" else {}
    with tiny_llm.llm(backend=backend, preemption=preemption, **memory, **storage) as llm:
        answer = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
        llm.trim()
        first = llm.engine.submit(PROMPT, GREEDY)
        run(llm, 6)
        if is_dropped_first:
            llm.cache.drop(PROMPT[:3])
            preempt(llm, preemption)
        else:
            preempt(llm, preemption)
            assert drop(llm, PROMPT[:3]).num_held == 0
        for _ in range(2):
            run(llm, 2)
            assert found(llm, PROMPT) == 0
            preempt(llm, preemption)
        assert found(llm, PROMPT) == 0
        assert run(llm) == {first: [answer]}
        assert is_as_new(llm)


def test_a_request_that_has_not_begun_is_found_once_it_has() -> None:
    with tiny_llm.llm(max_num_seqs=1) as llm:
        llm.engine.submit(PROMPT[1:], GREEDY)
        llm.engine.submit(PROMPT, GREEDY)
        run(llm, 2)
        drop(llm, PROMPT[:3])
        run(llm)
        assert found(llm, PROMPT) == len(PROMPT)


def test_extra_keys_and_namespaces_say_whose_preempted_content_it_is() -> None:
    """Of equal tokens only what has the same keys, up to where the dropped tokens end, is the same content."""
    engine = FakeEngine(num_blocks=64, max_num_seqs=8)
    keys = [None, {1: b"cat"}, {30: b"cat"}, {1: b"dog"}]
    requests = []
    for at, (namespace, extra) in enumerate([(b"", one) for one in keys] + [(b"a", keys[1])]):
        params = SamplingParams(max_tokens=30)
        request = Request(
            str(at),
            np.array(PROMPT, np.int32),
            params,
            max_tokens=30,
            arrival=at,
            key=ResolvedKey(namespace, extra),
        )
        engine.scheduler.add(request)
        requests.append(request)
    engine.step()
    for _ in requests:
        engine.scheduler._preempt_last()
    engine.scheduler.drop(np.array(PROMPT[:10], np.int32), ResolvedKey(extra_keys={1: b"cat"}))
    assert [one.sequences[0].is_withdrawn for one in requests] == [False, True, False, False, False]
    engine.scheduler.drop(np.array(PROMPT[:10], np.int32))
    assert [one.sequences[0].is_withdrawn for one in requests] == [True, True, True, False, False]
    engine.scheduler.drop(np.array([], np.int32), ResolvedKey(b"a"))
    assert requests[-1].sequences[0].is_withdrawn


def test_nobody_waits_for_the_commit_of_one_that_was_dropped() -> None:
    with tiny_llm.llm(max_batch_tokens=16) as llm:
        llm.engine.submit(PROMPT, GREEDY)
        run(llm, 1)
        drop(llm, PROMPT[:3])
        llm.engine.submit(PROMPT, GREEDY)
        run(llm, 1)
        assert all(sequence.waits_for is None for sequence in llm.engine.scheduler.waiting)


def test_tiers_are_not_handed_what_was_dropped(tmp_path: Path) -> None:
    """Neither when it is dropped, nor by the trim that follows, nor when the request ends."""
    with tiny_llm.llm(disk_cache=tmp_path) as llm:
        llm.engine.submit(PROMPT, GREEDY)
        run(llm, 6)
        llm.cache.drop(PROMPT[:3])
        llm.trim()
        run(llm)
        llm.flush()
        llm.trim()
        assert llm.monitor.explain(PROMPT).num_tier_tokens.get("disk", 0) == 0
        assert is_as_new(llm)


# Trim


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize(
    "options",
    [*STORAGES, {"storage": "paged", "block_size": 3}, {"storage": "paged", "prefix_caching": False}],
    ids=lambda one: "-".join(str(value) for value in one.values()),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_trim_leaves_no_block_and_no_byte(backend: str, options: dict[str, Any], window: int) -> None:
    with tiny_llm.llm(backend=backend, window=window, **options) as llm:
        llm._opened.storage.fill(1.0)
        [one] = llm.generate([PROMPT], GREEDY)
        llm.resize("1111KiB")
        llm.generate([PROMPT], GREEDY)
        llm.flush()
        llm.trim()
        assert llm.stats()["cached"] == 0
        assert is_as_new(llm)
        assert llm.stats()["kv_committed_bytes"] == 0
        assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == one.outputs[0].token_ids
