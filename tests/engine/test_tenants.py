"""Tenants: content is isolated, quotas and floors hold, and a tenant at its quota does not delay others."""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.beam_twin import beam_answers
from support.cache_case import BACKENDS
from support.fake_engine import FakeEngine
from support.fake_model import expected_logits, expected_tokens

from quire import SamplingParams
from quire.cache.prefix_key import PrefixKey
from quire.errors import ArgumentError, CapacityError
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.tenants import Tenants

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
SECRET = b"a secret of the server's"


def tokens_of(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 90, n).tolist()


def fake(num_blocks: int = 32, **options: Any) -> FakeEngine:
    engine = FakeEngine(num_blocks=num_blocks, **options)
    engine.size = engine.cache.block_bytes  # type: ignore[attr-defined]
    return engine


def add(engine: FakeEngine, name: str, quota: int | None = None, floor: int = 0, priority: int = 0) -> int:
    """Limits in blocks; its owner."""
    size = engine.cache.block_bytes
    tenant = engine.engine.tenants.add(
        name, quota=None if quota is None else quota * size, floor=floor * size, priority=priority
    )
    return tenant.owner_id


# -- who finds what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_another_tenant_has_costs_as_much_as_what_nobody_has(backend: str) -> None:
    """The same tokens are computed in the same number of steps, whether another tenant has them or nobody."""
    seen: dict[str, list[tuple[int, ...]]] = {"another's": [], "nobody's": [], "one's own": []}
    with tiny_llm.llm(backend=backend, tenant_secret=SECRET, kv_memory="16MiB") as llm:
        for name in ("alice", "bob"):
            llm.tenants.add(name)
        published = llm.pins.publish(tokens_of(1000, 21))
        for seed in range(30):
            prompt = [100 + 2 * seed, *tokens_of(seed, 40 + seed)]
            if seed % 2:
                prompt = [*published.tokens.tolist(), *prompt]
            salts: list[dict[str, str]] = [{}, {"cache_salt": "s"}]
            for options in (
                {"tenant": "alice"},
                {"tenant": "alice", "cache_salt": "s"},
                {},
                {"cache_salt": "s"},
            ):
                llm.generate([prompt], ONE, **options)
            never = [101 + 2 * seed, *tokens_of(5000 + seed, 40 + seed)]
            if seed % 2:
                never = [*published.tokens.tolist(), *never]
            for kind, asked, options in (
                ("another's", prompt, {"tenant": "bob", **salts[seed % 3 == 0]}),
                ("nobody's", never, {"tenant": "bob", **salts[seed % 3 == 0]}),
                ("one's own", prompt, {"tenant": "alice"}),
            ):
                before = llm.stats()
                output = llm.generate([asked], ONE, **options)[0]
                after = llm.stats()
                counted = ("num_computed_tokens", "num_steps", "evicted_blocks")
                seen[kind].append(
                    (output.num_cached_tokens, *(after[name] - before[name] for name in counted))
                )
    assert seen["another's"] == seen["nobody's"]
    assert {found for found, *_ in seen["another's"]} == {0, 21}
    assert all(own[0] > other[0] for own, other in zip(seen["one's own"], seen["another's"], strict=True))


