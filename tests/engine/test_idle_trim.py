"""An idle engine: cached content stays unless the system is short of memory; the reason of a loss is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import tiny_llm
from support.state_layers import FAMILIES, tiny_model

from quire import LLM, SamplingParams
from quire.cache.event_dispatcher import LOSS_REASONS
from quire.server.metrics import Metrics

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
MORE = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[(11 * i + 3 * j) % 90 + 5 for j in range(64)] for i in range(6)]
PLENTY = [(1 << 40, 1 << 39)]
STORAGES = [{"storage": "paged"}, {"storage": "virtual", "piece_size": "4KiB"}]


class System:
    """A clock, and a reading of memory, for an engine: both as the test says."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.now = 1000.0
        self.rooms = PLENTY
        self.num_readings = 0
        llm.driver.clock = lambda: self.now
        llm._opened.idle_trim.shortage.read = self.read

    def read(self) -> list[tuple[int, int]]:
        self.num_readings += 1
        return self.rooms

    def passes(self, seconds: float) -> None:
        """Time does, with no request; the engine has looked at it when this returns."""
        self.now += seconds
        self.llm.driver.call(lambda: None)

    def is_short_of(self, num_bytes: int) -> None:
        """Until so many bytes are given back: some 3 % of its memory is available, 10 % should be."""
        total = 1500 * -(-num_bytes // 100)
        self.rooms = [(1 << 50, 1 << 49), (total, total // 10 - num_bytes)]


def hit(llm: LLM, prompt: list[int]) -> int:
    return llm.monitor.explain(prompt).num_hit_tokens


@pytest.mark.parametrize("storage", STORAGES, ids=["paged", "virtual"])
def test_a_conversation_that_goes_on_after_an_hour_hits(storage: dict[str, str]) -> None:
    with tiny_llm.llm(kv_memory="16MiB", **storage) as llm:
        system = System(llm)
        chat = llm.conversation("def f(a, b, c): return a + b")
        first = chat.generate(MORE)
        cached = llm.stats()["cached"]
        assert cached > 0
        for _ in range(60):
            system.passes(60)
        assert system.num_readings == 60
        assert llm.stats()["cached"] == cached
        chat.append(" and then")
        second = chat.generate(MORE)
        assert second.num_cached_tokens >= len(first.prompt_token_ids) + len(first.outputs[0].token_ids) - 1


@pytest.mark.parametrize("storage", STORAGES, ids=["paged", "virtual"])
def test_memory_of_blocks_that_hold_nothing_goes_back(storage: dict[str, str]) -> None:
    with tiny_llm.llm(kv_memory="16MiB", idle_trim=10, prefix_caching=False, **storage) as llm:
        system = System(llm)
        wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, MORE)]
        system.passes(9)
        assert llm.kv_committed_bytes > 0
        system.passes(2)
        assert llm.kv_committed_bytes == 0
        assert llm.driver._idle_at is None, "nothing is left that could go"
        assert system.num_readings == 0
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, MORE)] == wanted
    with tiny_llm.llm(kv_memory="16MiB", idle_trim=10, **storage) as llm:
        system = System(llm)
        llm.generate(PROMPTS, MORE)
        before = llm.kv_committed_bytes
        llm.cache.drop(PROMPTS[0][:1])
        llm.cache.drop(PROMPTS[1][:1])
        system.passes(11)
        assert 0 < llm.kv_committed_bytes < before
        assert hit(llm, PROMPTS[1]) == 0
        assert all(hit(llm, prompt) == 63 for prompt in PROMPTS[2:])
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, MORE)] == wanted


def test_trim_by_hand_forgets() -> None:
    with tiny_llm.llm(kv_memory="16MiB") as llm:
        llm.generate(PROMPTS, MORE)
        llm.trim()
        assert llm.stats()["cached"] == llm.kv_committed_bytes == 0


