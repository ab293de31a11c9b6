"""The connector's two sides under a double of vLLM whose memory shows which tokens each block was computed from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_vllm import FakeRequest, FakeVllm, layout_of
from support.fake_vllm import open_side as open_connected_side
from support.faulty_tier import FaultyTier

from quire.connect.vllm.scheduler_side import SchedulerSide
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.host import HostTier
from quire.tiers.segment import segment_tokens
from quire.tiers.tier import Tier

SIZE = 4

_SIDES: list[SchedulerSide] = []


@pytest.fixture(autouse=True)
def _close_sides() -> Iterator[None]:
    """No thread of a stack outlives its test."""
    yield
    while _SIDES:
        _SIDES.pop().stack.close()


def open_side(*arguments: Any, **options: Any) -> SchedulerSide:
    _SIDES.append(open_connected_side(*arguments, **options))
    return _SIDES[-1]


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def run_one(tier: Tier, request: FakeRequest, **options: object) -> FakeRequest:
    """In a vLLM of its own, with these tiers."""
    engine = FakeVllm(open_side([tier], SIZE, **options), num_blocks=64, block_size=SIZE)
    engine.add(request)
    engine.run()
    engine.side.stack.flush()
    return request


def test_another_vllm_finds_the_whole_blocks_of_a_prompt() -> None:
    tier = HostTier(1 << 20)
    prompt = prompt_of(1, 42)
    assert run_one(tier, FakeRequest("a", prompt)).num_loaded == 0
    assert run_one(tier, FakeRequest("b", prompt)).num_loaded == 40
    assert run_one(tier, FakeRequest("c", [*prompt[:30], 5000, 5001])).num_loaded == 28


def test_the_last_token_is_always_computed() -> None:
    tier = HostTier(1 << 20)
    run_one(tier, FakeRequest("a", prompt_of(1, 40)))
    assert run_one(tier, FakeRequest("b", prompt_of(1, 40))).num_loaded == 36


def test_the_output_of_a_request_is_found_as_the_prompt_of_the_next() -> None:
    tier = HostTier(1 << 20)
    first = run_one(tier, FakeRequest("a", prompt_of(1, 21), max_tokens=20))
    assert first.num_tokens == 41
    assert run_one(tier, FakeRequest("b", [*first.all_token_ids, 7])).num_loaded == 40


def test_prompts_of_several_segments_survive_a_restart(tmp_path: Path) -> None:
    num_tokens = segment_tokens(layout_of(), SIZE) + 3 * SIZE
    prompt = prompt_of(2, num_tokens + 1)
    engine_blocks = 2 * (num_tokens // SIZE + 2)
    for name, expected in (("a", 0), ("b", num_tokens)):
        side = open_side([DiskTier(tmp_path, 256 << 20)], SIZE, workers=2)
        side._segment_tokens = 256  # else the double would take minutes
        engine = FakeVllm(side, num_blocks=engine_blocks, block_size=SIZE, step_tokens=700)
        request = FakeRequest(name, prompt[: 4 * 256 + 3 * SIZE + 1])
        engine.add(request)
        engine.run(10**6)
        side.close()
        assert request.num_loaded == min(expected, 4 * 256 + 3 * SIZE)


def test_salts_adapters_and_images_keep_prompts_apart(tmp_path: Path) -> None:
    tier, prompt = HostTier(1 << 20), prompt_of(3, 33)
    (tmp_path / "adapter.safetensors").write_bytes(b"one")
    adapter = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=9))
    kinds = [
        {},
        {"cache_salt": "x"},
        {"cache_salt": "y"},
        {"lora_request": adapter},
        {"mm_features": [image]},
    ]
    for kind in kinds:
        loaded = run_one(tier, FakeRequest("a", prompt, **kind)).num_loaded
        assert loaded == (8 if "mm_features" in kind else 0)  # the blocks before the image are the same
    for kind in kinds:
        assert run_one(tier, FakeRequest("b", prompt, **kind)).num_loaded == 32


def test_another_file_under_an_adapters_path_is_another_adapter(tmp_path: Path) -> None:
    tier = HostTier(1 << 20)
    for content in (b"one", b"two"):
        (tmp_path / "adapter.safetensors").write_bytes(content)
        adapter = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
        assert run_one(tier, FakeRequest("a", prompt_of(3, 33), lora_request=adapter)).num_loaded == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_read_their_own_tokens(seed: int) -> None:
    """Few blocks, aborts, preemptions, chunks, several vLLMs in turn over tiers that are too small, or fail."""
    chance = random.Random(seed)
    tier = FaultyTier(HostTier(chance.choice((6000, 40_000, 1 << 20))), every=chance.choice((0, 0, 3)))
    texts = [prompt_of(chance.randrange(4), 60) for _ in range(6)]
    num_workers = chance.choice((1, 1, 3))
    for _ in range(2):
        side = open_side(
            [tier],
            SIZE,
            workers=chance.choice((0, 2)),
            num_workers=num_workers,
            **({"salt_quota": 9000} if chance.random() < 0.3 else {}),
        )
        side._segment_tokens = 16
        engine = FakeVllm(
            side,
            num_blocks=chance.choice((24, 48)),
            block_size=SIZE,
            step_tokens=chance.choice((7, 23, 1000)),
            split=chance.choice((1, 2)),
            num_workers=num_workers,
        )
        for number in range(30):
            cut = chance.randrange(1, 60)
            salt = chance.choice((None, None, "x"))
            engine.add(
                FakeRequest(f"r{number}", texts[number % 6][:cut], chance.randrange(1, 12), cache_salt=salt)
            )
            for _ in range(chance.randrange(4)):
                engine.step()
            if engine.running and chance.random() < 0.2:
                engine.end(chance.choice(engine.running))
            if len(engine.running) > 1 and chance.random() < 0.2:
                engine.preempt(chance.choice(engine.running))
            if engine.waiting and chance.random() < 0.1:
                engine.end(chance.choice(engine.waiting))
        engine.run(10**5)
        assert len(engine._free) == len(engine._memory[0])
        assert not side._requests
        assert not side._saving
        side.stack.flush()


def test_damaged_and_missing_values_are_computed_again() -> None:
    inner = HostTier(1 << 20)
    prompt = prompt_of(1, 42)
    run_one(inner, FakeRequest("a", prompt))
    keys = list(inner._entries)
    inner.evict(keys[5])
    assert run_one(inner, FakeRequest("b", prompt)).num_loaded == 20
    entry = inner._entries[keys[2]]
    damaged = bytearray(entry.value)
    damaged[-3] ^= 1
    entry.value = memoryview(bytes(damaged))
    assert run_one(inner, FakeRequest("c", prompt)).num_loaded == 8
    assert run_one(inner, FakeRequest("d", prompt)).num_loaded == 40  # stored again


def test_a_tier_that_fails_is_a_miss() -> None:
    tier = HostTier(1 << 20)
    run_one(tier, FakeRequest("a", prompt_of(1, 42)))
    assert run_one(FaultyTier(tier, every=1), FakeRequest("b", prompt_of(1, 42))).num_loaded == 0


def test_a_request_waits_no_longer_than_it_may() -> None:
    tier = HostTier(1 << 20)
    run_one(tier, FakeRequest("a", prompt_of(1, 42)))
    seconds = iter(range(0, 10**6, 3))
    side = open_side([tier], SIZE, max_wait_s=5, clock=lambda: next(seconds))
    side.stack.load = lambda chain, **keywords: SimpleNamespace(cancel=lambda: True)  # type: ignore[method-assign]
    engine = FakeVllm(side, num_blocks=64, block_size=SIZE)
    request = FakeRequest("b", prompt_of(1, 42))
    engine.add(request)
    engine.run()
    assert request.num_loaded == 0
    assert len(engine.ended) == 1


def test_loads_that_wait_take_no_more_than_load_memory() -> None:
    tier = HostTier(1 << 20)
    for seed in range(4):
        run_one(tier, FakeRequest("a", prompt_of(seed, 41)))
    side = open_side([tier], SIZE, load_memory=layout_of().num_bytes(90))
    requests = [FakeRequest(f"b{seed}", prompt_of(seed, 41)) for seed in range(4)]
    assert [side.num_stored_tokens(request, 0) for request in requests] == [40, 40, None, None]
    side.end(requests[0], [])
    assert [side.num_stored_tokens(request, 0) for request in requests[1:]] == [40, 40, None]


def test_a_producer_only_stores_and_a_consumer_only_loads() -> None:
    tier, prompt = HostTier(1 << 20), prompt_of(1, 41)
    run_one(tier, FakeRequest("a", prompt), writes=False)
    assert not tier._entries
    run_one(tier, FakeRequest("b", prompt))
    assert run_one(tier, FakeRequest("c", prompt), reads=False).num_loaded == 0
    assert run_one(tier, FakeRequest("d", prompt), writes=False).num_loaded == 40


def test_after_a_reset_nothing_that_was_stored_is_found() -> None:
    tier, prompt = HostTier(1 << 20), prompt_of(1, 41)
    run_one(tier, FakeRequest("a", prompt))
    side = open_side([tier], SIZE)
    side.reset()
    assert side.num_stored_tokens(FakeRequest("b", prompt), 0) == 0


def test_a_salt_keeps_no_more_than_its_quota() -> None:
    tier = HostTier(1 << 20)
    quota = layout_of().num_bytes(60)
    side = open_side([tier], SIZE, salt_quota=quota)
    engine = FakeVllm(side, num_blocks=400, block_size=SIZE)
    for seed in range(5):
        engine.add(FakeRequest(f"r{seed}", prompt_of(seed, 41), max_tokens=1, cache_salt="x"))
        engine.add(FakeRequest(f"q{seed}", prompt_of(seed, 13), max_tokens=1, cache_salt=f"y{seed}"))
    engine.run()
    side.stack.flush()
    root = side._roots["x", None]
    kept = [info for _, info in tier.contents([root])]
    assert sum(layout_of().num_bytes(len(info.tokens) // 4) for info in kept) <= quota
    assert min(info.start for info in kept) == 0
    assert all(len(tier.contents([side._roots[f"y{seed}", None]])) == 3 for seed in range(5))
    # Of an earlier process: counted when the salt is used again.
    again = open_side([tier], SIZE, salt_quota=layout_of().num_bytes(20))
    engine = FakeVllm(again, num_blocks=64, block_size=SIZE)
    engine.add(FakeRequest("z", prompt_of(9, 9), max_tokens=1, cache_salt="x"))
    engine.run()
    again.stack.flush()
    kept = [info for _, info in tier.contents([root])]
    assert sum(len(info.tokens) // 4 for info in kept) <= 20


def test_a_request_whose_prompt_is_not_tokens_alone_is_left_to_vllm() -> None:
    tier = HostTier(1 << 20)
    request = FakeRequest("a", prompt_of(1, 42), prompt_embeds=np.zeros(3))
    run_one(tier, request)
    assert not tier._entries
    assert run_one(tier, FakeRequest("b", prompt_of(1, 42), skip_reading_prefix_cache=True)).num_loaded == 0


def test_parameters_for_another_connector_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    side = open_side([HostTier(1 << 20)], SIZE)
    for name in ("a", "b"):
        request = FakeRequest(name, prompt_of(1, 42), kv_transfer_params={"do_remote_prefill": True})
        assert side.num_stored_tokens(request, 0) == 0
    assert caplog.text.count("kv_transfer_params") == 1
