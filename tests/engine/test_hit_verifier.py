"""`verify_hits`: damage in memory and in each tier is found, told and removed; without damage there is no alarm."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_llm
from support.architectures import randomize, tiny
from support.damage import change_value, damage_memory, verify
from support.every_type import build
from support.loading_pays import loading_pays  # noqa: F401
from support.state_layers import FAMILIES, tiny_model
from support.until import until
from transformers import AutoModelForCausalLM

from quire import LLM, AsyncEngine, SamplingParams
from quire.cache.block_hash import root_key
from quire.engine import hit_verifier
from quire.errors import ArgumentError
from quire.memory.placement import unsupported_reason
from quire.tiers.segment_key import segment_keys

pytest.importorskip("quire._native")

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
PROMPT = [(7 * j) % 90 + 5 for j in range(61)]
NEXT = [*PROMPT, 3, 4]
STORAGES: list[dict[str, Any]] = [{"storage": "paged"}]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})


def of_model(name: str, **options: Any) -> LLM:
    """A tiny model of an architecture, or of a family with states, that checks every hit."""
    if name in FAMILIES:
        model = tiny_model(name)
    else:
        model = tiny(name)
        randomize(model)
    defaults: dict[str, Any] = {"kv_memory": "4MiB", "max_batch_tokens": 64, "max_num_seqs": 8}
    return LLM((model, None), **{**defaults, **options})


CASES: dict[str, dict[str, Any]] = {
    "full": {"name": "qwen3", "block_size": 4},
    "codes": {"name": "qwen3", "kv_dtype": "int8"},
    "windows": {"name": "gemma2", "block_size": 4},
    "chunked": {"name": "llama4_text", "block_size": 4},
    "latents": {"name": "deepseek_v3", "block_size": 4},
    "states": {"name": "qwen3_5_text", "block_size": 4},
}


def answer(llm: LLM, tokens: list[int], **options: Any) -> Any:
    [output] = llm.generate([tokens], GREEDY, **options)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("storage", STORAGES, ids=lambda one: one["storage"])
@pytest.mark.parametrize("case", CASES)
def test_damage_in_memory_is_found_where_it_is(
    case: str, storage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = {**CASES[case], **storage}
    if storage["storage"] == "virtual":
        options.pop("block_size", None)
    draw = random.Random(case)
    with of_model(verify_hits=1, **options) as llm:
        cold = answer(llm, PROMPT)
        cold_next = answer(llm, NEXT)
        assert verify(llm) == {"equal": 1}
        [output] = llm.generate([NEXT], GREEDY)
        num_hit = output.num_cached_tokens
        assert verify(llm) == {"equal": 2}
        layers = [number for number, layer in enumerate(llm.cache.spec.layers) if layer.stores_kv]
        layer = draw.choice(layers)
        # With windows and chunks only the last tokens are in every group.
        position = num_hit - 1 - draw.randrange(3 if case in ("windows", "chunked") else num_hit - 1)
        block = damage_memory(llm, NEXT, position, layer, num_hit)
        llm.generate([NEXT], GREEDY)
        assert verify(llm) == {"equal": 2, "different": 1}
        [text] = alarms(caplog)
        assert f"block {block}, from memory" in text
        assert f"token {position} of {num_hit}, layer {layer};" in text
        found = llm.cache.match([*NEXT, 0]).num_tokens
        assert found <= position
        assert answer(llm, NEXT) == cold_next
        assert answer(llm, PROMPT) == cold
        assert verify(llm).get("different") == 1
        assert llm.stats()["held"] == 0


def test_damage_of_codes_scales_and_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    """One bit of any byte of a token counts."""
    with of_model("qwen3", kv_dtype="int8", verify_hits=1) as llm:
        answer(llm, PROMPT)
        cold = answer(llm, NEXT)
        storage, cache = llm._opened.storage, llm.cache
        per_token = cache.spec.bytes_per_token
        draw = random.Random(1)
        for count in range(1, 9):
            byte = draw.randrange(per_token)

            def change(byte: int = byte) -> None:
                sequence = cache.open([*PROMPT[:10], 0])
                table = np.asarray([sequence.block_table(0)[:1]])
                payload = storage.read_blocks(table, 10)
                payload[byte * 10 + 3] ^= 1
                storage.write_blocks(table, payload, 10)
                cache.close(sequence)

            llm.driver.call(change)
            llm.generate([NEXT], GREEDY)
            assert verify(llm)["different"] == count
            assert answer(llm, NEXT) == cold
    assert len(alarms(caplog)) == 8


@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("mamba2", marks=pytest.mark.ci)])
def test_a_damaged_state_is_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with of_model(name, verify_hits=1) as llm:
        answer(llm, PROMPT)
        cold = answer(llm, NEXT)
        [output] = llm.generate([NEXT], GREEDY)
        num_hit = output.num_cached_tokens
        assert num_hit > 0
        before = verify(llm)
        assert set(before) == {"equal"}
        layer = llm.cache.spec.states[-1].layer

        def change() -> None:
            [checkpoint] = [one for one in llm.cache.checkpoints if one.num_tokens == num_hit]  # type: ignore[attr-defined]
            states = llm._opened.storage.states
            payload = states.read(checkpoint.slot)
            payload[-4] ^= 1
            states.write(checkpoint.slot, payload)

        llm.driver.call(change)
        llm.generate([NEXT], GREEDY)
        assert verify(llm)["different"] == 1
        [text] = alarms(caplog)
        assert "the state, from memory" in text
        assert f"token {num_hit - 1} of {num_hit}, layer {layer};" in text
        assert answer(llm, NEXT) == cold


@contextmanager
def tier_options(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    if name == "host":
        yield {"host_cache": "1MiB"}
    elif name == "disk":
        yield {"disk_cache": folder / "disk", "disk_cache_size": "64MiB"}
    else:
        from support.redis_server import redis_server

        with redis_server(folder) as url:
            yield {"remote_cache": url}


@pytest.mark.parametrize("tier", ["host", "disk", "remote"])
def test_damage_in_a_tier_is_found_and_removed_there(
    tier: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        tier_options(tier, tmp_path) as options,
        tiny_llm.llm(block_size=4, verify_hits=1, **options) as llm,
    ):
        llm.tenants.add("alice")
        answer(llm, PROMPT, tenant="alice")
        cold = answer(llm, NEXT, tenant="alice")
        other = answer(llm, [*NEXT[:40], *range(50, 70)], tenant="alice")
        verify(llm)
        llm.flush()
        tiers = llm.tiers
        assert tiers is not None
        [worker] = tiers.stack._tiers
        [namespace] = llm.tenants.namespaces_of("alice")
        root = root_key(tiers.fingerprint, namespace)
        keys = segment_keys(root, np.asarray(NEXT[:60], np.int32), 4)
        change_value(llm, worker.tier, keys[5], layer=1, token=2)
        llm.trim()
        [output] = llm.generate([NEXT], GREEDY, tenant="alice")
        num_hit = output.num_cached_tokens
        assert output.num_tier_tokens == {tier: num_hit}
        assert verify(llm)["different"] == 1
        [text] = alarms(caplog)
        assert re.fullmatch(
            rf"a cached hit differs from its tokens computed again: block \d+, from {tier}, tenant 'alice', owner 1, "
            rf"token 22 of {num_hit}, layer 1; \d+ blocks and what tiers have behind that token are dropped, the next "
            "request computes them",
            text,
        )
        assert worker.tier.contains([key.hash for key in keys]) == [True] * 5 + [False] * 10
        [output] = llm.generate([NEXT], GREEDY, tenant="alice")
        assert output.num_cached_tokens == 20
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == cold
        llm.trim()
        assert answer(llm, [*NEXT[:40], *range(50, 70)], tenant="alice") == other
        assert verify(llm)["different"] == 1, "no other branch brings it back"


@pytest.mark.parametrize("num_calls", [12, pytest.param(600, marks=pytest.mark.ci)])
@pytest.mark.parametrize("window", [0, 16])
def test_random_traffic_without_damage_raises_no_alarm(
    window: int, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks, partial blocks, hits from tiers, preemption, a small pool: every bit is equal. In CI thousands of hits."""
    monkeypatch.setattr(hit_verifier, "_MAX_WAITING", 1000)
    draw = random.Random(window)
    heads = [[draw.randrange(5, 200) for _ in range(60)] for _ in range(4)]
    with tiny_llm.llm(
        window=window, block_size=4, kv_memory="256KiB", host_cache="4MiB", verify_hits=1, max_batch_tokens=48
    ) as llm:
        for _ in range(num_calls):
            prompts = [
                draw.choice(heads)[: draw.randrange(1, 60)] + [draw.randrange(5, 200)] * draw.randrange(1, 9)
                for _ in range(draw.randrange(1, 9))
            ]
            params = SamplingParams(
                max_tokens=12, temperature=1.0, n=draw.randrange(1, 3), seed=1, ignore_eos=True
            )
            llm.generate(prompts, params)
            verify(llm)
            if draw.random() < 0.3:
                llm.trim()
        counts = verify(llm)
        assert counts["equal"] > 20
        assert not {"different", "failed", "not_checked"} & set(counts), counts
        assert llm.stats()["held"] == 0


