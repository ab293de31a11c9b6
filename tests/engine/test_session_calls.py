"""`llm.sessions`: hold, release, demote, prefetch and superseded give receipts, change no token, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.cache_case import BACKENDS
from support.faulty_tier import FaultyTier

from quire import LLM, AsyncEngine, SamplingParams
from quire.errors import ArgumentError
from quire.sessions.session import SessionReceipt
from quire.tiers.host import HostTier

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
SMALL_POOL: dict[str, Any] = {"kv_memory": "192KiB", "max_num_seqs": 2}  # 24 blocks of 16 tokens


def tokens_of(seed: int, n: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, n).tolist()


def turn(llm: LLM, prompt: list[int], session: str | None = None, **more: Any) -> tuple[list[int], Any]:
    """Prompt and answer; and what must not change: tokens and, on the exact back end, the bits of their scores."""
    [output] = llm.generate([prompt], GREEDY, session=session, **more)
    [answer] = output.outputs
    return prompt + answer.token_ids, (
        answer.token_ids,
        answer.logprobs if llm.cache.backend == "native" else None,
    )


def others(llm: LLM, num: int = 8, **more: Any) -> None:
    """More content than the pool has room for."""
    for seed in range(num):
        turn(llm, tokens_of(100 + seed), **more)


def cold(prompt: list[int], **options: Any) -> Any:
    with tiny_llm.llm(prefix_caching=False, **options) as llm:
        return turn(llm, prompt)[1]


def num_cached(llm: LLM, prompt: list[int]) -> int:
    return llm.generate([prompt], GREEDY)[0].num_cached_tokens


@pytest.fixture(params=BACKENDS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with tiny_llm.llm(backend=request.param, host_cache="4MiB", cache_write="eviction", **SMALL_POOL) as made:
        yield made


# Holds


def test_a_held_path_survives_all_others_and_the_hold_moves_with_it(llm: LLM) -> None:
    path, _ = turn(llm, tokens_of(1), "s")
    receipt = llm.sessions.hold("s")
    assert (receipt.outcome, receipt.reason, receipt.until_s) == ("accepted", None, None)
    assert receipt.tokens == {"memory": len(path) - 1}
    assert receipt.num_bytes["memory"] == 5 * llm.cache.block_bytes
    others(llm)
    assert num_cached(llm, [*path, 7]) == len(path) - 1
    longer, answer = turn(llm, [*path, 7, 8], "s")
    assert answer == cold([*path, 7, 8], backend=llm.cache.backend)
    assert llm.sessions.get("s").num_held_tokens == len(longer) - 1
    assert len(llm.pins) == 1
    others(llm)
    assert llm.sessions.get("s").num_memory_tokens == len(longer) - 1
    assert llm.sessions.release("s").outcome == "accepted"
    others(llm)
    assert llm.sessions.get("s").num_memory_tokens < len(longer) - 1
    assert not len(llm.pins)


def test_a_hold_ends_at_its_time() -> None:
    now = [0.0]
    with tiny_llm.llm(**SMALL_POOL) as llm:
        llm.between_steps(lambda: llm.engine.pins.use_clock(lambda: now[0]))
        turn(llm, tokens_of(1), "s")
        receipt = llm.sessions.hold("s", 30)
        assert receipt.until_s == 30
        now[0] = 29.0
        assert llm.sessions.get("s").held_s == pytest.approx(1)
        now[0] = 31.0
        turn(llm, tokens_of(2))
        assert not llm.sessions.get("s").is_held
        assert not len(llm.pins)


def test_a_hold_beyond_the_budget_keeps_the_longest_beginning() -> None:
    with tiny_llm.llm(pin_memory="24KiB", **SMALL_POOL) as llm:  # three blocks
        path, _ = turn(llm, tokens_of(1), "s")
        receipt = llm.sessions.hold("s")
        assert receipt.outcome == "clipped"
        assert receipt.reason is not None
        assert "pin_memory" in receipt.reason
        assert receipt.tokens == {"memory": 48}
        assert len(path) == 72
        second = llm.sessions
        turn(llm, tokens_of(2), "t")
        assert second.hold("t").outcome == "refused"
        assert not second.get("t").is_held


def test_a_hold_stays_within_the_quota() -> None:
    with tiny_llm.llm(tenant_secret=b"a secret of the server's", **SMALL_POOL) as llm:
        llm.tenants.add("a", quota="64KiB")
        for name in ("s", "t"):
            turn(llm, tokens_of(ord(name), 40), name, tenant="a")
            llm.sessions.hold(name, tenant="a")
        owner = llm.tenants["a"].owner_id
        assert llm.cache.pins.blocks_of(owner) <= llm.cache.max_owner_blocks(owner)
        assert llm.sessions.hold("s").outcome == "refused", "the session of no tenant is another one"


# Tiers


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_demoted_path_comes_back_bit_for_bit(backend: str, tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": backend, "host_cache": "4MiB", "disk_cache": tmp_path}
    with tiny_llm.llm(**options, **SMALL_POOL) as llm:
        path, _ = turn(llm, tokens_of(1), "s")
        receipt = llm.sessions.demote("s", tier)
        assert (receipt.outcome, receipt.reason) == ("accepted", None)
        assert receipt.tokens == {"memory": 0, tier: 64}
        assert receipt.num_bytes[tier] == 64 * llm.spec.bytes_per_token
        assert llm.stats()["cached"] == 0
        before = llm.stats()["num_computed_tokens"]
        back = llm.sessions.prefetch("s")
        assert (back.outcome, back.reason) == ("accepted", None)
        assert back.tokens == {"memory": 64, tier: 64}
        assert llm.stats()["num_computed_tokens"] == before, "a prefetch computes nothing"
        assert llm.stats()["held"] == 0
        [output] = llm.generate([[*path, 7]], GREEDY, session="s")
        assert (output.num_cached_tokens, output.num_tier_tokens) == (64, {})
        again = turn(llm, [*path, 7])[1]
    assert again == cold([*path, 7], backend=backend)


def test_a_demotion_leaves_what_others_need(llm: LLM) -> None:
    path, _ = turn(llm, tokens_of(1), "s")
    turn(llm, [*path[:40], 1, 2, 3])
    receipt = llm.sessions.demote("s")
    assert receipt.outcome == "clipped"
    assert receipt.reason is not None
    assert "stay in memory" in receipt.reason
    assert receipt.tokens == {"memory": 40, "host": 64}, "eight of them in the other prompt's last block"
    llm.sessions.hold("s")
    assert llm.sessions.demote("s").tokens["memory"] == 40
    turn(llm, [*path, 7], "s")


def test_a_tier_that_is_not_there_is_refused(llm: LLM) -> None:
    turn(llm, tokens_of(1), "s")
    before = llm.stats()["cached"]
    receipt = llm.sessions.demote("s", "disk")
    assert receipt == SessionReceipt("s", "demote", "refused", "expected one of the tiers host, got 'disk'")
    assert llm.stats()["cached"] == before
    with tiny_llm.llm(**SMALL_POOL) as alone:
        turn(alone, tokens_of(1), "s")
        assert alone.sessions.demote("s").outcome == "refused"
        assert alone.sessions.prefetch("s").outcome == "refused"


class FailingTier(FaultyTier):
    """fails: the kinds of calls that fail, from now on."""

    fails: frozenset[str] = frozenset()

    def _fails(self, kind: str) -> bool:
        return kind in self.fails


@pytest.mark.parametrize("kind", ["store", "contains"])
def test_a_tier_that_fails_at_a_demotion_loses_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tier = FailingTier(HostTier(4 << 20), 0)
    monkeypatch.setattr("quire.offload.open_tiers._host_tier", lambda _: tier)
    with tiny_llm.llm(host_cache="4MiB", **SMALL_POOL) as llm:
        path, _ = turn(llm, tokens_of(1), "s")
        tier.fails = frozenset({kind})
        receipt = llm.sessions.demote("s")
        assert receipt.outcome == "refused"
        assert receipt.reason is not None
        assert "the tier host has 0 of 64 tokens" in receipt.reason
        tier.fails = frozenset()
        assert num_cached(llm, [*path, 7]) == len(path) - 1


def test_a_tier_that_fails_at_a_prefetch_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FailingTier(HostTier(4 << 20), 0)
    monkeypatch.setattr("quire.offload.open_tiers._host_tier", lambda _: tier)
    with tiny_llm.llm(host_cache="4MiB", **SMALL_POOL) as llm:
        path, _ = turn(llm, tokens_of(1), "s")
        assert llm.sessions.demote("s").outcome == "accepted"
        tier.fails = frozenset({"load"})
        receipt = llm.sessions.prefetch("s")
        assert (receipt.outcome, llm.stats()["held"]) == ("refused", 0)
        tier.fails = frozenset()
        again = turn(llm, [*path, 7], "s")[1]
    assert again == cold([*path, 7])


def test_a_prefetch_without_room_takes_none_from_running_requests() -> None:
    with tiny_llm.llm(host_cache="4MiB", pin_memory="160KiB", **SMALL_POOL) as llm:
        turn(llm, tokens_of(1, 100), "s")
        llm.sessions.demote("s")
        for seed in range(4):
            turn(llm, tokens_of(10 + seed), f"h{seed}")
            llm.sessions.hold(f"h{seed}")
        receipt = llm.sessions.prefetch("s")
        assert receipt.outcome in ("clipped", "refused")
        assert receipt.reason is not None
        assert all(llm.sessions.get(f"h{seed}").num_held_tokens for seed in range(4))


# Superseded


def test_a_superseded_path_goes_first(llm: LLM) -> None:
    old, _ = turn(llm, tokens_of(1))
    path, _ = turn(llm, tokens_of(2), "s")
    receipt = llm.sessions.superseded("s")
    assert (receipt.outcome, receipt.tokens) == ("accepted", {"memory": len(path) - 1})
    others(llm, 3)
    stats = llm.stats()
    assert stats["sessions"]["receipts"] == {"superseded": {"accepted": 1}}
    assert llm.cache.match([*old, 7]).num_tokens == len(old) - 1
    assert llm.sessions.get("s").num_memory_tokens < len(path) - 1
    assert turn(llm, [*path, 7], "s")[1] == cold([*path, 7], backend=llm.cache.backend)


def test_another_sessions_path_is_not_superseded(llm: LLM) -> None:
    path, _ = turn(llm, tokens_of(1), "a")
    turn(llm, path[:40], "b")
    receipt = llm.sessions.superseded("a")
    assert receipt.outcome == "clipped"
    assert receipt.reason == "40 of 72 tokens are on another session's newest path"


# Names, arguments, threads


def test_an_unknown_session_is_refused_and_a_bad_argument_raises(llm: LLM) -> None:
    turn(llm, tokens_of(1), "s")
    calls = [
        llm.sessions.hold,
        llm.sessions.release,
        llm.sessions.demote,
        llm.sessions.prefetch,
        llm.sessions.superseded,
    ]
    for call in calls:
        receipt = call("other")
        assert (receipt.outcome, receipt.tokens) == ("refused", {})
        with pytest.raises(ArgumentError, match="expected a session's name"):
            call("")
        with pytest.raises(ArgumentError, match="expected a tenant"):
            call("s", tenant="unknown")
    for seconds in (0, -1, float("inf"), float("nan"), True, "1"):
        with pytest.raises(ArgumentError, match="in `seconds`"):
            llm.sessions.hold("s", seconds)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected a session"):
        llm.sessions.get("other")
    assert [info.session for info in llm.sessions.list()] == ["s"]
    assert llm.sessions.list()[0].num_requests == 1
    llm.sessions.tool_call_began("other")
    assert llm.stats()["sessions"]["receipts"]["hold"] == {"refused": 1}


def test_a_storage_that_shares_nothing_refuses_by_receipt() -> None:
    with tiny_llm.llm(storage="contiguous") as llm:
        turn(llm, tokens_of(1), "s")
        for call in (llm.sessions.hold, llm.sessions.demote, llm.sessions.superseded):
            assert call("s").outcome == "refused"
        llm.sessions.tool_call_began("s")


def test_an_async_engine_has_the_same_calls() -> None:
    async def run() -> None:
        async with AsyncEngine((tiny_llm.model(), tiny_llm.tokenizer()), **SMALL_POOL) as engine:
            async for _ in engine.generate(tokens_of(1), GREEDY, session="s"):
                pass
            assert (await asyncio.to_thread(engine.sessions.hold, "s")).outcome == "accepted"
            engine.sessions.tool_call_began("s")
            assert engine.sessions.get("s").kept_s is not None

    asyncio.run(run())