@pytest.mark.ci
def test_time_tells_nothing_of_what_another_tenant_has() -> None:
    """A rank test of measured times: at most one in a thousand fair runs would fail."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with tiny_llm.llm(kv_memory="16MiB") as llm:
        llm.tenants.add("alice")
        llm.tenants.add("bob")
        prompts = [tokens_of(seed, 160) for seed in range(400)]
        for prompt in prompts[::2]:
            llm.generate([prompt], ONE, tenant="alice")
        order = list(enumerate(prompts))
        random.Random(7).shuffle(order)
        for index, prompt in order:
            began = time.perf_counter()
            output = llm.generate([prompt], ONE, tenant="bob")[0]
            times[index % 2 == 0].append(time.perf_counter() - began)
            assert output.num_cached_tokens == 0
            # Two random prompts may begin alike: what bob has himself is not the question.
            llm.cache.drop([], namespace=llm.engine.tenants.namespace("bob"))
        for prompt in prompts[:50]:
            llm.generate([prompt], ONE, tenant="bob")
        own = [llm.generate([prompt], ONE, tenant="bob")[0].timings.total_s or 0.0 for prompt in prompts[:50]]
    a, b = np.array(times[True]), np.array(times[False])
    rank_sum = float((a[:, None] > b[None, :]).sum() + 0.5 * (a[:, None] == b[None, :]).sum())
    mean, deviation = len(a) * len(b) / 2, (len(a) * len(b) * (len(a) + len(b) + 1) / 12) ** 0.5
    assert abs(rank_sum - mean) / deviation < 3.3
    assert statistics.median(own) < statistics.median(times[True]) / 2, "a hit could have been told"


def test_salts_without_end_are_forgotten_with_their_content() -> None:
    engine = fake()
    add(engine, "alice")
    tenants, prompt = engine.engine.tenants, tokens_of(1, 20)
    key = tenants.resolve(PrefixKey("alice", "kept"), np.array(prompt))
    cache_sequence = engine.cache.open(prompt, namespace=key.namespace)
    for i in range(20_000):
        tenants.resolve(PrefixKey("alice", f"salt {i}"), np.array(prompt))
    assert len(tenants.namespaces_of(None)) <= 4097
    assert tenants.owner_of(key.namespace) == tenants.owner_of(tenants.namespace("alice")) == "alice"
    engine.cache.close(cache_sequence)


def test_a_namespace_comes_from_the_secret_and_not_from_the_request() -> None:
    engine, other = FakeEngine(), FakeEngine()
    mine = Tenants(engine.cache, engine.engine.memory_limits, SECRET)
    same = Tenants(other.cache, other.engine.memory_limits, SECRET)
    without = Tenants(engine.cache, engine.engine.memory_limits)
    names = [mine.namespace(*parts) for parts in (("a",), ("a", "s"), ("as",), ("", "as"), ("a", "", b"s"))]
    assert len(set(names)) == len(names)
    assert [same.namespace("a"), same.public] == [names[0], mine.public]
    assert without.namespace("a") != names[0]
    key = mine.resolve(PrefixKey(cache_salt="s"), np.arange(9))
    assert key.namespace == mine.namespace("", "s")


def test_published_tokens_are_everybodys_and_what_follows_is_not() -> None:
    with tiny_llm.llm() as llm:
        llm.tenants.add("alice")
        llm.tenants.add("bob", quota="64KiB")
        system, question = tokens_of(1, 37), tokens_of(2, 30)

        def found(prompt: list[int], **options: Any) -> int:
            return llm.generate([prompt], ONE, **options)[0].num_cached_tokens

        assert found(system + question, tenant="alice") == 0
        pin = llm.pins.publish(system)
        assert found(system + question, tenant="alice") == 37
        assert found(system + question, tenant="alice") == 66
        assert found(system + question, tenant="bob") == 37
        assert found(system + question) == 37
        assert found(system, tenant="bob") == 0, "nothing behind it: the tenant's own"
        longer = llm.pins.publish(system + question[:3])
        assert found(system + question, tenant="alice") == 40
        for one in (pin, longer):
            llm.pins.remove(one)
        assert found(system + question, tenant="alice") == 66, "what it had before"
        owner_id = llm.engine.tenants["bob"].owner_id
        assert sum(llm.cache.owner_counts(owner_id)) * llm.cache.block_bytes <= 64 << 10
        llm.cache.check()


# -- how much --------------------------------------------------------------------------------------------


def test_what_can_never_fit_in_its_quota_fails_at_once_with_the_numbers() -> None:
    engine = fake()
    add(engine, "alice", quota=5)
    with pytest.raises(
        CapacityError,
        match=r"fits in its tenant's quota, got one of tenant 'alice' of 25 tokens that needs 7 blocks of 5",
    ):
        engine.submit(tokens_of(0, 20), SamplingParams(max_tokens=6), tenant="alice")
    engine.submit(tokens_of(0, 20), SamplingParams(max_tokens=1), tenant="alice")
    outputs = engine.run()
    assert len(outputs) == 1
    request = engine.submit(tokens_of(1, 8), SamplingParams(max_tokens=None), tenant="alice")
    assert len(engine.run()[request].outputs[0].token_ids) == 13, "as much as the quota leaves"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_every_request_gets_its_tokens_whatever_the_quotas(preemption: Any) -> None:
    rng = random.Random(3)
    for case in range(5):
        engine = fake(num_blocks=24, preemption=preemption, max_num_seqs=rng.choice([2, 8]))
        add(engine, "a", quota=rng.choice([7, 12, None]), floor=rng.choice([0, 6]))  # 7: of one sequence
        add(engine, "b", quota=rng.choice([7, 14]), floor=rng.choice([0, 4]))
        prompts = {}
        aborted = set()
        for i in range(12):
            prompt = tokens_of(100 * case + i, rng.randint(2, 16))
            width = rng.choice([1, 1, 2, 4])
            params = SamplingParams(max_tokens=10, beam_width=width, n=width)
            tenant = rng.choice(["a", "b", None])
            cache_priority = rng.choice(["keep", "normal", "discard"])
            request_id = engine.submit(prompt, params, tenant=tenant, cache_priority=cache_priority)
            prompts[request_id] = prompt, width
            aborted |= {request_id} if rng.random() < 0.2 else set()
        for step in range(1000):
            if not engine.engine.has_work:
                break
            if step == 9:
                aborted = {one for one in sorted(aborted) if engine.engine.abort(one) is not None}
            engine.step()
            for tenant in engine.engine.tenants:
                counts = engine.cache.owner_counts(tenant.owner_id)
                if tenant.quota_bytes is not None:
                    assert sum(counts) * engine.cache.block_bytes <= tenant.quota_bytes
        assert len(engine.outputs) + len(aborted) == len(prompts)  # no search waits for ever
        for request_id, output in engine.outputs.items():
            prompt, width = prompts[request_id]
            assert [one.token_ids for one in output.outputs] == answers_of(engine, prompt, width)
        engine.check_empty()


def answers_of(engine: FakeEngine, prompt: list[int], width: int) -> list[list[int]]:
    if width == 1:
        return [expected_tokens(engine.spec, prompt, 10)]
    found = beam_answers(partial(expected_logits, engine.spec), prompt, width=width, max_tokens=10)
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("others_run", [False, True])
def test_a_search_goes_on_in_a_quota_of_one_sequence(others_run: bool) -> None:
    """Its idle beams give their blocks to the next one: others, who need none of them, do not have to end first."""
    engine = fake(num_blocks=60, max_num_seqs=8)
    add(
        engine, "small", quota=5 + others_run
    )  # of 20 tokens, and next to others of the copy of a partial block
    add(engine, "other")
    if others_run:
        busy = engine.submit(tokens_of(1, 4), SamplingParams(max_tokens=120), tenant="other")
    prompt = tokens_of(0, 11)
    search = engine.submit(prompt, SamplingParams(max_tokens=10, beam_width=4, n=4), tenant="small")
    for _ in range(100):
        engine.step()
    assert [one.token_ids for one in engine.outputs[search].outputs] == answers_of(engine, prompt, 4)
    assert not others_run or busy not in engine.outputs


def test_a_request_that_needs_its_whole_quota_does_not_wait_for_the_others() -> None:
    """Its hit ends in a partial block, and the quota has no block for a copy."""
    engine = fake(num_blocks=60)
    size = engine.cache.block_size
    add(engine, "small", quota=5)
    add(engine, "other")
    busy = engine.submit(tokens_of(1, 4), SamplingParams(max_tokens=120), tenant="other")
    prompt = tokens_of(0, 4 * size)
    engine.submit(prompt, SamplingParams(max_tokens=1), tenant="small")
    for _ in range(6):
        engine.step()
    text = [*prompt[: size + size // 2], *tokens_of(2, 4 * size - size // 2 - 1)]
    again = engine.submit(text, SamplingParams(max_tokens=1), tenant="small")
    for _ in range(20):
        engine.step()
    assert busy not in engine.outputs
    assert engine.outputs[again].outputs[0].token_ids == expected_tokens(engine.spec, text, 1)
    assert engine.outputs[again].num_cached_tokens == size


def test_a_tenant_finds_nothing_of_anothers_search() -> None:
    engine = fake(num_blocks=60)
    owners = {name: add(engine, name) for name in ("a", "b")}
    prompt, params = tokens_of(0, 16), SamplingParams(max_tokens=10, beam_width=4, n=4)
    for name, is_found in (("a", False), ("b", False), ("a", True)):
        before = engine.cache.stats()["hit_tokens"]
        engine.submit(prompt, params, tenant=name)
        engine.run()
        assert (engine.cache.stats()["hit_tokens"] > before) == is_found
    aborted = engine.submit(prompt[::-1], params, tenant="b")
    for _ in range(4):
        engine.step()
    assert engine.cache.owner_counts(owners["b"]).held > 0
    engine.engine.abort(aborted)
    assert engine.cache.owner_counts(owners["b"]).held == 0
    engine.check_empty()


def test_who_waits_for_its_own_blocks_delays_nobody_else() -> None:
    engine = fake(num_blocks=40, max_num_seqs=16)
    add(engine, "small", quota=6)
    add(engine, "other")
    first = engine.submit(tokens_of(0, 16), SamplingParams(max_tokens=8), tenant="small")
    second = engine.submit(tokens_of(1, 12), SamplingParams(max_tokens=12), tenant="small")
    third = engine.submit(tokens_of(2, 4), SamplingParams(max_tokens=12), tenant="small")
    others = [
        engine.submit(tokens_of(3 + i, 8), SamplingParams(max_tokens=4), tenant="other") for i in range(3)
    ]
    engine.step()
    running = {sequence.request.request_id for sequence in engine.scheduler.running}
    assert running == {first, *others}
    ended = []
    while engine.engine.has_work:
        ended += [output.request_id for output in engine.step()]
    assert ended.index(others[-1]) < ended.index(first) < ended.index(second) < ended.index(third)


def test_a_quota_preempts_the_tenants_own_youngest() -> None:
    engine = fake(num_blocks=40, max_num_seqs=16)
    add(engine, "small", quota=8)
    add(engine, "other")
    mine = [engine.submit(tokens_of(i, 4), SamplingParams(max_tokens=20), tenant="small") for i in range(3)]
    others = [
        engine.submit(tokens_of(5 + i, 4), SamplingParams(max_tokens=20), tenant="other") for i in range(2)
    ]
    preempted: set[str] = set()
    while engine.engine.has_work:
        before = {s.request.request_id: s.request.num_preemptions for s in engine.scheduler.running}
        requests = dict(engine.scheduler.requests)
        engine.step()
        new = {name for name, count in before.items() if requests[name].num_preemptions > count}
        assert mine[0] not in new
        preempted |= new
    assert preempted
    assert preempted <= set(mine)
    assert not preempted & set(others)
    engine.check_empty()


def test_a_floor_is_not_taken_by_others_running_or_cached() -> None:
    engine = fake(num_blocks=20, max_num_seqs=16)
    owner_id = add(engine, "kept", floor=6)
    add(engine, "greedy")
    prompt = tokens_of(0, 23)
    engine.submit(prompt, SamplingParams(max_tokens=1), tenant="kept")
    engine.run()
    for i in range(20):
        engine.submit(tokens_of(1 + i, 20), SamplingParams(max_tokens=10), tenant="greedy")
    engine.run()
    assert sum(engine.cache.owner_counts(owner_id)) == 6
    again = engine.submit(prompt, SamplingParams(max_tokens=1), tenant="kept")
    assert engine.run()[again].num_cached_tokens == 22
    # One that runs within its floor is not preempted for others either, young as it may be.
    for i in range(4):
        engine.submit(tokens_of(50 + i, 4), SamplingParams(max_tokens=36), tenant="greedy")
    young = engine.submit(tokens_of(70, 4), SamplingParams(max_tokens=16), tenant="kept")
    request = engine.scheduler.requests[young]
    engine.run()
    assert engine.engine.stats()["num_preemptions"] > 0
    assert request.num_preemptions == 0


def test_priority_is_the_tenants_and_the_requests() -> None:
    engine = fake(max_num_seqs=1)
    add(engine, "slow", priority=5)
    add(engine, "quick", priority=-5)
    order = [
        engine.submit(tokens_of(i, 4), SamplingParams(max_tokens=2), tenant=tenant, priority=priority)
        for i, (tenant, priority) in enumerate([("slow", 0), ("quick", 11), ("quick", 0), (None, 0)])
    ]
    ended: list[str] = []
    while engine.engine.has_work:
        ended += [output.request_id for output in engine.step()]
    assert ended == [order[2], order[3], order[0], order[1]]


def test_cache_priority_decides_what_goes_first() -> None:
    engine = fake(num_blocks=12)
    kept, dropped = tokens_of(1, 16), tokens_of(2, 16)
    engine.submit(kept, SamplingParams(max_tokens=1), cache_priority="keep")
    engine.run()
    engine.submit(dropped, SamplingParams(max_tokens=1), cache_priority="discard")
    engine.run()
    engine.submit(tokens_of(3, 24), SamplingParams(max_tokens=1))
    engine.run()
    assert engine.cache.match(kept).num_tokens == 15
    assert engine.cache.match(dropped).num_tokens < 15


# -- what cannot be --------------------------------------------------------------------------------------


def test_limits_that_cannot_be_are_refused() -> None:
    with tiny_llm.llm() as llm:
        for options, message in (
            ({"quota": 0}, "expected a size of at least 1 byte, got 0 for the quota of tenant 'a'"),
            (
                {"quota": "1KiB"},
                r"expected a quota of at least 8KiB \(1 blocks\), got '1KiB' - of tenant 'a'",
            ),
            (
                {"quota": "1MiB", "floor": "1.5MiB"},
                "expected a floor of at most the quota of 1MiB, got '1.5MiB'",
            ),
            ({"floor": "3MiB"}, "expected floors and pins that fit in the cache of 2MiB, got '3MiB'"),
            ({"quota": "lots"}, "expected a size such as"),
            ({"priority": 1.5}, "expected an integer priority, got 1.5"),
        ):
            with pytest.raises(ArgumentError, match=message):
                llm.tenants.add("a", **options)
        with pytest.raises(ArgumentError, match="expected a tenant's name, got ''"):
            llm.tenants.add("")
        llm.tenants.add("a/../b", floor="1.5MiB")
        with pytest.raises(ArgumentError, match=r"expected a new tenant, got 'a/\.\./b'"):
            llm.tenants.add("a/../b")
        with pytest.raises(ArgumentError, match=r"where 1\.5MiB are other tenants' floors"):
            llm.tenants.add("c", floor="1MiB")
        with pytest.raises(
            ArgumentError, match=r"expected a tenant that was added, got 'd' \(known: a/../b\)"
        ):
            llm.generate([[1, 2]], ONE, tenant="d")
        with pytest.raises(ArgumentError, match="expected keep, normal or discard, got 'always'"):
            llm.generate([[1, 2]], ONE, cache_priority="always")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="expected text as cache_salt"):
            llm.generate([[1, 2]], ONE, cache_salt="")
        with pytest.raises(CapacityError, match=r"expected a kv_memory of at least 1.5MiB"):
            llm.resize("1MiB")
        assert llm.stats()["num_blocks"] == 256
        llm.resize("4MiB")
        llm.tenants.add("c", floor="2MiB")
        llm.tenants.remove("a/../b")
        llm.resize("2MiB")
        with pytest.raises(
            ArgumentError, match="expected at least 16 bytes, got 5 bytes - in `tenant_secret`"
        ):
            tiny_llm.llm(tenant_secret=b"short")


def test_a_tenant_that_is_removed_leaves_nothing() -> None:
    with tiny_llm.llm() as llm:
        llm.tenants.add("a", quota="512KiB")
        llm.generate([tokens_of(0, 50)], ONE, tenant="a")
        llm.generate([tokens_of(0, 50)], ONE, tenant="a", cache_salt="s")
        llm.pins.add(tokens_of(1, 20), tenant="a")
        request = llm.engine.submit(tokens_of(2, 20), RequestOptions.of(ONE, tenant="a"))
        with pytest.raises(ArgumentError, match="expected a tenant without requests, got 'a' with 1"):
            llm.tenants.remove("a")
        llm.engine.abort(request)
        llm.tenants.remove("a")
        stats = llm.stats()
        assert (stats["cached"], stats["pinned"], stats["num_tenants"]) == (0, 0, 0)
        llm.tenants.add("a")
        assert llm.generate([tokens_of(0, 50)], ONE, tenant="a")[0].num_cached_tokens == 0


# -- pins ------------------------------------------------------------------------------------------------


def test_pins_of_an_engine_hold_under_pressure_and_within_their_budget() -> None:
    with tiny_llm.llm(kv_memory="256KiB", pin_memory="64KiB", max_num_seqs=4) as llm:
        llm.tenants.add("a")
        pin = llm.pins.add(tokens_of(0, 100), tenant="a", owner="the chat")
        assert (pin.owner, len(pin.tokens)) == ("the chat", 100)
        assert (
            repr(pin) == "Pin(owner='the chat', num_tokens=100, ttl_s=None, num_hits=0)"
        )  # no token, no namespace
        with pytest.raises(
            CapacityError, match=r"expected a pin within the budget of 64KiB \(8 blocks\), got one that"
        ):
            llm.pins.add(tokens_of(1, 40))
        llm.pins.add(tokens_of(0, 90), tenant="a")  # shares all but the last block
        for seed in range(2, 12):
            llm.generate([tokens_of(seed, 120)], ONE)
        assert llm.generate([[*tokens_of(0, 100), 7]], ONE, tenant="a")[0].num_cached_tokens == 100
        assert pin.num_hits == 1
        stats = llm.stats()
        assert (stats["pinned"], stats["num_pins"]) == (7, 2)
        with pytest.raises(CapacityError, match=r"expected a kv_memory of at least .* are pinned"):
            llm.resize(6 * llm.cache.block_bytes)
        llm.trim()
        assert llm.stats()["pinned"] == 7
        for one in llm.pins:
            llm.pins.remove(one)
        assert llm.stats()["pinned"] == 0
        llm.cache.check()


def test_a_pinned_prompt_may_fill_the_longest_sequence() -> None:
    """Nothing is drawn behind it."""
    with tiny_llm.llm(kv_memory="256KiB", max_model_len=64) as llm:
        pin = llm.pins.add(tokens_of(0, 64))
        assert len(pin.tokens) == 64
        assert llm.stats()["num_computed_tokens"] == 64


def test_no_pin_and_no_floor_may_strand_a_request_that_waits() -> None:
    later = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    with tiny_llm.llm(kv_memory="192KiB", pin_memory="100%") as llm:
        waiting = llm.engine.submit(tokens_of(0, 200), RequestOptions(later, priority=10))
        with pytest.raises(CapacityError, match=f"in request '{waiting}'"):
            llm.pins.add(tokens_of(1, 240))
        assert llm.stats()["num_pins"] == 0
        with pytest.raises(CapacityError, match=f"in request '{waiting}'"):
            llm.tenants.add("a", floor="100KiB")
        assert llm.stats()["num_tenants"] == 0
        while llm.engine.has_work:
            llm.engine.step()
        pin = llm.pins.add(tokens_of(1, 240))
        with pytest.raises(CapacityError, match="less 15 for pins and other tenants' floors"):
            llm.generate([tokens_of(2, 240)], SamplingParams(max_tokens=16))
        shared = llm.generate([tokens_of(1, 240)], SamplingParams(max_tokens=16, ignore_eos=True))[0]
        assert len(shared.outputs[0].token_ids) == 16
        llm.pins.remove(pin)


def test_rows_share_nothing_to_pin() -> None:
    with tiny_llm.llm(storage="contiguous") as llm:
        llm.tenants.add("a")
        llm.generate([[1, 2, 3]], ONE, tenant="a")
        for call in (llm.pins.add, llm.pins.publish, llm.monitor.explain, llm.monitor.subscribe):
            with pytest.raises(ArgumentError, match="expected a cache that shares prefixes"):
                call([1, 2, 3])
        assert "token" in llm.monitor.report()