def held_verifier(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The verifier, which the driver no longer calls: the test does."""
    verifier: Any = llm.engine.verifier
    monkeypatch.setattr(llm.driver, "_idle_steps", None)
    monkeypatch.setattr(hit_verifier, "_PIECE_S", 0.0)  # pieces of 16 tokens
    return verifier


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_a_check_that_is_interrupted_after_each_piece_holds_nothing(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_model(verify_hits=1, **CASES[case]) as llm:
        verifier = held_verifier(llm, monkeypatch)
        answer(llm, PROMPT)
        answer(llm, NEXT)
        before = llm.stats()
        num_free = before["free"]

        def piece_and_release() -> None:
            verifier.step()
            assert llm.cache.stats()["held"] > 0 or not verifier.has_step
            verifier.release()
            assert llm.cache.stats()["held"] == 0
            assert llm.cache.stats()["free"] == num_free
            llm.cache.check()

        num_pieces = 0
        while verifier.has_step and num_pieces < 20:
            llm.driver.call(piece_and_release)
            num_pieces += 1
        counts = verify(llm)
        if case != "states":  # which begin at a checkpoint: there may be none before the hit's own
            assert num_pieces == 4
            assert counts == {"equal": 1}
        after = llm.stats()
        assert after["evicted_blocks"] == before["evicted_blocks"] == 0
        assert after.get("short_hits") == before.get("short_hits")


def test_a_request_waits_for_at_most_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver computes no second piece after a command has come."""
    with tiny_llm.llm(verify_hits=1) as llm:
        verifier: Any = llm.engine.verifier
        monkeypatch.setattr(hit_verifier, "_PIECE_S", 0.0)
        order: list[str] = []
        step = verifier.step

        def request() -> None:
            assert llm.cache.stats()["held"] == 0
            order.append("request")

        def piece() -> None:
            order.append("piece")
            step()
            assert llm.cache.stats()["held"] > 0 or not verifier.has_step
            if order.count("piece") == 2:
                llm.driver.post(request)  # as if it had come while the piece was computed

        monkeypatch.setattr(verifier, "step", piece)
        answer(llm, PROMPT)
        answer(llm, NEXT)
        until(lambda: sum(verifier.stats()["verified_hits"].values()))
        assert order == ["piece", "piece", "request", "piece", "piece"]
        assert verify(llm) == {"equal": 1}


def test_no_room_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llm.llm(verify_hits=1, block_size=4, kv_memory="64KiB", max_num_seqs=1) as llm:
        verifier = held_verifier(llm, monkeypatch)
        number = 0
        while llm.cache.stats()["free"] > 2:
            answer(llm, [5 + number, *PROMPT])
            number += 1
        before = llm.stats()
        answer(llm, [4 + number, *PROMPT])
        evicted = llm.stats()["evicted_blocks"]
        assert verifier.has_step
        assert verify(llm) == {"no_room": 1}
        after = llm.stats()
        assert (after["held"], after["evicted_blocks"]) == (0, evicted)
        assert after["cached"] >= before["cached"] - 2


def test_a_check_of_a_long_hit_takes_the_blocks_of_a_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the whole recomputation it continues on the proved blocks."""
    with tiny_llm.llm(verify_hits=1, block_size=4, kv_memory="128KiB", max_num_seqs=1) as llm:
        verifier = held_verifier(llm, monkeypatch)
        long = [(3 * j) % 190 + 5 for j in range(200)]
        answer(llm, long)
        answer(llm, [*long, 7])
        num_blocks = -(-len(long) // 4)
        free = llm.cache.stats()["free"]
        assert 6 <= free < num_blocks, "else this tests nothing"
        assert verify(llm) == {"equal": 1}
        assert verifier.stats()["num_verified_tokens"] == len(long)


def test_a_full_cache_is_checked_in_withheld_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that hold content stay as they are; the budget keeps its bytes, also over a resize."""
    with (
        tiny_llm.llm(block_size=4, kv_memory="1MiB") as other,
        tiny_llm.llm(block_size=4, kv_memory="1MiB", verify_hits=1) as llm,
    ):
        num_spare = other.num_blocks - llm.num_blocks
        assert num_spare == 64 // 4 + 1
        assert llm.kv_memory_bytes == other.kv_memory_bytes
        for kv_memory in ("1MiB", "1.5MiB", "1MiB"):
            other.resize(kv_memory)
            llm.resize(kv_memory)
            assert other.num_blocks - llm.num_blocks == num_spare
        held_verifier(llm, monkeypatch)
        number = 0
        while llm.cache.stats()["free"]:
            answer(llm, [5 + number, *PROMPT])
            number += 1
        answer(llm, [5 + number, *PROMPT])
        tail = [4 + number, *PROMPT]
        llm.generate([tail], SamplingParams(max_tokens=1))
        before = llm.stats()
        assert before["free"] <= 1
        assert verify(llm) == {"equal": 1}
        after = llm.stats()
        for name in ("evicted_blocks", "cached", "free", "held", "num_blocks"):
            assert after[name] == before[name], name


def test_content_that_is_gone_and_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_verifier, "_MAX_WAITING", 2)
    with tiny_llm.llm(verify_hits=1) as llm:
        held_verifier(llm, monkeypatch)
        for _ in range(4):
            answer(llm, PROMPT)
        llm.trim()
        assert verify(llm) == {"evicted": 2, "not_checked": 1}


