"""A QuireCache in a device's memory, under a model accelerated there: the tokens of `DynamicCache`, in every mode.

On `support.fake_device`, where K or V that anything but the device reads are NaN, and what it writes is lost. A forward
that is none of Quire's is refused there, so tokens that come are the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_argument import CACHE
from support.fake_device import FakeDevice, OnDevice, registered
from support.hf_case import MODES, as_lists, expected, model_of, prompts, quire_cache
from transformers import DynamicCache, PreTrainedModel

from quire.errors import ArgumentError, CapacityError
from quire.hf import QuireCache, accelerate, restore
from quire.memory.device_buffer import DeviceBuffer, read, write
from quire.memory.device_memory import HOST, HostMemory

STORAGES = ("growing", "contiguous")


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with registered() as made:
        yield made


@contextmanager
def accelerated(name: str, backend: str = "fake") -> Iterator[PreTrainedModel]:
    model = model_of(name)
    done = accelerate(model, backend=backend)
    try:
        assert done.level == "whole", done.reason
        yield model
    finally:
        restore(model)


def cache_of(model: PreTrainedModel, storage: str = "growing", **options: Any) -> QuireCache:
    return quire_cache(model, storage, backend="fake", max_length=64, **options)


def kept(cache: Any) -> list[torch.Tensor]:
    return [tensor.clone() for k, v, _ in cache for tensor in (k, v)]


@pytest.mark.parametrize(
    ("name", "storage", "modes"),
    [("llama", "growing", list(MODES)), ("gemma3_text", "contiguous", ["beams", "chunks"])],
)
def test_every_mode(name: str, storage: str, modes: list[str], device: FakeDevice) -> None:
    """Chunks of a padded batch among them, where a row may have nothing but padding yet."""
    wanted = {mode: expected(name, mode) for mode in modes}
    with accelerated(name) as model:
        for mode, tokens in wanted.items():
            assert as_lists(MODES[mode](model, lambda: cache_of(model, storage))) == tokens, mode
    for call in ("write", "run", "multiply", "gather", "scatter", "to_host"):
        assert device.calls[call] > 0, call


def test_the_reference_kernels_run_steps_too() -> None:
    """This machine's memory, without the extension's kernels."""
    tokens = expected("qwen3", "greedy")
    with accelerated("qwen3", "python") as model:
        for options in ({}, {"backend": "python"}, {"storage": "growing"}):
            assert as_lists(MODES["greedy"](model, lambda o=options: quire_cache(model, **o))) == tokens


def test_buffers_that_grow_are_copied_by_the_device(device: FakeDevice) -> None:
    """Past their room of 128 tokens, where the window's leave their first tokens behind."""
    model = model_of("gemma3_text")
    steps = torch.randint(3, 120, (3, 2, 90), generator=torch.Generator().manual_seed(5))
    twin = DynamicCache(config=model.config)
    with torch.no_grad():
        want = [model(ids, **{CACHE: twin}).logits for ids in steps]
        with accelerated("gemma3_text"):
            cache = quire_cache(model, "growing", backend="fake", max_length=None)
            got = [model(ids, **{CACHE: cache}).logits for ids in steps]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert device.calls["gather"] > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_logits_and_keys_are_those_of_the_model(storage: str, device: FakeDevice) -> None:
    model, (ids, mask) = model_of("qwen3"), prompts()
    twin: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, **{CACHE: twin}).logits
        with accelerated("qwen3"):
            cache: Any = cache_of(model, storage)
            got = model(ids, attention_mask=mask, **{CACHE: cache}).logits
    assert type(got) is torch.Tensor
    real = mask.bool()
    torch.testing.assert_close(got[real], want[real], atol=1e-4, rtol=0)
    for (k, v, _), (k_twin, v_twin, _) in zip(cache, twin, strict=True):
        for ours, theirs in ((k, k_twin), (v, v_twin)):
            seen = real[:, None, :, None].expand_as(theirs)
            torch.testing.assert_close(ours[seen], theirs[seen], atol=1e-4, rtol=0)
            assert not ours[~seen].any()  # padding, which another attention may multiply by nothing


@pytest.mark.parametrize("storage", STORAGES)
def test_forks_are_copies_of_their_own(storage: str, device: FakeDevice) -> None:
    ids = prompts()[0]
    with accelerated("llama") as model, torch.no_grad():
        cache: Any = cache_of(model, storage)
        model(ids, **{CACHE: cache})
        before = kept(cache)
        fork = cache.fork()
        model(ids, **{CACHE: fork})
        assert fork.get_seq_length() == 2 * ids.shape[1]
        assert all(map(torch.equal, kept(cache), before))
        fork.reset()
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert all(torch.equal(now, was[[2, 0, 0]]) for now, was in zip(kept(cache), before, strict=True))
        cache.batch_select_indices(torch.tensor([1, 0]))
        assert all(torch.equal(now, was[[0, 2]]) for now, was in zip(kept(cache), before, strict=True))
        cache.reset()
        assert cache.used_bytes == 0
        del fork, cache
    assert device.free_bytes() == device.total_bytes()  # it is given back at once


