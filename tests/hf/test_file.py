"""Cache files: loaded completely, for the same model, or not at all."""

from __future__ import annotations

import builtins
import errno
import gc
import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.faulty_calls import FaultyCalls
from support.hf_case import STORAGES, model_of, quire_cache

from quire.atomic_file import FileCalls
from quire.errors import ArgumentError, CapacityError, LoadError
from quire.hf import QuireCache, accelerate, restore, virtual
from quire.memory.placement import MappingBudget, MemfdBackend, PlacementHeap

OPTIONS = {"kv_memory": "64MiB", "piece_size": 4096, "max_length": 256}


def _filled(name: str, storage: str = "virtual") -> QuireCache:
    model = model_of(name)
    cache = quire_cache(model, storage)
    ids = torch.randint(3, 131, (2, 37), generator=torch.Generator().manual_seed(1))
    model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    return cache


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "name", ["gemma3_text", "mimo_v2_flash", "bamba", "falcon_h1", "lfm2", "deepseek_v3"]
)
def test_a_cache_comes_back_as_it_was(name: str, storage: str, tmp_path: Path) -> None:
    cache, model = _filled(name, storage), model_of(name)
    path = tmp_path / "cache.kv"
    cache.save(path)
    loaded = QuireCache.load(path, model, storage=storage, **OPTIONS)
    ids = torch.randint(3, 131, (2, 50), generator=torch.Generator().manual_seed(2))
    answers = [
        model.generate(ids, past_key_values=one, max_new_tokens=6, do_sample=False) for one in (cache, loaded)
    ]
    assert torch.equal(*answers)
    assert os.listdir(tmp_path) == ["cache.kv"]


def test_every_storage_reads_what_another_wrote(tmp_path: Path) -> None:
    cache, model = _filled("gemma3_text", "virtual"), model_of("gemma3_text")
    cache.save(tmp_path / "cache")
    for storage in STORAGES:
        loaded = QuireCache.load(tmp_path / "cache", model, storage=storage, **OPTIONS)
        for mine, theirs in zip(cache, loaded, strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])


def test_the_bytes_are_those_of_earlier_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quire.hf.file.fingerprint",
        lambda model: {"config": "cc" * 32, "weights": "dd" * 32, "behaviour": "bb" * 32},
    )
    heads, width = 2, 16  # of the model
    keys, values = (torch.arange(128.0).reshape(1, heads, 4, width)[:, :, :2] + one for one in (0, 1))
    payload = [part.transpose(1, 2).contiguous().numpy().tobytes() for part in (keys, values)]
    digests = [hashlib.sha256(part).hexdigest() for part in payload]
    layer = (
        f'{{"rows": {{"dtype": "float32", "first": 0, "length": 2, "num_heads": [{heads}, {heads}], "num_rows": 1, '
        f'"sha256": ["{digests[0]}", "{digests[1]}"], "widths": [{width}, {width}]}}, "states": null}}'
    )
    front = (
        f'{{"fingerprint": {{"behaviour": "{"bb" * 32}", "config": "{"cc" * 32}", "weights": "{"dd" * 32}"}}, '
        f'"layers": [{layer}, {layer}]}}'
    ).encode()
    length = len(front).to_bytes(8, "little")
    stored = b"QUIREKV1" + length + hashlib.sha256(front).digest() + front + 2 * b"".join(payload)
    path, model = tmp_path / "cache", model_of("llama")
    path.write_bytes(stored)
    loaded = QuireCache.load(path, model, **OPTIONS)
    for one in loaded:
        assert torch.equal(one[0], keys)
        assert torch.equal(one[1], values)
    loaded.save(path)
    assert path.read_bytes() == stored


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    cache, model = _filled("llama"), model_of("llama")
    path = tmp_path / "cache"
    cache.save(path)
    good = path.read_bytes()
    random_ = random.Random(4)
    places = [0, 7, 8, 15, 16, 47, 48, len(good) - 1, *(random_.randrange(len(good)) for _ in range(60))]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << random_.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(LoadError, match="the file is not used"):
            QuireCache.load(path, model, **OPTIONS)
    path.write_bytes(good)
    QuireCache.load(path, model, **OPTIONS)