@pytest.mark.parametrize("storage", STORAGES, ids=["paged", "virtual"])
def test_where_the_system_is_short_as_much_goes_as_it_misses_the_oldest_first(
    storage: dict[str, str],
) -> None:
    with tiny_llm.llm(kv_memory="16MiB", idle_trim=10, **storage) as llm:
        system, size = System(llm), llm.cache.block_bytes
        wanted = [llm.generate([prompt], ONE)[0].outputs[0].token_ids for prompt in PROMPTS]
        system.passes(11)
        cached, committed = llm.stats()["cached"], llm.kv_committed_bytes
        of_one = cached // len(PROMPTS)
        system.is_short_of(of_one * size)
        system.passes(9)
        assert llm.stats()["cached"] == cached, "not before as long again"
        system.passes(2)
        assert llm.stats()["cached"] == cached - of_one
        assert llm.kv_committed_bytes <= committed - of_one * size
        assert [hit(llm, prompt) > 0 for prompt in PROMPTS] == [False, *[True] * 5]
        system.rooms = [(1000, 60)]
        system.passes(11)  # between the two shares: it is short still
        assert llm.stats()["cached"] < cached - of_one
        system.rooms, cached = [(1000, 100)], llm.stats()["cached"]
        system.passes(11)
        system.rooms = [(1000, 60)]
        system.passes(11)  # between the two shares: it is not short yet
        assert llm.stats()["cached"] == cached
        llm.cache.check()
        system.rooms = [(1 << 40, 0)]
        system.passes(11)
        assert llm.stats()["cached"] == llm.kv_committed_bytes == 0
        num_readings = system.num_readings
        system.passes(11)
        assert system.num_readings == num_readings, "there is nothing that could go"
        assert [llm.generate([prompt], ONE)[0].outputs[0].token_ids for prompt in PROMPTS] == wanted


def test_what_is_pinned_stays_where_the_system_is_short() -> None:
    with tiny_llm.llm(kv_memory="16MiB", idle_trim=10) as llm:
        system = System(llm)
        llm.pins.add("def f(a, b, c):" * 4)
        llm.generate(PROMPTS, ONE)
        system.rooms = [(1 << 40, 0)]
        system.passes(11)
        assert llm.stats()["cached"] == 0
        assert llm.monitor.explain("def f(a, b, c):" * 4).num_hit_tokens > 0


def test_where_the_system_is_short_the_host_tier_goes_first(tmp_path: Path) -> None:
    options: dict[str, Any] = {"host_cache": "8MiB", "disk_cache": tmp_path, "idle_trim": 10}
    with tiny_llm.llm(kv_memory="16MiB", **options) as llm:
        system = System(llm)
        llm.generate(PROMPTS, ONE)
        llm.flush()
        tiers, cached = llm.stats()["tiers"], llm.stats()["cached"]
        assert tiers["host"]["bytes"] > 0
        system.is_short_of(tiers["host"]["bytes"] // 2 + 1)  # of values that are not all equally long
        system.passes(11)
        stats = llm.stats()
        assert stats["cached"] == cached
        assert 0 < stats["tiers"]["host"]["bytes"] <= tiers["host"]["bytes"] / 2
        assert stats["tiers"]["host"]["evicted"] > 0
        assert stats["tiers"]["disk"]["segments"] == tiers["disk"]["segments"]
        system.is_short_of(stats["tiers"]["host"]["bytes"] + 3 * llm.cache.block_bytes)
        system.passes(11)
        stats = llm.stats()
        assert (stats["tiers"]["host"]["bytes"], stats["cached"]) == (0, cached - 3)
        assert stats["evictions_by_reason"]["idle"]["count"] == 3


@pytest.mark.parametrize("has_disk", [True, False])
def test_what_a_short_system_takes_is_kept_on_disk_and_not_in_host_memory(
    tmp_path: Path, has_disk: bool
) -> None:
    options: dict[str, Any] = {"host_cache": "8MiB", "idle_trim": 10}
    options |= {"disk_cache": tmp_path} if has_disk else {}
    with tiny_llm.llm(kv_memory="16MiB", **options) as llm:
        system = System(llm)
        wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, MORE)]
        assert llm.stats()["tiers"]["host"]["stored"] == 0
        system.rooms = [(1 << 40, 0)]
        system.passes(11)
        llm.tiers.stack.flush()  # type: ignore[union-attr]
        stats = llm.stats()
        assert stats["cached"] == stats["tiers"]["host"]["bytes"] == stats["tiers"]["host"]["stored"] == 0
        if has_disk:
            assert llm.tiers is not None
            assert stats["tiers"]["disk"]["segments"] > 0
        system.rooms = PLENTY
        outputs = llm.generate(PROMPTS, MORE)
        assert [one.outputs[0].token_ids for one in outputs] == wanted
        llm.resize("64KiB")  # what goes for another reason goes to every tier
        llm.tiers.stack.flush()  # type: ignore[union-attr]
        assert llm.stats()["tiers"]["host"]["stored"] > 0


