"""A slow tier costs requests at most a share of what computing takes; loads and look-ups not made are counted."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny_llm
from support.tiers_case import Clock

from quire import LLM, SamplingParams
from quire.offload.throughputs import Throughputs
from quire.offload.tier_budget import TierBudget
from quire.tiers.by_url import register, unregister
from quire.tiers.host import HostTier

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def budget() -> tuple[TierBudget, Throughputs]:
    speeds = Throughputs()
    return TierBudget(speeds), speeds


def test_look_ups_cost_a_share_of_computing() -> None:
    account, speeds = budget()
    waited = 0.0
    for _ in range(1000):
        speeds.add_computation(100, 0.1)
        if account.may_look_up("remote", 0.05):
            account.add_look_up("remote", 0.05)
            waited += 0.05
    assert 0.02 * 100 <= waited <= 0.02 * 100 + 1.0 + 0.05
    assert account.may_look_up("host", 0.05)  # each tier has an account of its own


def test_quick_look_ups_are_free_and_saved_time_pays_for_slow_ones() -> None:
    account, _ = budget()
    for _ in range(100_000):
        assert account.may_look_up("disk", 0.0009)
        account.add_look_up("disk", 0.0009)
    account.add_look_up("remote", 5.0)
    assert not account.may_look_up("remote", 0.05)
    account.add_load("remote", 0.5, 6000)  # computing takes 6 s
    assert account.may_look_up("remote", 0.05)


def test_a_slow_load_is_tried_again_once_it_is_paid_for() -> None:
    account, speeds = budget()
    assert not account.may_try("remote", 0.4)
    for _ in range(10):
        speeds.add_computation(1000, 1.0)
    assert account.may_try("remote", 0.15)
    account.add_load("remote", 1.15, 1000)
    assert not account.may_try("remote", 0.15)


def test_a_long_time_of_savings_pays_for_no_long_time_of_losses() -> None:
    account, _ = budget()
    account.add_load("remote", 0.0, 10**9)
    account.add_look_up("remote", 10.5)
    assert not account.may_look_up("remote", 0.1)


class DelayedTier(HostTier):
    """Each answer takes `delay_s` of a clock that nothing else moves."""

    name = "remote"
    delay_s = 0.0
    clock = Clock()
    num_lookups = num_loads = 0

    def contains(self, keys: Any) -> list[bool]:
        DelayedTier.num_lookups += 1
        self.clock.now += self.delay_s
        return super().contains(keys)

    def load(self, key: bytes) -> memoryview | None:
        DelayedTier.num_loads += 1
        self.clock.now += self.delay_s
        return super().load(key)


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> Any:
    tier = DelayedTier(1 << 24)
    monkeypatch.setattr(tier, "close", lambda: None)  # the next engine has its values
    monkeypatch.setattr(DelayedTier, "num_lookups", 0)
    monkeypatch.setattr(DelayedTier, "num_loads", 0)
    register("delayed", lambda url: tier)
    yield tier
    unregister("delayed")


def test_an_engine_asks_a_slow_tier_less_and_counts_it(
    delayed: DelayedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed, "delay_s", 0.2)
    with tiny_llm.llm(remote_cache="delayed://") as llm:
        wanted = ask(llm, delayed, 40)
        stats = llm.stats()["tiers"]["remote"]
    assert stats["not_asked"] >= 35
    assert DelayedTier.num_lookups <= 5
    assert stats["failures"] == 0
    with tiny_llm.llm() as llm:
        assert ask(llm, delayed, 40) == wanted


def ask(llm: LLM, tier: DelayedTier, count: int) -> list[list[int]]:
    """Answers to prompts that share nothing; the tier's delays are the stack's only time."""
    if llm.tiers is not None:
        llm.tiers.stack.clock = tier.clock
        for worker in llm.tiers.stack._tiers:
            worker._clock = tier.clock
    prompts = [[(7 * i + 11 * number) % 200 + 5 for i in range(60)] for number in range(count)]
    return [list(llm.generate([prompt], ONE)[0].outputs[0].token_ids) for prompt in prompts]