def test_a_file_cut_short_or_added_to_is_refused(tmp_path: Path) -> None:
    cache, model = _filled("llama"), model_of("llama")
    path = tmp_path / "cache"
    cache.save(path)
    good = path.read_bytes()
    for content in (b"", good[:7], good[:47], good[:100], good[:-1], good[: len(good) // 2], good + b"\0"):
        path.write_bytes(content)
        with pytest.raises(LoadError):
            QuireCache.load(path, model, **OPTIONS)
    with pytest.raises(LoadError, match="cannot read"):
        QuireCache.load(tmp_path / "none", model, **OPTIONS)


def test_another_models_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    _filled("llama").save(path)
    with pytest.raises(LoadError, match="another config"):
        QuireCache.load(path, model_of("qwen3"), **OPTIONS)
    other = tiny("llama")
    QuireCache.load(path, other, **OPTIONS)  # the same weights
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    with pytest.raises(LoadError, match="another weights"):
        QuireCache.load(path, other, **OPTIONS)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_an_accelerated_model_is_the_same_model(name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "cache", model_of(name)
    cache = _filled(name)
    cache.save(path)
    accelerate(model)
    try:
        QuireCache.load(path, model, **OPTIONS)
        _filled(name).save(path)
    finally:
        restore(model)
    QuireCache.load(path, model, **OPTIONS)


def test_saving_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    cache = _filled("llama")
    cache.save(path)
    good = path.read_bytes()
    for name in ("rename", "sync", "open"):
        with monkeypatch.context() as patch:

            def fail(*args: object, **options: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(FileCalls, name, fail)
            with pytest.raises(OSError, match="No space"):
                cache.save(path)
        assert path.read_bytes() == good
        assert os.listdir(tmp_path) == ["cache"]


def test_a_path_in_no_folder_is_refused_by_its_name_and_leaves_nothing(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = quire_cache(model)
    cache.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), 0)
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "missing" / "a.kv", tmp_path / "file" / "a.kv"):
        with pytest.raises(ArgumentError, match=f"folder that is there .*{path.parent}; make it"):
            cache.save(path, model)
    with pytest.raises(ArgumentError, match=f"name of a file .*{tmp_path}"):
        cache.save(tmp_path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert list(tmp_path.parent.glob("*.partial")) == []
    assert (tmp_path / "file").read_text() == "kept"


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="filled"):
        quire_cache(model_of("llama")).save(tmp_path / "cache")
    model = tiny("llama")
    cache = quire_cache(model)
    model.generate(torch.randint(3, 131, (1, 5)), past_key_values=cache, max_new_tokens=2, do_sample=False)
    cache.save(tmp_path / "cache", model)
    del model
    import gc

    gc.collect()
    with pytest.raises(ArgumentError, match="still exists"):
        cache.save(tmp_path / "cache")


# Calls that fail.


class _FailingFile(io.FileIO):
    """A file of which reading fails with `error` from the `at`-th time on."""

    count = at = 0
    error = errno.ENOSPC

    @classmethod
    def arm(cls, at: int, error: int) -> None:
        cls.count, cls.at, cls.error = 0, at, error

    @classmethod
    def _pass(cls) -> None:
        cls.count += 1
        if cls.count >= cls.at:
            raise OSError(cls.error, os.strerror(cls.error))

    def readinto(self, buffer: Any) -> int:
        self._pass()
        return super().readinto(buffer)

    def read(self, size: int = -1) -> bytes:
        self._pass()
        return super().read(size)


def _refusal(call: Callable[[], object]) -> tuple[type[Exception] | None, str]:
    """What `call` raises, in words: the error itself, and its cause, would hold the memory that was in use."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def test_a_disk_that_is_full_at_any_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    cache = _filled("gemma3_text")
    cache.save(path)
    good = path.read_bytes()
    _continue(cache)
    write, room = FileCalls.write, 0

    def full(*given: Any) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= 1
        return write(*given)

    monkeypatch.setattr(FileCalls, "write", full)
    for at in range(13):  # the header, and 3 layers' keys and values, each of 2 rows
        room = at
        with pytest.raises(OSError, match="No space left"):
            cache.save(path)
        assert path.read_bytes() == good
        assert os.listdir(tmp_path) == ["cache"]
    room = 13
    cache.save(path)
    monkeypatch.undo()
    assert QuireCache.load(path, model_of("gemma3_text"), **OPTIONS).get_seq_length() == 55


@pytest.mark.parametrize("storage", STORAGES)
def test_a_read_that_fails_leaves_nothing(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "cache", model_of("falcon_h1")
    _filled("falcon_h1").save(path)
    made = _watch_caches(monkeypatch)
    monkeypatch.setattr(builtins, "open", lambda *_: _FailingFile(path, "r"))
    load = partial(QuireCache.load, path, model, storage=storage, **OPTIONS)
    at = 1
    while True:
        _FailingFile.arm(at, errno.EIO)
        error, text = _refusal(load)
        if error is None:
            break
        assert error is LoadError
        assert "Input/output error" in text
        assert made[-1].used_bytes == made[-1].get_seq_length() == 0
        at += 1
    assert at == 2 + 2 * (2 * 2 + 2) + 1  # header in two; of 2 layers keys and values of 2 rows, and 2 states
    assert made[-1].get_seq_length() == 40


def _watch_caches(monkeypatch: pytest.MonkeyPatch) -> list[QuireCache]:
    """Every cache made from now on."""
    made: list[QuireCache] = []
    make = QuireCache.__init__

    def init(self: QuireCache, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(QuireCache, "__init__", init)
    return made


def test_a_file_larger_than_the_memory_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "cache", model_of("llama")
    _filled("llama").save(path)
    made = _watch_caches(monkeypatch)
    for storage in STORAGES:
        for kv_memory, max_length, named in (("36KiB", 41, "kv_memory"), ("4MiB", 39, "max_length")):
            options = {"storage": storage, "kv_memory": kv_memory, "max_length": max_length}
            error, text = _refusal(partial(QuireCache.load, path, model, piece_size=4096, **options))
            assert error is CapacityError
            assert named in text
            assert made[-1].used_bytes == made[-1].get_seq_length() == 0
    assert len(made) == 2 * len(STORAGES)


def test_a_system_call_that_fails_while_loading_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "cache", model_of("gemma3_text")
    _filled("gemma3_text").save(path)
    calls = FaultyCalls()
    backend = MemfdBackend(calls, MappingBudget(None))
    monkeypatch.setattr(virtual, "PlacementHeap", partial(PlacementHeap, backend=backend))
    made = _watch_caches(monkeypatch)
    at, refused = 1, 0
    while True:
        calls.arm(at, once=True)
        error, _ = _refusal(partial(QuireCache.load, path, model, **OPTIONS))
        if error is None:  # none failed, or one that it can do without
            assert made[-1].get_seq_length() == 40
        else:
            refused += 1
            assert error is CapacityError
            assert made[-1].used_bytes == made[-1].get_seq_length() == 0
        for heap in made[-1].memory._heaps.values():
            heap.check()
        if calls.num_failed == 0:
            break
        at += 1
    assert refused > 5


# Other processes.

_OTHER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from support.hf_case import model_of
from quire.hf import QuireCache
model = model_of("llama")
path = sys.argv[2]
load = lambda: QuireCache.load(path, model, kv_memory="64MiB", piece_size=4096, max_length=256)
ids = torch.randint(3, 131, (2, 37), generator=torch.Generator().manual_seed(1))
options = {"max_new_tokens": 4, "do_sample": False}
"""
_WRITER = """
cache = QuireCache(model.config, kv_memory="64MiB", max_length=256)
model.generate(ids, past_key_values=cache, **options)
cache.save(path)
print("saved", flush=True)
longer = cache.fork()
with torch.no_grad():
    model(torch.full((2, 1), 5), past_key_values=longer, use_cache=True)
while sys.argv[3] == "on":
    longer.save(path)
    cache.save(path)
"""
_READER = """
lengths = set()
for _ in range(int(sys.argv[3])):
    cache = load()
    lengths.add(cache.get_seq_length())
more = torch.cat([ids, torch.arange(3, 33).view(2, 15)], dim=1)
cache.crop(40 - cache.get_seq_length())
print(sorted(lengths), model.generate(more, past_key_values=cache, **options).tolist())
"""


def _process(script: str, path: Path, argument: str) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", _OTHER + script, tests, str(path), argument]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _continue(cache: QuireCache) -> list[list[int]]:
    """What `_READER` computes, on a cache of this process."""
    ids = torch.randint(3, 131, (2, 37), generator=torch.Generator().manual_seed(1))
    more = torch.cat([ids, torch.arange(3, 33).view(2, 15)], dim=1)
    model = model_of("llama") if len(cache) == 2 else model_of("gemma3_text")
    return model.generate(more, past_key_values=cache, max_new_tokens=4, do_sample=False).tolist()


@pytest.mark.ci
def test_another_process_goes_on_from_the_file_that_one_left(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    assert _process(_WRITER, path, "off").communicate()[0] == "saved\n"
    told = _process(_READER, path, "1").communicate()[0]
    assert told == f"[40] {_continue(_filled('llama'))}\n"


@pytest.mark.ci
def test_processes_read_a_file_while_another_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    writer = _process(_WRITER, path, "on")
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saved\n"
        readers = [_process(_READER, path, "40") for _ in range(2)]
        for reader in readers:
            told = reader.communicate()[0]
            assert told.startswith(("[40] ", "[41] ", "[40, 41] "))
            assert told.endswith(f"] {_continue(_filled('llama'))}\n")
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()


@pytest.mark.ci
def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path: Path) -> None:
    path, model = tmp_path / "cache", model_of("llama")
    random_ = random.Random(6)
    for _ in range(4):
        writer = _process(_WRITER, path, "on")
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saved\n"
        for _ in range(20):  # stopped at twenty places, and killed at the last
            time.sleep(random_.uniform(0, 0.02))
            writer.send_signal(signal.SIGSTOP)
            cache = QuireCache.load(path, model, **OPTIONS)
            assert cache.get_seq_length() in (40, 41)
            writer.send_signal(signal.SIGCONT)
        writer.kill()
        writer.communicate()
        assert _continue_from(path) == _continue(_filled("llama"))
        gc.collect()


def _continue_from(path: Path) -> list[list[int]]:
    cache = QuireCache.load(path, model_of("llama"), **OPTIONS)
    cache.crop(40 - cache.get_seq_length())
    return _continue(cache)
