"""Random operations on QuireCache and on DynamicCache, its twin: the same keys and values after each, in codes too.

All memory there is was full of NaN before, so that a read of what was not written shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hf_case import STORAGES, int8_twin, model_of, quire_cache
from transformers import DynamicCache

from quire.hf import QuireCache
from quire.hf.layer_kinds import StateLayer

HEADS, WIDTH = 2, 16
SEEDS = range(6)
STATES, KERNEL = ("lfm2", "qwen3_next"), 4


def _poison(cache: QuireCache) -> None:
    """Write NaN wherever the memory can reach."""
    everything = [cache.fork() for _ in range(3)]
    for one in everything:
        tokens = torch.full((3, HEADS, 100, WIDTH), float("nan"))
        for index, layer in enumerate(one.layers):
            if isinstance(layer, StateLayer):
                for given in _states_of(one, index, 3, 100):
                    given(one, float("nan"))
            else:
                one.update(tokens, tokens, index)


def _states_of(cache: DynamicCache, index: int, num_rows: int, num_tokens: int) -> list[Callable[..., Any]]:
    """The updates of a state layer in a step: called with a cache, and with what to write or nothing."""
    drawn = torch.randn(num_rows, 6, num_tokens), torch.randn(num_rows, HEADS, 4, 5)

    def of(which: int) -> torch.Tensor:  # a view of more, as models give
        return torch.cat([drawn[which], drawn[which]], dim=1)[:, : drawn[which].shape[1]]

    def convolution(one: DynamicCache, fill: float | None = None) -> torch.Tensor:
        given = of(0) if fill is None else torch.full_like(drawn[0], fill)
        return one.update_conv_state(given, index, conv_kernel_size=KERNEL)

    def recurrent(one: DynamicCache, fill: float | None = None) -> torch.Tensor:
        return one.update_recurrent_state(of(1) if fill is None else torch.full_like(drawn[1], fill), index)

    return [convolution] if "conv" in cache.config.layer_types else [convolution, recurrent]


class _Pair:
    """A cache and its twin."""

    def __init__(self, ours: QuireCache, twin: DynamicCache) -> None:
        self.ours, self.twin = ours, twin

    def update(self, num_rows: int, num_tokens: int) -> None:
        for layer in range(len(self.twin)):
            if isinstance(self.ours.layers[layer], StateLayer):
                for given in _states_of(self.ours, layer, num_rows, num_tokens):
                    assert torch.equal(given(self.ours), given(self.twin))
                continue
            k, v = (torch.randn(num_rows, HEADS, num_tokens, WIDTH) for _ in range(2))
            k[..., 5] += 30  # as keys of real models
            assert self.ours.get_mask_sizes(num_tokens, layer) == self.twin.get_mask_sizes(num_tokens, layer)
            got, want = self.ours.update(k, v, layer), self.twin.update(k, v, layer)
            for mine, theirs in zip(got, want, strict=True):
                assert torch.equal(mine, theirs)

    def choose_in_twin(self, rows: torch.Tensor) -> None:
        if any(self.twin.is_linear):  # whose states can be reordered alone
            self.twin.reorder_cache(rows)
        else:
            self.twin.batch_select_indices(rows)

    def check(self) -> None:
        assert self.ours.get_seq_length() == self.twin.get_seq_length()
        for mine, theirs in zip(self.ours.layers, self.twin.layers, strict=True):
            if isinstance(mine, StateLayer):
                for name in ("conv_states", "recurrent_states"):
                    for state, other in zip(
                        getattr(mine, name).values(), getattr(theirs, name).values(), strict=True
                    ):
                        assert (state is None) is (other is None)
                        assert state is None or torch.equal(state, other)
                assert mine.has_previous_state == theirs.has_previous_state
                assert mine.charge.num_bytes >= mine.state_bytes
            elif mine.is_initialized:
                assert torch.equal(mine.keys, theirs.keys)
                assert torch.equal(mine.values, theirs.values)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_same_contents_after_any_operations(seed: int, storage: str, name: str) -> None:
    _walk(seed, storage, name, num_steps=25)


@pytest.mark.parametrize(("name", "storage"), [("llama", "virtual"), ("gemma3_text", "growing")])
def test_same_contents_in_codes_after_any_operations(name: str, storage: str) -> None:
    for seed in range(3):
        _walk(seed, storage, name, num_steps=20, kv_dtype="int8")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", range(2))
def test_same_states_after_any_operations(seed: int, storage: str, name: str) -> None:
    _walk(seed, storage, name, num_steps=25)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", range(100, 160))
def test_same_contents_after_many_operations(seed: int, storage: str, name: str) -> None:
    _walk(seed, storage, name, num_steps=80)
    _walk(seed, storage, name, num_steps=40, kv_dtype="int8")


@pytest.mark.ci
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", range(100, 112))
def test_same_states_after_many_operations(seed: int, storage: str, name: str) -> None:
    _walk(seed, storage, name, num_steps=80)


def _walk(seed: int, storage: str, name: str, num_steps: int, kv_dtype: str = "auto") -> None:
    model, random_ = model_of(name), random.Random(seed)
    torch.manual_seed(seed)
    ours = quire_cache(model, storage, max_length=2048, kv_memory="512MiB", kv_dtype=kv_dtype)
    _poison(ours)
    ours.reset()
    pairs = [_Pair(ours, DynamicCache(config=model.config) if kv_dtype == "auto" else int8_twin(ours))]
    num_rows = {id(pairs[0]): random_.randint(1, 3)}
    recording = random_.random() < 0.5 and name != "qwen3_next"  # a recurrent state goes back to nothing
    if recording:
        ours.activate_past_recording()
        pairs[0].twin.activate_past_recording()
    for _ in range(num_steps):
        pair = random_.choice(pairs)
        rows, length = num_rows[id(pair)], pair.ours.get_seq_length()
        action = random_.choice(["update", "update", "update", "crop", "reorder", "fork", "select", "repeat"])
        if action == "update" or length == 0:
            pair.update(rows, random_.choice([1, 1, 2, 7, 33]))
            if recording:
                back = random_.randint(0, 1)
                pair.ours.crop(-back)
                pair.twin.crop(-back)
        elif action == "crop" and name == "llama":
            back = random_.randint(0, min(length - 1, 20))
            pair.ours.crop(-back)
            pair.twin.crop(-back)
        elif action == "reorder":
            order = torch.tensor([random_.randrange(rows) for _ in range(rows)])
            pair.ours.reorder_cache(order)
            pair.twin.reorder_cache(order)
        elif action == "fork" and len(pairs) < 4:
            other = _Pair(copy.deepcopy(pair.ours), copy.deepcopy(pair.twin))
            num_rows[id(other)] = rows
            pairs.append(other)
        elif action == "select":
            chosen = torch.tensor(random_.sample(range(rows), random_.randint(1, rows)))
            pair.ours.batch_select_indices(chosen)
            pair.choose_in_twin(chosen)
            num_rows[id(pair)] = len(chosen)
        elif action == "repeat" and rows < 4:
            pair.ours.batch_repeat_interleave(2)
            pair.choose_in_twin(torch.arange(rows).repeat_interleave(2))
            num_rows[id(pair)] = 2 * rows
        for one in pairs:
            one.check()
    _check_heaps(ours)
    memory = ours.memory
    for one in pairs:
        one.ours.reset()
    assert memory.used_bytes == 0


def _check_heaps(cache: Any) -> None:
    for heap in getattr(cache.memory, "_heaps", {}).values():
        heap.check()


@pytest.mark.parametrize("storage", ["virtual", "contiguous"])
def test_addresses_never_change_and_nothing_is_copied(storage: str) -> None:
    model = model_of("llama")
    cache = quire_cache(model, storage)
    k = torch.randn(2, HEADS, 3, WIDTH)
    first = cache.update(k, k, 0)[0].data_ptr()
    for _ in range(40):
        assert cache.update(k, k, 0)[0].data_ptr() == first


def test_growing_moves_only_when_full_and_not_all_layers_at_once() -> None:
    cache = quire_cache(model_of("llama"), "growing", max_length=None)
    token = torch.randn(1, HEADS, 1, WIDTH)
    moves: dict[int, list[int]] = {0: [], 1: []}
    at: dict[int, int] = {}
    for step in range(300):
        for layer in (0, 1):
            address = cache.update(token, token, layer)[0].data_ptr()
            if at.get(layer) != address:
                moves[layer].append(step)
            at[layer] = address
    assert [len(steps) for steps in moves.values()] == [3, 3]  # 1 + 128 (+ 1) tokens more each time
    assert not set(moves[0][1:]) & set(moves[1][1:])


@pytest.mark.parametrize("storage", ["virtual", "growing"])
def test_windows_give_memory_back_behind_them_but_not_what_somebody_holds(storage: str) -> None:
    model = model_of("mistral")  # both layers slide
    cache = quire_cache(model, storage, max_length=100_000)
    token = torch.randn(1, HEADS, 64, WIDTH)
    for _ in range(20):
        for layer in (0, 1):
            cache.update(token, token, layer)
    settled = cache.used_bytes
    for _ in range(40):
        for layer in (0, 1):
            cache.update(token, token, layer)
    assert cache.used_bytes <= settled + 64 * 1024
    held = [cache.update(token, token, layer) for layer in (0, 1)][1]
    before = held[0].clone()
    for _ in range(10):
        for layer in (0, 1):
            cache.update(token, token, layer)
    assert torch.equal(held[0], before)
