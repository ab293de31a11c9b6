"""A child of `os.fork` with the caches and models of its parent; the parent is unaffected."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import multiprocessing
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_argument import CACHE
from support.forked import in_child, refusal
from support.hf_case import STORAGES, model_of, quire_cache
from transformers import DynamicCache

from quire.errors import CapacityError, OtherProcessError
from quire.hf import QuireCache, accelerate, restore

IDS = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(5))


def ask(model: Any, cache: Any) -> list[int]:
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), **{CACHE: cache}, max_new_tokens=5, do_sample=False
    )[0].tolist()  # fmt: skip


def filled(model: Any, storage: str = "virtual") -> QuireCache:
    cache = quire_cache(model, storage)
    with torch.no_grad():
        model(IDS[:, :37], **{CACHE: cache}, use_cache=True)
    return cache


def contents(cache: QuireCache) -> list[torch.Tensor]:
    return [tensor.clone() for k, v, _ in cache for tensor in (k, v)]


def test_a_virtual_cache_is_refused_by_every_call_and_stays_as_it_is(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = filled(model)
    before, used = contents(cache), cache.used_bytes
    calls = {
        "fork": cache.fork,
        "deepcopy": lambda: copy.deepcopy(cache),
        "generate": lambda: ask(model, cache),
        "keys": lambda: cache.layers[0].keys,
        "values": lambda: cache.layers[1].values,
        "iteration": lambda: list(cache),
        "update": lambda: cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0),
        "save": lambda: cache.save(tmp_path / "a.kv", model),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0, 0])),
        "select": lambda: cache.batch_select_indices(torch.tensor([0])),
    }

    def refusals() -> dict[str, str]:
        return {name: refusal(call) for name, call in calls.items()}

    for name, message in in_child(refusals).items():
        assert f"process that made it, {os.getpid()}" in message, name
        assert "make a new cache in the child" in message
        assert "spawn" in message

    def drop() -> int:
        nonlocal cache, calls
        cache.reset()
        del cache, calls
        return gc.collect()

    in_child(drop)
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))
    assert cache.used_bytes == used
    assert list(tmp_path.iterdir()) == []
    assert ask(model, cache) == ask(model, DynamicCache(config=model.config))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_new_cache_works_in_a_child_and_so_does_one_of_ordinary_memory(storage: str) -> None:
    model = model_of("llama")
    cache = filled(model, storage)
    expected = ask(model, DynamicCache(config=model.config))
    assert in_child(lambda: ask(model, filled(model, storage))) == expected
    if storage != "virtual":
        assert in_child(lambda: (ask(model, cache.fork()), ask(model, cache))) == (expected, expected)
    assert ask(model, cache) == expected


def test_a_cache_that_goes_in_a_child_leaves_alone_what_lies_at_its_addresses_there() -> None:
    cache = filled(model_of("llama"))
    (heap,) = cache.memory._heaps.values()  # type: ignore[attr-defined]
    (file,) = heap._files.files.values()
    start, size = file.address, mmap.PAGESIZE

    def drop() -> bool:
        nonlocal cache, heap, file
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
        flags = (
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000
        )  # MAP_FIXED_NOREPLACE: the child has nothing there
        found = libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, 2**64 - 1, 0)
        mine = (ctypes.c_uint8 * size).from_address(found)
        mine[5] = 7
        heap.close()
        del cache, heap, file
        gc.collect()
        return found == start and mine[5] == 7

    assert in_child(drop)


def test_a_child_does_not_hold_the_memory_of_its_parents_caches() -> None:
    cache = filled(model_of("llama"))

    def open_files() -> list[str]:
        paths = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return [os.readlink(path) for path in paths if path.is_symlink() and "quire-kv" in os.readlink(path)]

    assert len(open_files()) >= 1
    assert in_child(open_files) == []
    assert ask(model_of("llama"), cache)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_pool_of_processes_gets_the_error_instead_of_waiting_for_ever() -> None:
    cache = filled(model_of("llama"))
    with (
        multiprocessing.get_context("fork").Pool(1, _take, (cache,)) as pool,
        pytest.raises(OtherProcessError),
    ):
        pool.apply_async(_fork_taken).get(60)


_taken: list[QuireCache] = []


def _take(cache: QuireCache) -> None:
    _taken.append(cache)


def _fork_taken() -> int:
    return _taken[0].fork().get_seq_length()


def test_an_accelerated_model_works_in_children_forked_while_other_threads_run_it() -> None:
    pytest.importorskip("quire._native")
    model = copy.deepcopy(model_of("gpt2"))  # its steps switch the attention
    expected = ask(model_of("gpt2"), DynamicCache(config=model.config))
    assert accelerate(model).level == "whole"
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            ask(model, quire_cache(model))

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            answers = in_child(lambda: [ask(model, c(model)) for c in (quire_cache, _dynamic)])
            assert answers == [expected, expected]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        restore(model)


def _dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


# File descriptors: one for each memory of virtual storage.


def test_where_descriptors_run_out_the_message_says_what_helps() -> None:
    model, token = model_of("llama"), torch.ones(1, 2, 1, 16)

    def one_more() -> QuireCache:
        cache = quire_cache(model)
        cache.update(token, token, 0)
        return cache

    def many() -> tuple[str, int]:
        limit = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        caches, message = [], ""
        try:
            for _ in range(20):
                caches.append(one_more())
        except CapacityError as error:
            message = str(error)
        caches += [caches[0].fork() for _ in range(20)]  # which have one together
        caches.pop(1)
        caches.append(one_more())
        return message, len(caches)

    message, count = in_child(many)
    for words in ("file descriptor", "drop unneeded caches", "ulimit -n", '"growing"'):
        assert words in message
    assert count >= 20