def test_an_error_of_the_model_ends_the_check_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_llm.llm(verify_hits=1) as llm:
        verifier = held_verifier(llm, monkeypatch)
        cold = answer(llm, PROMPT)
        answer(llm, PROMPT)

        def fail(_: Any) -> None:
            raise RuntimeError("no forward today")

        with monkeypatch.context() as patch:
            patch.setattr(verifier._runner, "run", fail)
            assert verify(llm) == {"failed": 1}
        assert "no forward today" in caplog.text
        assert answer(llm, PROMPT) == cold
        assert verify(llm) == {"failed": 1, "equal": 1}
        assert llm.stats()["held"] == 0


def test_pinned_damage_goes_with_its_pin(caplog: pytest.LogCaptureFixture) -> None:
    with tiny_llm.llm(verify_hits=1) as llm:
        llm.pins.add(PROMPT)
        cold = answer(llm, NEXT)
        verify(llm)
        damage_memory(llm, PROMPT, 20, 0)
        llm.generate([NEXT], GREEDY)
        assert verify(llm)["different"] == 1
        assert ", 1 pins are dropped" in alarms(caplog)[0]
        assert not list(llm.pins)
        assert answer(llm, NEXT) == cold


def test_a_changed_model_is_no_alarm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llm.model()
    with LLM((model, tiny_llm.tokenizer()), kv_memory="2MiB", verify_hits=1) as llm:
        held_verifier(llm, monkeypatch)
        answer(llm, PROMPT)
        answer(llm, NEXT)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert verify(llm) == {"evicted": 1}
        assert not alarms(caplog)


