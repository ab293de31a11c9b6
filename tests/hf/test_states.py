"""States of a QuireCache: limited by `kv_memory`, forked, selected, given back; and steps without room for them."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support import state_layers
from support.hf_case import STORAGES, model_of, quire_cache
from transformers import DynamicCache

from quire.errors import ArgumentError, CapacityError
from quire.hf import QuireCache

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(5))


def _run(model: Any, cache: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{state_layers.keyword_of(model): cache}, use_cache=True).logits


def _states(cache: QuireCache) -> list[torch.Tensor]:
    return [state.clone() for layer in cache.state_layers for _, _, state in layer.tensors()]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _state_bytes(cache: QuireCache) -> int:
    return sum(layer.state_bytes for layer in cache.state_layers)


@pytest.fixture(scope="module")
def mamba() -> Any:
    return state_layers.tiny_model("mamba2")


@pytest.mark.parametrize("storage", STORAGES)
def test_states_count_and_their_memory_goes_back(mamba: Any, storage: str) -> None:
    cache = quire_cache(mamba, storage)
    memory = cache.memory
    _run(mamba, cache)
    one = _state_bytes(cache)
    assert one > 0
    assert cache.used_bytes == one
    fork = cache.fork()
    assert cache.used_bytes == 2 * one
    fork.batch_repeat_interleave(3)
    assert cache.used_bytes == 4 * one
    cache.reset()
    assert fork.used_bytes == 3 * one
    assert not cache.has_previous_state()
    del fork
    gc.collect()
    assert memory.used_bytes == 0
    assert torch.equal(_run(mamba, cache), _run(mamba, DynamicCache(config=mamba.config)))


@pytest.mark.parametrize("storage", ["virtual", "growing"])
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_a_first_step_whose_states_do_not_fit_leaves_the_cache_empty(name: str, storage: str) -> None:
    model = state_layers.tiny_model(name)
    whole = quire_cache(model, storage)
    _run(model, whole)
    for less in (_state_bytes(whole) - 1, 100):
        cache = quire_cache(model, storage, kv_memory=max(less, 1))
        with pytest.raises(
            CapacityError, match=r"the states of layer \d to fit into kv_memory of .* more; raise"
        ):
            _run(model, cache)
        assert cache.used_bytes == 0
        assert _states(cache) == []


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="older models ask for their masks and states otherwise",
)
def test_a_recorded_step_that_does_not_fit_changes_nothing() -> None:
    model = model_of("lfm2")
    cache = quire_cache(model, "growing", kv_memory="200KiB")
    cache.activate_past_recording()
    _run(model, cache)
    before, used = _states(cache), cache.used_bytes
    for many in (900, 210):  # no room for the states, and then none for the rows
        with pytest.raises(CapacityError):
            _run(model, cache, torch.randint(3, 60, (2, many)))
        assert cache.used_bytes == used
        assert cache.get_seq_length() == 9
        assert _same(_states(cache), before)
    twin = DynamicCache(config=model.config)
    twin.activate_past_recording()
    for one in (cache, twin):
        one is twin and _run(model, one)
        _run(model, one, IDS[:, :3])
        one.crop(-2)
    assert _state_bytes(cache) == sum(layer.charge.num_bytes for layer in cache.state_layers)
    assert torch.equal(_run(model, cache), _run(model, twin))


def test_a_crop_beyond_what_a_state_has_recorded_changes_nothing() -> None:
    model = model_of("lfm2")
    cache = quire_cache(model)
    _run(model, cache)
    cache.activate_past_recording()
    _run(model, cache, IDS[:, :3])
    before = _states(cache)
    with pytest.raises(ArgumentError, match="at most the 3 tokens that the state of layer 0 has recorded"):
        cache.crop(-4)
    assert _same(_states(cache), before)
    cache.crop(-3)
    assert cache.get_seq_length() == 9


def test_a_fork_without_room_for_its_states_changes_nothing(mamba: Any) -> None:
    whole = quire_cache(mamba)
    _run(mamba, whole)
    for storage in STORAGES:
        cache = quire_cache(mamba, storage, kv_memory=_state_bytes(whole) * 2)
        _run(mamba, cache)
        fork, before = cache.fork(), _states(cache)
        with pytest.raises(CapacityError, match="a fork's own states of 2 layers to fit into kv_memory"):
            cache.fork()
        with pytest.raises(CapacityError, match="4 rows of the states of layer 0"):
            cache.batch_repeat_interleave(2)
        assert _same(_states(cache), before)
        assert cache.used_bytes == 2 * _state_bytes(whole)
        fork.reset()
        assert _same(_states(cache.fork()), before)


def test_a_fork_of_an_empty_cache_goes_on_recording_the_past() -> None:
    for name in ("lfm2", "gemma3_text", "falcon_h1"):
        cache = quire_cache(model_of(name))
        cache.activate_past_recording()
        fork = cache.fork()
        assert [layer.record_past for layer in fork.layers] == [layer.record_past for layer in cache.layers]
        assert all(layer.record_past for layer in fork.layers)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_rows_of_states_are_chosen(name: str) -> None:
    model = state_layers.tiny_model(name)
    cache, twin = quire_cache(model), DynamicCache(config=model.config)
    order = torch.tensor([1, 0, 1])
    logits = []
    for one, choose in ((cache, cache.batch_select_indices), (twin, twin.reorder_cache)):
        _run(model, one)
        choose(order)
        logits.append(_run(model, one, torch.tensor([[4], [5], [6]])))
    assert torch.equal(*logits)


def test_what_cannot_be_put_into_a_state_is_refused(mamba: Any) -> None:
    cache = quire_cache(mamba)
    with pytest.raises(ArgumentError, match=r"without a gradient in layer 0 .*no_grad"):
        mamba(IDS, **{state_layers.keyword_of(mamba): cache}, use_cache=True)
    _run(mamba, cache)
    before = _states(cache)
    with pytest.raises(
        ArgumentError, match=r"expected conv_states \[2, \d+, tokens\] in layer 0 .* got \[1, "
    ):
        cache.update_conv_state(before[0][:1, :, :1], 0)
    with pytest.raises(ArgumentError, match=r"expected recurrent_states \[2, "):
        cache.update_recurrent_state(torch.zeros(1, 4, 3, 3), 0)
    assert _same(_states(cache), before)


# Faults.


class _Faults:
    """Lets the n-th allocation for states, or the n-th count of them, fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.num_failed = 0
        for name in ("torch.zeros", "torch.Tensor.clone", "torch.Tensor.index_select", "torch.cat"):
            real: Callable[..., Any] = getattr(
                torch.Tensor if "Tensor" in name else torch, name.split(".")[-1]
            )
            monkeypatch.setattr(name, self._faulty(real, RuntimeError("can't allocate memory: a test")))

    def watch(self, cache: QuireCache) -> None:
        memory: Any = cache.memory
        memory.take_state = self._faulty(memory.take_state, CapacityError("no room: a test"))

    def _faulty(self, real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.num_failed += 1
                raise error
            return real(*args, **kwargs)

        return call


def _steps(cache: QuireCache, num_tokens: int) -> None:
    draw = torch.Generator().manual_seed(num_tokens)
    for layer in cache.state_layers:
        cache.update_conv_state(
            torch.randn(2, 6, num_tokens, generator=draw), layer.index, conv_kernel_size=4
        )
        if "conv" not in cache.config.layer_types:
            cache.update_recurrent_state(torch.randn(2, 5, 3, generator=draw), layer.index)
    for layer in cache.row_layers:
        k = torch.randn(2, 2, num_tokens, 16, generator=draw)
        cache.update(k, k, layer.index)


@pytest.mark.parametrize("storage", ["virtual", "growing"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba2"])
def test_every_allocation_that_fails_leaves_what_was_or_an_empty_cache_or_one_that_says_so(
    name: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = state_layers.tiny_model(name)
    calls: list[Callable[[QuireCache], Any]] = [
        lambda cache: _steps(cache, 7),
        lambda cache: _steps(cache, 2),
        lambda cache: cache.fork(),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    ]
    faults = _Faults(monkeypatch)
    for number, call in enumerate(calls):
        at = 1
        while True:
            faults.left = 0
            cache = quire_cache(model, storage)
            if number == 1 and name == "lfm2":
                cache.activate_past_recording()
            if number:
                _steps(cache, 7)
            before, used = _states(cache), cache.used_bytes
            faults.watch(cache)
            faults.left, failed = at, faults.num_failed
            try:
                call(cache)
            except CapacityError:
                pass
            else:
                if failed != faults.num_failed:
                    pytest.fail(f"call {number} went on behind failure {at}")
            faults.left = 0
            if failed == faults.num_failed:
                break
            if number == 0:
                assert cache.used_bytes == 0
            else:
                assert cache._broken or (cache.used_bytes == used and _same(_states(cache), before))
                assert number != 2 or not cache._broken
            counted = sum(layer.charge.num_bytes for layer in cache.state_layers)
            assert counted >= _state_bytes(cache)
            cache.reset()
            assert cache.used_bytes == 0
            _steps(cache, 7)
            assert _same(_states(cache), before) or number == 0
            at += 1
        assert at > 1


# Threads.


@pytest.mark.parametrize("storage", ["virtual", "growing"])
def test_forks_in_threads_have_their_own_states_under_one_limit(storage: str) -> None:
    model = state_layers.tiny_model("lfm2")
    root = quire_cache(model, storage, max_length=64)
    _steps(root, 20)
    right, used, limit = _states(root), root.used_bytes, root.memory.limit_bytes
    want = root.fork()
    _steps(want, 3)
    want_states = _states(want)
    del want
    gc.collect()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(15):
                fork = root.fork()
                if rng.random() < 0.5:
                    fork.batch_repeat_interleave(2)
                    fork.batch_select_indices(torch.tensor([0, 2]))
                _steps(fork, 3)
                assert _same(_states(fork), want_states)
                assert root.used_bytes <= limit
                if rng.random() < 0.5:
                    fork.reset()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    gc.collect()
    assert root.used_bytes == used
    assert _same(_states(root), right)


# Files.


def test_states_alone_are_saved_without_naming_the_model(mamba: Any, tmp_path: Path) -> None:
    cache = quire_cache(mamba)
    with pytest.raises(ArgumentError, match="a filled cache"):
        cache.save(tmp_path / "cache")
    _run(mamba, cache)
    cache.save(tmp_path / "cache")
    for storage in STORAGES:
        options = {"storage": storage, "max_length": 64}
        loaded = QuireCache.load(tmp_path / "cache", mamba, kv_memory=_state_bytes(cache), **options)
        assert loaded.used_bytes == _state_bytes(cache)
        with pytest.raises(CapacityError, match="the saved states of layer 1"):
            QuireCache.load(tmp_path / "cache", mamba, kv_memory=_state_bytes(cache) - 1, **options)
        assert torch.equal(_run(mamba, loaded, IDS[:, :1]), _run(mamba, cache.fork(), IDS[:, :1]))


def test_a_recorded_state_is_saved_as_the_next_step_needs_it(tmp_path: Path) -> None:
    model = model_of("lfm2")
    for num_tokens in (1, 9):
        cache, plain = quire_cache(model), quire_cache(model)
        cache.activate_past_recording()
        for one in (cache, plain):
            _run(model, one, IDS[:, :num_tokens])
        cache.save(tmp_path / "cache")
        loaded = QuireCache.load(tmp_path / "cache", model, storage="growing")
        assert _same(_states(loaded), _states(plain))
        assert torch.equal(_run(model, loaded, IDS), _run(model, plain, IDS))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="older models ask for their masks and states otherwise",
)
def test_a_model_that_keeps_its_states_itself_cannot_be_saved(tmp_path: Path) -> None:
    model = state_layers.tiny_model("recurrent_gemma")
    cache = quire_cache(model)
    _run(model, cache)
    with pytest.raises(
        ArgumentError, match=r"expected states in every state layer, got none in layers \[0\]"
    ):
        cache.save(tmp_path / "cache", model)
    assert list(tmp_path.iterdir()) == []