def test_a_file_goes_from_device_to_host_and_back(device: FakeDevice, tmp_path: Path) -> None:
    ids, mask = prompts()
    options = {"max_new_tokens": 6, "do_sample": False}
    model: Any = model_of("gemma3_text")
    twin = DynamicCache(config=model.config)
    first = model.generate(ids, attention_mask=mask, **{CACHE: twin}, **options)
    mask = torch.cat([mask, torch.ones(3, 6, dtype=mask.dtype)], dim=1)
    want = model.generate(first, attention_mask=mask, **{CACHE: twin}, **options)
    with accelerated("gemma3_text"):
        cache = cache_of(model)
        assert torch.equal(
            model.generate(ids, attention_mask=mask[:, :-6], **{CACHE: cache}, **options), first
        )
        cache.save(tmp_path / "one.kv")
    host = QuireCache.load(tmp_path / "one.kv", model)
    assert all(map(torch.equal, kept(host), kept(cache)))
    host.save(tmp_path / "two.kv")
    with accelerated("gemma3_text"):
        there = QuireCache.load(
            tmp_path / "two.kv", model, storage="contiguous", max_length=64, backend="fake"
        )
        assert torch.equal(model.generate(first, attention_mask=mask, **{CACHE: there}, **options), want)
    assert torch.equal(model.generate(first, attention_mask=mask, **{CACHE: host}, **options), want)


def test_a_step_that_does_not_fit_changes_nothing(device: FakeDevice) -> None:
    ids = prompts()[0]
    with accelerated("llama") as model, torch.no_grad():
        cache = cache_of(model, kv_memory="256KiB")
        model(ids, **{CACHE: cache})
        before, used = kept(cache), cache.used_bytes
        with pytest.raises(CapacityError, match="max_length=64"):
            model(ids.repeat(1, 3), **{CACHE: cache})
        with pytest.raises(CapacityError, match="raise kv_memory"):
            cache.fork()
        assert cache.used_bytes == used
        assert all(map(torch.equal, kept(cache), before))
        larger = QuireCache(model.config, storage="contiguous", max_length=1 << 18, backend="fake")
        with pytest.raises(CapacityError, match="the fake device has"):
            model(ids, **{CACHE: larger})
        assert larger.used_bytes == 0


def test_tokens_need_the_devices_copies(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: rows reordered past the device are lost, and beams differ."""
    tokens = expected("llama", "beams")
    monkeypatch.setattr(device, "copy_pieces", HostMemory().copy_pieces)
    with accelerated("llama") as model:
        assert as_lists(MODES["beams"](model, lambda: cache_of(model))) != tokens


def test_a_forward_of_the_models_own_is_refused(device: FakeDevice) -> None:
    ids, mask = prompts()
    hole = mask.clone()
    hole[1, 4] = 0
    with accelerated("llama") as model, torch.no_grad():
        cache = cache_of(model)
        model(ids, **{CACHE: cache})
        before, used = kept(cache), cache.used_bytes
        for options in ({"output_hidden_states": True}, {"attention_mask": torch.cat([mask, hole], dim=1)}):
            with pytest.raises(ArgumentError, match="got a forward of the model's own"):
                model(ids, **{CACHE: cache}, **options)
        with pytest.raises(ArgumentError, match="got a forward of the model's own"):
            cache.update(torch.ones(3, 2, 1, 16), torch.ones(3, 2, 1, 16), 0)
        assert cache.get_seq_length() == ids.shape[1]
        assert cache.used_bytes == used
        assert all(map(torch.equal, kept(cache), before))
        # Another cache is served by the model's own forward, on linear layers packed for the device.
        multiplied = device.calls["multiply"]
        model(ids, **{CACHE: DynamicCache(config=model.config)})
        assert device.calls["multiply"] > multiplied
        with pytest.raises(ArgumentError, match="which runs the model, reads"):
            model(ids, **{CACHE: quire_cache(model)})
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"accelerate\(model, backend='fake'\)"):
        model(ids, **{CACHE: cache_of(model)})
    if accelerate(model).level == "whole":  # by the extension
        with torch.no_grad(), pytest.raises(ArgumentError, match="make it without backend="):
            model(ids, **{CACHE: cache_of(model)})
    restore(model)


def test_storages_and_names(device: FakeDevice) -> None:
    model = model_of("llama")
    with pytest.raises(ArgumentError, match='"growing" or "contiguous" on backend'):
        cache_of(model, "virtual")
    for call in (lambda: accelerate(model, backend="fast"), lambda: quire_cache(model, backend="fast")):
        with pytest.raises(ArgumentError, match="got 'fast' - in `backend`"):
            call()
    with accelerated("llama"):
        assert accelerate(model) is accelerate(model, backend="fake")
        with pytest.raises(ArgumentError, match=r"expected backend 'fake'.* got 'python'; restore"):
            accelerate(model, backend="python")


def test_a_model_that_runs_in_part_gets_the_devices_linear_layers(device: FakeDevice) -> None:
    model = model_of("deepseek_v3")
    want = expected("deepseek_v3", "greedy")
    try:
        assert accelerate(model, backend="fake").level == "linears"
        assert device.weights
        assert as_lists(MODES["greedy"](model, lambda: DynamicCache(config=model.config))) == want
        assert as_lists(MODES["greedy"](model, lambda: quire_cache(model))) == want
        with pytest.raises(ArgumentError, match='level="whole"'):
            MODES["greedy"](model, lambda: cache_of(model))
    finally:
        restore(model)


def test_bytes_are_moved_by_the_device_alone(device: FakeDevice) -> None:
    buffer = DeviceBuffer(device, 24)
    rows = buffer.tensor.view(4, 6)
    payload = torch.arange(6, dtype=torch.uint8).view(3, 2)
    for part in (rows[1:, 2:4], rows[:3, :2], rows[0], rows[:0, :2]):
        sent = payload[: len(part)] if part.dim() == 2 else payload.view(-1)
        write(device, part, sent)
        assert (rows == 0xFF).all()  # addresses
        assert torch.equal(read(device, part), sent)
    buffer.close()
    assert device.free_bytes() == device.total_bytes()
    here = DeviceBuffer(HOST, 6).tensor
    write(HOST, here, payload.view(-1))
    assert read(HOST, here) is here  # no copy
    assert not isinstance(here, OnDevice)
