"""`LLM.resize` and `LLM.trim`: the pool grows and shrinks while requests run, tokens stay, memory really goes back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support import tiny_llm
from support.cache_case import LONG_BACKENDS
from support.faulty_calls import FaultyCalls

from quire import LLM, SamplingParams
from quire.errors import ArgumentError, CapacityError
from quire.memory import heap, placement
from quire.memory.virtual import virtual_storage as virtual

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 90 + 5 for j in range(20 + 5 * i)] for i in range(12)]


def pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in smaps_rollup")


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


STORAGES = [{"storage": "paged"}, {"storage": "virtual", "piece_size": "4KiB"}]


@pytest.mark.parametrize("storage", STORAGES, ids=["paged", "virtual"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_tokens_stay_while_the_pool_breathes(backend: str, storage: dict[str, str]) -> None:
    with tiny_llm.llm(backend=backend, **storage) as llm:
        expected = tokens_of(llm)
        sizes = itertools.cycle([150, 30, 400, 12, 25, 1000, 11])
        ids = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        found = {}
        while llm.engine.has_work:
            llm.resize(next(sizes) * llm._opened.storage.block_bytes)
            llm.engine._cache.check()
            for output in llm.engine.step():
                found[output.request_id] = output.outputs[0].token_ids
        assert [found[i] for i in ids] == expected
        assert llm.stats()["num_preemptions"] > 0
        assert llm.stats()["held"] == 0
        assert tokens_of(llm) == expected


@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_resize_that_the_system_refuses_leaves_the_numbers(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise CapacityError("the system refuses")

    with tiny_llm.llm(backend=backend) as llm:
        expected = tokens_of(llm)
        before = llm.kv_memory_bytes, llm.stats()["num_blocks"]
        for name, size in (("give_back", 20), ("resize", 4 * before[1])):
            with monkeypatch.context() as patch:
                patch.setattr(llm._opened.storage, name, refuses)
                with pytest.raises(CapacityError, match="the system refuses"):
                    llm.resize(size * llm._opened.storage.block_bytes)
            assert (llm.kv_memory_bytes, llm.stats()["num_blocks"]) == before
            llm.cache.check()
            llm._opened.budget.check()
        assert tokens_of(llm) == expected


@pytest.mark.parametrize("storage", STORAGES, ids=["paged", "virtual"])
def test_what_is_given_up_goes_back_to_the_system(storage: dict[str, str]) -> None:
    with tiny_llm.llm(kv_memory="192MiB", **storage) as llm:
        kept = llm._opened.storage
        tokens_of(llm)
        kept.fill(1.0)  # every page of the pool is in memory
        full, before = kept.bytes_committed, pss_bytes()
        assert full >= 0.99 * llm.kv_memory_bytes
        llm.resize("48MiB")
        assert kept.bytes_committed <= 50 << 20
        # What is mapped nowhere is in nobody's PSS: of the virtual storage only what sequences have.
        assert before - pss_bytes() >= 0.95 * (144 << 20) or llm.storage == "virtual"
        llm.resize("192MiB")
        assert kept.bytes_committed <= 50 << 20, "growing takes nothing before it is used"
        kept.fill(1.0)
        llm.trim()
        assert kept.bytes_committed == 0
        assert before - pss_bytes() >= 0.95 * full or llm.storage == "virtual"
        assert llm.stats()["cached"] == 0
        assert llm.stats()["num_blocks"] * kept.block_bytes == llm.kv_memory_bytes
        tokens_of(llm)


@pytest.mark.parametrize(
    "options", [{"idle_trim": 0}, {"prefault": True}, {"storage": "contiguous"}, {"storage": "growing"}]
)
def test_memory_that_is_to_stay_stays(options: dict[str, Any]) -> None:
    with tiny_llm.llm(kv_memory="16MiB", **options) as llm:
        tokens_of(llm)
        assert llm.driver._idle_at is None


def test_prefault_takes_all_memory_at_the_start() -> None:
    with tiny_llm.llm(kv_memory="64MiB") as llm:
        expected = tokens_of(llm)
        assert llm._opened.storage.bytes_committed < 32 << 20
        assert llm.prefault()
        assert llm._opened.storage.bytes_committed >= 0.99 * llm.kv_memory_bytes
        assert tokens_of(llm) == expected
        llm.trim()
        assert not llm.prefault(), "somebody wanted less of it"
    with tiny_llm.llm(kv_memory="64MiB", prefault=True) as llm:
        assert llm._opened.storage.bytes_committed >= 0.99 * llm.kv_memory_bytes
        assert tokens_of(llm) == expected
    with pytest.raises(ArgumentError, match="prefault"):
        tiny_llm.llm(storage="growing", prefault=True)


@pytest.mark.parametrize("storage", STORAGES, ids=["paged", "virtual"])
def test_a_trim_that_the_system_refuses_keeps_budget_and_answers(
    monkeypatch: pytest.MonkeyPatch, storage: dict[str, str]
) -> None:
    """Every call fails by which memory goes back; the cached prefixes are forgotten, and the next trim works."""
    calls = FaultyCalls()
    monkeypatch.setattr(virtual, "MemfdBackend", lambda: placement.MemfdBackend(calls))
    with tiny_llm.llm(**storage) as llm:
        expected = tokens_of(llm)
        before, committed = llm.stats(), llm._opened.storage.bytes_committed
        with monkeypatch.context() as refusing:
            refusing.setattr(heap.Heap, "release", refuse)
            calls.arm(1)
            with pytest.raises(CapacityError, match="made to fail"):
                llm.trim()
            calls.arm(0)
        after = llm.stats()
        assert after["num_blocks"] == before["num_blocks"] == llm.num_blocks
        assert after["free"] + after["cached"] == llm.num_blocks
        assert llm._opened.storage.bytes_committed == committed
        llm.engine._cache.check()
        assert tokens_of(llm) == expected
        llm.trim()
        assert llm._opened.storage.bytes_committed <= 0.2 * committed
        assert tokens_of(llm) == expected


def refuse(*_: Any) -> None:
    raise CapacityError("was made to fail")


def test_a_size_that_cannot_be_is_refused_and_changes_nothing() -> None:
    with tiny_llm.llm() as llm:
        before = llm.stats()
        with pytest.raises(ArgumentError, match="kv_memory of at least"):
            llm.resize(1)
        with pytest.raises(CapacityError, match="GiB that are free"):
            llm.resize("900TiB")
        with pytest.raises(ArgumentError):
            llm.resize("much")
        assert llm.stats() == before


def test_a_request_that_fits_no_more_ends_with_the_numbers() -> None:
    with tiny_llm.llm() as llm:
        request = llm.engine.submit(list(range(5, 69)), GREEDY)
        llm.engine.step()
        llm.resize(2 * llm._opened.storage.block_bytes)
        outputs = []
        while llm.engine.has_work:
            outputs += llm.engine.step()
        assert [output.request_id for output in outputs] == [request]
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "of 2 free" in str(outputs[0].outputs[0].error)
        assert llm.stats()["held"] == 0
