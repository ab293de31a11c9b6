"""A device with private memory gives the tokens of `model.generate`, in every way of serving.

Cold, hit, in chunks, preempted and swapped out and in, restored from a disk after a restart: on `support.fake_device`,
where K or V that anything above the device reads itself are NaN, and what it writes there is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_run import EngineRun
from support.fake_device import FakeDevice, OnDevice, registered
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected

from quire import LLM, KVSpec, SamplingParams
from quire.devices import device_of
from quire.errors import ArgumentError, CapacityError
from quire.memory.device_memory import HostMemory
from quire.memory.paged import PagedStorage

NAMES = ["qwen3", "gemma3_text", pytest.param("deepseek_v3", marks=pytest.mark.ci)]
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with registered() as made:
        yield made


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def open_llm(name: str, **options: Any) -> LLM:
    options = {"kv_memory": "4MiB", "block_size": 4, "max_batch_tokens": 11, "max_num_seqs": 4} | options
    return LLM((expected(name)[0], None), backend="fake", **options)


@pytest.mark.parametrize("name", NAMES)
def test_cold_chunked_hit_and_swapped(name: str, device: FakeDevice) -> None:
    """Prompts of up to 41 tokens in steps of 11: with room to share what begins alike, and with room for one."""
    model, tokens, logits = expected(name)
    for room in (8.0, 1.0):
        run = EngineRun(
            model, PROMPTS, MAX_TOKENS, backend="fake", room=room, preemption="swap", swap_memory="4MiB"
        )
        with run.llm:
            answers = run.answer()
            stats = run.llm.stats()
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)
        if room == 1.0:
            assert stats["num_swapped"] > 0
            assert stats["num_restored_tokens"] > 0
        else:
            assert sum(answer.num_cached_tokens for answer in answers) > 0
    for call in ("write", "run", "multiply", "gather", "scatter", "copy_blocks"):
        assert device.calls[call] > 0, call


@pytest.mark.parametrize("name", NAMES)
def test_restored_from_a_disk(name: str, device: FakeDevice, tmp_path: Path) -> None:
    _, tokens, _ = expected(name)
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with open_llm(name, **options) as llm:
        assert tokens_of(llm, PROMPTS) == tokens
    gathered = device.calls["gather"]
    assert gathered > 0
    with open_llm(name, **options) as llm:
        assert tokens_of(llm, [PROMPTS[3]]) == [tokens[3]]
        assert llm.stats()["num_loaded_tokens"] > 0
    assert device.calls["scatter"] > 0


def test_swapped_tokens_need_the_devices_copies(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: payloads read and written past the device are garbage, and tokens differ."""
    model, tokens, _ = expected("qwen3")
    host = HostMemory()
    monkeypatch.setattr(device, "copy_pieces", host.copy_pieces)
    run = EngineRun(
        model, PROMPTS, MAX_TOKENS, backend="fake", room=1.0, preemption="swap", swap_memory="4MiB"
    )
    with run.llm:
        outputs = run.llm.generate(PROMPTS, GREEDY)
        assert run.llm.stats()["num_restored_tokens"] > 0
    assert [output.outputs[0].token_ids for output in outputs] != tokens


def test_a_block_copied_past_the_device_is_lost(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = PagedStorage(
        KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32"), 3, 4, device=device
    )
    view = storage.view(1)
    device.write(view, torch.ones(4, 1, 4), torch.ones(4, 1, 4), torch.arange(4))
    assert view.k.isnan().all()
    storage.copy([[0, 1, 3]])
    before = storage.read_blocks([[1]], 3).view(np.float32)
    assert (before[24:] == 1).all()  # of layer 1: K of 3 tokens, V of 3 tokens
    monkeypatch.setattr(device, "copy_blocks", HostMemory().copy_blocks)
    storage.copy([[0, 2, 3]])
    assert np.isnan(storage.read_blocks([[2]], 3).view(np.float32)).all()
    storage.close()


def test_what_the_model_computes_is_not_for_the_host() -> None:
    logits = torch.ones(2, 3).as_subclass(OnDevice) + 1
    for look in (OnDevice.numpy, OnDevice.data_ptr, OnDevice.tolist, np.asarray):
        with pytest.raises(AssertionError, match="looked at from the host"):
            look(logits)


def test_budget_and_storages_are_the_devices(device: FakeDevice) -> None:
    with pytest.raises(CapacityError, match="free to this process"):
        open_llm("qwen3", kv_memory="1GiB")
    for storage in ("virtual", "contiguous", "growing"):
        with pytest.raises(ArgumentError, match='expected storage="paged" on backend'):
            open_llm("qwen3", storage=storage)
    with open_llm("qwen3", storage="auto", kv_memory="50%") as llm:
        assert llm.stats()["kv_memory_bytes"] <= device.total_bytes() // 2
        llm.resize("1MiB")
        llm.trim()
        assert tokens_of(llm, PROMPTS) == expected("qwen3")[1]
        llm.cache.check()


def test_a_name_is_registered_once(device: FakeDevice) -> None:
    assert device_of("fake") is device
    with pytest.raises(ArgumentError, match="expected a new name"), registered():
        pass
    with pytest.raises(
        ArgumentError, match=r"back end, one of \['fake', 'native', 'python', 'torch', 'triton'\], got 'fast'"
    ):
        device_of("fast")