def test_one_hit_in_n_is_chosen() -> None:
    with tiny_llm.llm(verify_hits=4) as llm:
        for _ in range(41):
            llm.generate([PROMPT], SamplingParams(max_tokens=1))
            verify(llm)
        assert 2 <= verify(llm)["equal"] <= 25


def test_close_in_the_middle_of_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llm.llm(verify_hits=1) as llm:
        verifier = held_verifier(llm, monkeypatch)
        answer(llm, PROMPT)
        answer(llm, NEXT)
        llm.driver.call(verifier.step)
        assert verifier._check.computed is not None
        cache = llm.cache
    assert cache.stats()["held"] == 0


def test_an_async_engine_checks_its_hits_by_itself() -> None:
    async def run() -> dict[str, int]:
        async with AsyncEngine(
            (tiny_llm.model(), tiny_llm.tokenizer()), kv_memory="2MiB", verify_hits=1
        ) as engine:
            for _ in range(2):
                async for _ in engine.generate(PROMPT, GREEDY):
                    pass
            while not sum((counts := (await engine.stats())["verified_hits"]).values()):
                await asyncio.sleep(0.01)
            return counts

    counts = asyncio.run(asyncio.wait_for(run(), 120))
    assert {name: count for name, count in counts.items() if count} == {"equal": 1}


def test_off_there_is_no_verifier() -> None:
    with tiny_llm.llm() as llm:
        assert llm.engine.verifier is None
        assert "verified_hits" not in llm.stats()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "python"}, "got backend 'python'"),
        ({"prefix_caching": False}, "prefix_caching"),
        ({"storage": "contiguous"}, "contiguous does not use it"),
        ({"verify_hits": -1}, "verify_hits"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_where_it_cannot_be_obeyed_it_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as refused:
        tiny_llm.llm(**{"verify_hits": 1, **options})
    assert "verify_hits" in str(refused.value)


def test_a_model_by_its_own_forward_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"its own forward .*`verify_hits`"):
        LLM((build(AutoModelForCausalLM, "gpt_neo"), None), kv_memory="4MiB", verify_hits=1)
