"""Exhausted memory, failing calls and forks: only the requested change happens."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from support.cache_argument import CACHE
from support.faulty_calls import FaultyCalls
from support.hf_case import STORAGES, model_of, quire_cache

from quire.errors import ArgumentError, BackendError, CapacityError
from quire.hf import QuireCache, virtual
from quire.memory.placement import MappingBudget, MemfdBackend, PlacementHeap

HEADS, WIDTH = 2, 16


def _tokens(num_tokens: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, HEADS, num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def _contents(cache: QuireCache) -> list[torch.Tensor]:
    return [tensor.clone() for k, v, _ in cache for tensor in (k, v)]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_that_does_not_fit_changes_nothing(storage: str) -> None:
    # 2 rows, 2 layers, keys and values of 128 bytes a token: 1 KiB a token of the batch
    cache = quire_cache(model_of("llama"), storage, kv_memory="256KiB", max_length=256)
    ids = torch.randint(3, 131, (2, 90))
    model = model_of("llama")
    with torch.no_grad():
        model(ids, **{CACHE: cache}, use_cache=True)
        before, used = _contents(cache), cache.used_bytes
        with pytest.raises(CapacityError, match=r"256(KiB| tokens|,)"):
            model(torch.randint(3, 131, (2, 200)), **{CACHE: cache}, use_cache=True)
        assert cache.used_bytes == used
        assert _same(_contents(cache), before)
        model(torch.randint(3, 131, (2, 5)), **{CACHE: cache}, use_cache=True)
    assert cache.get_seq_length() == 95


@pytest.mark.parametrize("storage", STORAGES)
def test_a_prompt_that_does_not_fit_leaves_the_cache_empty(storage: str) -> None:
    model = model_of("gemma3_text")
    cache = quire_cache(
        model, storage, kv_memory="128KiB", max_length=64 if storage == "contiguous" else 4096
    )
    with pytest.raises(CapacityError):
        model.generate(torch.randint(3, 131, (3, 400)), **{CACHE: cache}, max_new_tokens=2)
    assert cache.used_bytes == 0
    assert cache.get_seq_length() == 0


def test_states_that_went_on_without_their_step_are_refused_until_reset() -> None:
    model = model_of("bamba")
    cache = quire_cache(model, "growing", kv_memory="64KiB")
    with torch.no_grad():
        model(torch.randint(3, 131, (1, 20)), **{CACHE: cache}, use_cache=True)
        k = torch.randn(1, 2, 400, 16)
        with pytest.raises(CapacityError):  # as an attention that asks for no mask would find it
            cache.update(k, k, 1)
        with pytest.raises(ArgumentError, match="reset"):
            model(torch.randint(3, 131, (1, 1)), **{CACHE: cache}, use_cache=True)
        cache.reset()
        model(torch.randint(3, 131, (1, 20)), **{CACHE: cache}, use_cache=True)
    assert cache.get_seq_length() == 20


def test_rows_longer_than_max_length_are_refused() -> None:
    for storage in STORAGES:
        cache = quire_cache(model_of("llama"), storage, max_length=32)
        cache.update(_tokens(32), _tokens(32), 0)
        with pytest.raises(CapacityError, match="max_length=32"):
            cache.update(_tokens(1), _tokens(1), 0)
        assert cache.get_seq_length() == 32


def test_less_memory_than_a_piece_of_each_layer_is_refused() -> None:
    cache = quire_cache(model_of("llama"), kv_memory="12KiB")
    with pytest.raises(CapacityError, match="piece"):
        cache.update(_tokens(1), _tokens(1), 0)
    for size in (100, "3KiB", "12KiB", "4MiB"):
        with pytest.raises(ArgumentError, match="piece size"):
            quire_cache(model_of("llama"), piece_size=size)


def test_a_machine_without_such_mappings_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "unsupported_reason", lambda: "it needs Linux, this is a test")
    with pytest.raises(BackendError, match="growing"):
        quire_cache(model_of("llama"))


def test_every_system_call_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FaultyCalls()
    backend = MemfdBackend(calls, MappingBudget(None))
    monkeypatch.setattr(virtual, "PlacementHeap", partial(PlacementHeap, backend=backend))
    model = model_of("gemma3_text")
    reached = 0
    for at in range(1, 60):
        calls.arm(0)
        cache = quire_cache(model)
        for layer in range(3):
            cache.update(_tokens(30), _tokens(30), layer)
        fork = cache.fork()
        before = _contents(cache)
        calls.arm(at, once=True)
        try:
            fork.update(_tokens(40, seed=1), _tokens(40, seed=1), 0)
        except CapacityError:
            reached += 1
            assert fork.get_seq_length() == 30
            assert _same(_contents(fork), before)
        calls.arm(0)
        assert _same(_contents(cache), before)
        for layer in range(3):
            if fork.layers[layer].length == 30:
                fork.update(_tokens(40, seed=1), _tokens(40, seed=1), layer)
        assert torch.equal(fork.layers[1].keys[:, :, -1], _tokens(40, seed=1)[:, :, -1])
        for heap in cache.memory._heaps.values():
            heap.check()
    assert reached >= 5


# Forks.


@pytest.mark.parametrize("storage", STORAGES)
def test_a_fork_and_its_origin_never_see_each_other(storage: str) -> None:
    cache = quire_cache(model_of("llama"), storage)
    for layer in (0, 1):
        cache.update(_tokens(45), _tokens(45), layer)
    before = _contents(cache)
    forks = [cache.fork() for _ in range(3)]
    poison = torch.full((2, HEADS, 50, WIDTH), float("nan"))
    forks[0].crop(-20)
    for layer in (0, 1):
        forks[0].update(poison, poison, layer)  # over what it shared, and beyond
    assert _same(_contents(cache), before)
    assert _same(_contents(forks[1]), before)
    for layer in (0, 1):
        cache.update(poison, poison, layer)
    assert _same(_contents(forks[1]), before)
    assert _same(_contents(forks[2].fork()), before)
    del cache, forks[0], forks[0]
    gc.collect()
    assert _same(_contents(forks[0]), before)


def test_a_fork_takes_no_memory_and_its_first_step_one_piece_a_layer_and_kind() -> None:
    cache = quire_cache(model_of("llama"))  # pieces of 32 tokens
    for layer in (0, 1):
        cache.update(_tokens(32 * 3 + 5, 1), _tokens(32 * 3 + 5, 1), layer)
    used = cache.used_bytes
    fork = cache.fork()
    assert cache.used_bytes == used
    for layer in (0, 1):
        fork.update(_tokens(1, 1), _tokens(1, 1), layer)
    assert cache.used_bytes == used + 2 * 2 * 4096


@pytest.mark.parametrize("storage", STORAGES)
def test_memory_goes_back(storage: str) -> None:
    cache = quire_cache(model_of("llama"), storage)
    memory = cache.memory
    cache.update(_tokens(45), _tokens(45), 0)
    fork = cache.fork()
    cache.reset()
    assert fork.get_seq_length() == 45
    held = fork.layers[0].keys
    fork_used = memory.used_bytes
    assert fork_used > 0
    expected = held.clone()
    del fork, cache
    gc.collect()
    assert torch.equal(held, expected)  # as long as somebody looks at it
    del held
    gc.collect()
    assert memory.used_bytes == 0
    for heap in getattr(memory, "_heaps", {}).values():
        assert heap.committed_bytes == 0


def test_what_cannot_be_unmapped_as_its_tensor_goes_is_at_the_next_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = FaultyCalls()
    backend = MemfdBackend(calls, MappingBudget(None))
    monkeypatch.setattr(virtual, "PlacementHeap", partial(PlacementHeap, backend=backend))
    cache = quire_cache(model_of("llama"))
    memory = cache.memory
    for layer in (0, 1):
        cache.update(_tokens(45), _tokens(45), layer)
    fork = cache.fork()
    for layer in (0, 1):
        fork.update(_tokens(40), _tokens(40), layer)
    both = memory.used_bytes
    calls.arm(1, once=True)
    del fork
    gc.collect()
    assert calls.num_failed == 1
    assert memory.used_bytes == both
    for layer in (0, 1):
        cache.update(_tokens(1), _tokens(1), layer)
    assert memory.used_bytes < both
    del cache
    gc.collect()
    assert memory.used_bytes == 0
