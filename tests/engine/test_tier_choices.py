"""The choice of content for tiers and of loads from them: by cache priority, by cost, within quotas and floors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens

from quire import SamplingParams
from quire.cache.block_hash import root_key
from quire.offload.store import POLICIES, Policy
from quire.tiers.host import HostTier
from quire.tiers.segment_key import chain_keys

BLOCK = 4


def prompt(first: int, length: int = 32) -> list[int]:
    return [first, *((i * i + 3 * i + first) % 90 for i in range(length - 1))]


def serve(engine: FakeEngine, tokens: list[int], num_tokens: int = 1, **options: Any) -> Any:
    request_id = engine.submit(tokens, SamplingParams(max_tokens=num_tokens), **options)
    output = engine.run()[request_id]
    if "tenant" not in options:
        assert output.outputs[0].token_ids == expected_tokens(engine.spec, tokens, num_tokens)
    return output


def spans(engine: FakeEngine, tier: HostTier, tokens: list[int], segment_blocks: int = 2) -> list[int]:
    """How the tier keeps what it has of these tokens."""
    root = root_key(b"a model", b"")

    names = chain_keys(root, np.array(tokens), segment_blocks * BLOCK, BLOCK)
    return [tier._entries[name.hash].cache_priority for name in names if name.hash in tier._entries]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_to_be_discarded_is_stored_in_no_tier_and_what_is_to_be_kept_goes_last(
    policy: Policy,
) -> None:
    tier = HostTier(1 << 20)
    engine = FakeEngine(num_blocks=12, tiers=[tier], policy=policy)
    for first, cache_priority in enumerate(("discard", "normal", "keep")):
        serve(engine, prompt(first), cache_priority=cache_priority)
    assert engine.stores is not None
    engine.stores.store_all()
    assert spans(engine, tier, prompt(0)) == []
    assert spans(engine, tier, prompt(1)) == [1] * 4
    assert spans(engine, tier, prompt(2)) == [2] * 4
    assert serve(engine, prompt(2)).num_cached_tokens == 31
    # In the tier too: of these, normal ones go for normal ones, and what is kept stays.
    value = next(iter(tier._entries.values())).value.nbytes
    tier.max_bytes = 6 * value
    for first in range(10, 16):
        serve(engine, prompt(first))
    engine.stores.store_all()
    assert spans(engine, tier, prompt(2)) == [2] * 4
    assert spans(engine, tier, prompt(1)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_later_use_decides_too(policy: Policy) -> None:
    """What one request would have thrown away another one uses, and a third one keeps."""
    tier = HostTier(1 << 20)
    engine = FakeEngine(num_blocks=24, tiers=[tier], policy=policy)
    serve(engine, prompt(0), cache_priority="discard")
    serve(engine, prompt(1))
    serve(engine, prompt(0, 16))
    serve(engine, prompt(1, 16), cache_priority="keep")
    assert engine.stores is not None
    engine.stores.store_all()
    # The last token of a prompt is computed again, in a block of its own: the fourth is used by nobody else.
    assert spans(engine, tier, prompt(0), 2)[:1] == [1]
    assert 2 in spans(engine, tier, prompt(1), 2)
    serve(engine, prompt(0), cache_priority="keep")
    for first in range(10, 16):
        serve(engine, prompt(first))
    engine.stores.store_all()
    assert spans(engine, tier, prompt(0)) == [2] * 4


@pytest.mark.parametrize(("estimate_s", "is_loaded"), [(10.0, True), (1000.0, False)])
def test_what_takes_less_time_is_done_load_or_compute(
    estimate_s: float, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(num_blocks=12, tiers=[HostTier(1 << 20)], policy="through")
    serve(engine, prompt(0))
    engine.cache.reset()
    asked: list[tuple[int, str | None]] = []

    def estimate(num_bytes: int, tier: str | None = None, num_segments: int = 1) -> float:
        asked.append((num_bytes, tier))
        return estimate_s

    assert engine.stack is not None
    monkeypatch.setattr(engine.stack, "estimate_seconds", estimate)
    monkeypatch.setattr(engine.engine._speeds, "compute_s", lambda num_tokens: 1.0 * num_tokens)
    output = serve(engine, prompt(0), 3)
    assert output.num_tier_tokens == ({"host": 31} if is_loaded else {})
    assert asked == [(32 * engine.spec.bytes_per_token, "host")]


@pytest.mark.parametrize(("known", "is_loaded"), [(0, True), (24, False)])
def test_only_what_memory_lacks_counts(known: int, is_loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tier, the same prompt: what would be worth loading whole is not for its last tokens."""
    engine = FakeEngine(num_blocks=12, tiers=[HostTier(1 << 20)], policy="through")
    serve(engine, prompt(0))
    engine.cache.reset()
    assert engine.stack is not None
    monkeypatch.setattr(engine.stack, "estimate_seconds", lambda num_bytes, tier=None, num_segments=1: 10.0)
    monkeypatch.setattr(engine.engine._speeds, "compute_s", lambda num_tokens: 1.0 * num_tokens)
    if known:
        serve(engine, prompt(0, known + 1)[:known])
    output = serve(engine, prompt(0))
    assert bool(output.num_tier_tokens) == is_loaded


def test_a_load_that_its_own_quota_forbids_delays_nobody_else() -> None:
    engine = FakeEngine(num_blocks=40, tiers=[HostTier(1 << 20)], policy="through", max_num_seqs=8)
    tenants, block_id = engine.engine.tenants, engine.cache.block_bytes
    tenants.add("small", quota=9 * block_id)
    tenants.add("large")
    own, other = prompt(1, 24), prompt(2, 120)
    serve(engine, own, tenant="small")
    serve(engine, other, tenant="large")
    engine.cache.reset()
    one, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=16)
    engine.submit(prompt(3, 17), long, tenant="small")
    engine.step()
    waits = engine.submit(own, one, tenant="small")
    passes = engine.submit(other, one, tenant="large")
    while passes not in engine.outputs:
        engine.step()
        owner_id = engine.cache.owner_counts(tenants["small"].owner_id)
        assert owner_id.held + owner_id.cached <= 9
    assert waits not in engine.outputs
    assert engine.outputs[passes].num_tier_tokens == {"host": 119}
    assert engine.run()[waits].num_tier_tokens == {"host": 23}


def test_a_load_leaves_the_floors_of_others_alone() -> None:
    engine = FakeEngine(num_blocks=40, tiers=[HostTier(1 << 20)], policy="through", max_num_seqs=8)
    tenants, block_id = engine.engine.tenants, engine.cache.block_bytes
    tenants.add("large")
    other = prompt(2, 120)
    serve(engine, other, tenant="large")
    engine.cache.reset()
    tenants.add("small", floor=8 * block_id)
    kept = prompt(5)
    serve(engine, kept, tenant="small")
    first = engine.submit(prompt(3, 17), SamplingParams(max_tokens=12))
    engine.step()
    waits = engine.submit(other, SamplingParams(max_tokens=1), tenant="large")
    while first not in engine.outputs:
        # It needs 30 blocks of 40, of which 8 are another's floor and 5 or more are taken.
        assert not engine.scheduler.loading
        assert waits not in engine.outputs
        engine.step()
    assert engine.run()[waits].num_tier_tokens == {"host": 119}
    assert serve(engine, kept, tenant="small").num_cached_tokens == 31