@pytest.mark.skipif("qwen3_next" not in FAMILIES, reason="this transformers has no qwen3_next")
def test_states_stay_and_go_with_the_blocks() -> None:
    draw = [[(7 * i + 5 * j) % 50 + 5 for j in range(40)] for i in range(6)]
    with LLM((tiny_model("qwen3_next"), None), kv_memory="8MiB", max_num_seqs=4, idle_trim=10) as llm:
        system = System(llm)
        wanted = [llm.generate([prompt], ONE)[0].outputs[0].token_ids for prompt in draw]
        before = llm.stats()
        for _ in range(3):
            system.passes(11)
        after = llm.stats()
        assert (after["checkpoints"], after["cached"]) == (before["checkpoints"], before["cached"])
        assert before["checkpoints"] > 2
        assert hit(llm, draw[0]) == 39
        system.is_short_of(llm._opened.budget.cached_bytes // 2)
        system.passes(11)
        after, half = llm.stats(), before["checkpoints"] // 2
        assert 0 < after["checkpoints"] <= half + 1
        assert 0 < after["cached"] <= before["cached"] // 2 + 1
        llm.cache.check()
        assert hit(llm, draw[0]) == 0
        assert hit(llm, draw[-1]) == 39
        system.rooms = [(1 << 40, 0)]
        system.passes(11)
        after = llm.stats()
        assert after["checkpoints"] == after["cached"] == 0
        assert [llm.generate([prompt], ONE)[0].outputs[0].token_ids for prompt in draw] == wanted


# -- why content went ------------------------------------------------------------------------------


def by_reason(page: bytes) -> dict[str, dict[str, float]]:
    """By name, of what has a reason."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if "reason" in sample.labels and "le" not in sample.labels:
                found.setdefault(sample.name, {})[sample.labels["reason"]] = sample.value
    return found


def check(llm: LLM) -> dict[str, int]:
    """Proves that every figure tells of the same blocks; how many, by reason, where there are any."""
    stats = llm.stats()
    counts = {reason: stats["evictions_by_reason"][reason]["count"] for reason in LOSS_REASONS}
    page = by_reason(Metrics("tiny").render(stats))
    names = ("evicted_blocks_total", "eviction_idle_seconds_count", "eviction_age_seconds_count")
    assert [page[f"quire:{name}"] for name in names] == [counts] * 3
    assert sum(counts.values()) == stats["evicted_blocks"] == stats["num_evictions"]
    assert llm.engine.stats()["evicted_blocks"] == stats["evicted_blocks"], "as the live page and top show it"
    return {reason: count for reason, count in counts.items() if count}


def one_of_each(llm: LLM, prompts: list[list[int]]) -> None:
    system = System(llm)
    assert check(llm) == {}
    llm.generate(prompts[:2], ONE)
    llm.between_steps(lambda: llm.engine.drop(llm.engine.check(prompts[0]).prompt_token_ids[:1]))
    dropped = check(llm)
    assert set(dropped) == {"dropped"}
    llm.trim()
    trimmed = check(llm)
    assert set(trimmed) == {"dropped"}
    assert trimmed["dropped"] > dropped["dropped"]
    llm.generate(prompts, ONE)
    before = check(llm)
    system.rooms = [(1 << 40, 0)]
    system.passes(61)
    idle = check(llm)
    assert set(idle) - set(before) == {"idle"}
    system.rooms = PLENTY
    llm.generate(prompts, ONE)
    before = check(llm)
    llm.resize(llm.engine.stats()["cached"] * llm.cache.block_bytes // 2)
    assert set(check(llm)) - set(before) == {"resize"}
    for prompt in prompts * 2:
        llm.generate([prompt], ONE)
    before = check(llm)
    assert set(before) == {*LOSS_REASONS} - {"quota"}
    llm.tenants.add("small", quota=14 * llm.cache.block_bytes)
    for prompt in prompts:
        llm.generate([prompt], ONE, tenant="small")
    assert set(check(llm)) == set(LOSS_REASONS)


@pytest.mark.parametrize("backend", ["native", "python"])
@pytest.mark.parametrize("window", [0, 32])
def test_each_block_is_counted_once_with_its_reason(backend: str, window: int) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    with tiny_llm.llm(backend=backend, window=window) as llm:
        one_of_each(llm, PROMPTS)


@pytest.mark.skipif("qwen3_next" not in FAMILIES, reason="this transformers has no qwen3_next")
def test_blocks_that_exchange_memory_with_states_are_counted_with_their_reason() -> None:
    draw = [[(7 * i + 5 * j) % 50 + 5 for j in range(64)] for i in range(12)]
    with LLM((tiny_model("qwen3_next"), None), kv_memory="8MiB", max_num_seqs=4) as llm:
        one_of_each(llm, draw)
