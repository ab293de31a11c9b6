"""Forks of one cache, and one model, in several threads at once."""

from __future__ import annotations

import copy
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_argument import CACHE
from support.hf_case import STORAGES, model_of, quire_cache
from transformers import DynamicCache

from quire.errors import CapacityError
from quire.hf import QuireCache, accelerate, restore
from quire.torch_threads import one_torch_thread

NUM_THREADS = 6
HEADS, WIDTH = 2, 16  # of the tiny models' keys and values
_TOKENS = torch.randn(1, HEADS, 400, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """So that threads meet between any two lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], Any], count: int = NUM_THREADS) -> None:
    """Runs `work(i)` in so many threads; raises what the first of them did, and what finalizers did."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda seen: failures.append(seen.exc_value or seen.exc_type()),
    )
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.unraisablehook = hook
    if failures:
        raise failures[0]


def check(cache: QuireCache) -> None:
    """Every memory that forks of `cache` have is theirs, and counted."""
    gc.collect()
    for heap in getattr(cache.memory, "_heaps", {}).values():
        heap.check()


class _Twin:
    """A cache and the tokens it must hold, by their numbers in `_TOKENS`."""

    def __init__(self, cache: QuireCache, tokens: list[int]) -> None:
        self.cache, self.tokens = cache, tokens

    def add(self, tokens: list[int]) -> None:
        for layer in (0, 1):
            self.cache.update(_TOKENS[:, :, tokens], _TOKENS[:, :, tokens] + 1, layer)
        self.tokens = self.tokens + tokens

    def fork(self, how: int) -> _Twin:
        return _Twin(copy.deepcopy(self.cache) if how else self.cache.fork(), self.tokens)

    def is_right(self) -> bool:
        right = _TOKENS[:, :, self.tokens]
        return all(torch.equal(k, right) and torch.equal(v, right + 1) for k, v, _ in self.cache)


def _hammer(storage: str, rounds: int, folder: Path | None = None) -> None:
    root = _Twin(quire_cache(model_of("llama"), storage, max_length=512), [])
    root.add(list(range(45)))  # pieces of 32 tokens: the second one is shared and partial
    used = root.cache.used_bytes

    def work(number: int) -> None:
        rng = random.Random(number)
        for turn in range(rounds):
            twin = root.fork(turn % 2)
            for _ in range(rng.randrange(1, 4)):
                twin.add([rng.randrange(400) for _ in range(rng.randrange(1, 40))])
                assert twin.is_right()
            other = twin.fork(0)
            back = rng.randrange(1, 40)
            twin.cache.crop(-back)
            twin.tokens = twin.tokens[:-back]
            twin.add([rng.randrange(400) for _ in range(5)])
            assert twin.is_right()
            assert other.is_right()
            other.cache.batch_repeat_interleave(2)
            other.cache.reorder_cache(torch.tensor([1, 0]))
            other.cache.batch_select_indices(torch.tensor([1]))
            assert other.is_right()
            if folder is not None and turn % 8 == 0:
                twin.cache.save(folder / f"{number}.kv", model_of("llama"))
                loaded = QuireCache.load(folder / f"{number}.kv", model_of("llama"), storage="growing")
                assert _Twin(loaded, twin.tokens).is_right()
            twin.cache.reset()
            assert twin.cache.get_seq_length() == 0

    in_threads(work)
    assert root.is_right()
    check(root.cache)
    assert root.cache.used_bytes == used


@pytest.mark.parametrize("storage", STORAGES)
def test_forks_of_one_cache_in_threads_hold_their_own_tokens(storage: str, tmp_path: Path) -> None:
    _hammer(storage, 16, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("storage", STORAGES)
def test_forks_of_one_cache_in_threads_for_longer(storage: str) -> None:
    _hammer(storage, 300)


def test_forks_in_threads_count_against_one_limit() -> None:
    for storage in STORAGES:
        root = _Twin(quire_cache(model_of("llama"), storage, kv_memory="200KiB", max_length=64), [])
        root.add(list(range(20)))
        used = root.cache.used_bytes

        def work(number: int, root: _Twin = root) -> None:
            for _ in range(12):
                try:
                    twin = root.fork(0)
                    twin.add(list(range(number, number + 30)))
                except CapacityError:
                    continue
                assert root.cache.used_bytes <= 200 << 10
                assert twin.is_right()

        in_threads(work)
        check(root.cache)
        assert root.cache.used_bytes == used


def test_a_fork_that_goes_in_the_middle_of_a_change_is_released_after_it() -> None:
    root = _Twin(quire_cache(model_of("llama")), [])
    root.add(list(range(45)))
    used = root.cache.used_bytes
    memory: Any = root.cache.memory
    fork = root.fork(0)
    fork.add([1, 2, 3])
    with memory._changing():  # as where the garbage collector runs while memory is being mapped
        del fork
        gc.collect()
    assert root.cache.used_bytes == used
    check(root.cache)


def test_a_sum_that_threads_share() -> None:
    from quire.byte_counter import ByteCounter

    tally = ByteCounter()

    def work(number: int) -> None:
        for _ in range(2000):
            tally.add(1)
            if number == 0:
                assert tally.value >= 0

    in_threads(work)
    assert tally.value == NUM_THREADS * 2000


# Models.


def _ask(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, max_new_tokens=6, min_new_tokens=6,
        do_sample=False, pad_token_id=0,
    )[0].tolist()  # fmt: skip


def _many_answers(model: Any, make: Callable[[int], Any], rounds: int, expected_by: Any) -> None:
    """Answers of one model in threads, on caches that `make(turn)` gives, all behind the same 20 tokens."""
    ids = torch.randint(3, 120, (4, 30), generator=torch.Generator().manual_seed(5))
    ids[:, :20] = ids[0, :20]
    expected = [_ask(expected_by, one[None], DynamicCache(config=model.config)) for one in ids]
    root = quire_cache(model)
    with torch.no_grad():
        model(ids[:1, :20], **{CACHE: root}, use_cache=True)

    def work(number: int) -> None:
        for turn in range(rounds):
            which = (number + turn) % len(ids)
            cache = make(turn) or root.fork()
            assert _ask(model, ids[which : which + 1], cache) == expected[which]

    in_threads(work)
    check(root)


def test_generate_in_threads_on_forks_and_on_caches_of_their_own() -> None:
    model = model_of("gemma3_text")
    kinds = (lambda: None, lambda: quire_cache(model), lambda: quire_cache(model, "growing"))
    _many_answers(model, lambda turn: kinds[turn % 3](), 3, model)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2"]
)  # one that is one native call, one that runs its own forward
def test_generate_in_threads_on_one_accelerated_model(name: str) -> None:
    pytest.importorskip("quire._native")
    model = copy.deepcopy(model_of(name))
    assert accelerate(model).level == "whole"
    kinds = (
        lambda: None,
        lambda: quire_cache(model),
        lambda: DynamicCache(config=model.config),  # the model's own forward and attention, beside steps
        lambda: quire_cache(model, "growing"),
    )
    try:
        _many_answers(model, lambda turn: kinds[turn % 4](), 4, model_of(name))
    finally:
        restore(model)


def test_a_host_thread_that_starts_while_torch_is_kept_to_one_has_its_own_count() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
            host = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            host.start()
            host.join()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [3]
