"""Cache files: loaded completely, for the same model, or not at all."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import json
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.architectures import tiny
from support.cache_argument import CACHE
from support.faulty_calls import FaultyCalls
from support.hf_case import STORAGES, model_of, quire_cache

from quire.atomic_file import FileCalls
from quire.attention.codecs import codec_of
from quire.errors import ArgumentError, CapacityError, LoadError
from quire.hf import QuireCache, accelerate, restore, virtual
from quire.hf.state_layers import BoundStates
from quire.memory.placement import MappingBudget, MemfdBackend, PlacementHeap
from quire.model.fingerprint import fingerprint

OPTIONS = {"kv_memory": "64MiB", "piece_size": 4096, "max_length": 256}


def _filled(name: str, storage: str = "virtual") -> QuireCache:
    model = model_of(name)
    cache = quire_cache(model, storage)
    ids = torch.randint(3, 131, (2, 37), generator=torch.Generator().manual_seed(1))
    model.generate(ids, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
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
        model.generate(ids, **{CACHE: one}, max_new_tokens=6, do_sample=False) for one in (cache, loaded)
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


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_tools_for_safetensors_read_keys_values_and_states(name: str, tmp_path: Path) -> None:
    cache = _filled(name)
    cache.save(tmp_path / "cache")
    tensors = load_file(tmp_path / "cache")
    for layer in cache.layers:
        for kind, kept in (("k", layer.keys), ("v", layer.values)):
            assert torch.equal(tensors.pop(f"layers.{layer.index}.{kind}").transpose(1, 2), kept)
        for state, number, kept in layer.tensors() if isinstance(layer, BoundStates) else ():
            assert torch.equal(tensors.pop(f"layers.{layer.index}.{state}.{number}"), kept)
    assert not tensors
    with safe_open(tmp_path / "cache", "pt") as file:
        description = json.loads(file.metadata()["quire_cache"])
    assert (description["kv_dtype"], description["num_tokens"]) == ("auto", 40)


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_tools_for_safetensors_read_codes_with_their_scales(kv_dtype: str, tmp_path: Path) -> None:
    model = model_of("llama")
    cache = quire_cache(model, kv_dtype=kv_dtype)
    for layer in (0, 1):
        cache.update(torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16), layer)
    cache.save(tmp_path / "cache", model)
    tensors = load_file(tmp_path / "cache")
    for layer in cache.row_layers:
        codes, scales = (tensors.pop(f"layers.{layer.index}.v{part}") for part in ("", "_scale"))
        values = codec_of(layer.shape.formats[1]).decode(codes.transpose(1, 2), scales.transpose(1, 2))
        assert torch.equal(values, layer.values)
        assert tensors.pop(f"layers.{layer.index}.k").shape == (2, 9, 2, 16)
        assert tensors.pop(f"layers.{layer.index}.k_scale").dtype is torch.bfloat16
    assert not tensors


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_any_bits_come_back_in_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny("llama")
    model.register_buffer("other", torch.zeros(1))
    model.register_parameter("of_dtype", torch.nn.Parameter(torch.zeros(1).to(dtype), requires_grad=False))
    cache = quire_cache(model)
    bits = torch.randint(0, 256, (2, 2, 7, 16 * dtype.itemsize), dtype=torch.uint8)
    bits[..., : dtype.itemsize] = 255  # a NaN
    for layer in (0, 1):
        cache.update(bits.view(dtype), bits.flip(0).view(dtype), layer)
    cache.save(tmp_path / "cache", model)
    loaded = QuireCache.load(tmp_path / "cache", model, **OPTIONS)
    for layer in loaded.layers:
        assert torch.equal(layer.keys.contiguous().view(torch.uint8), bits)
        assert torch.equal(layer.values.contiguous().view(torch.uint8), bits.flip(0))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_memory_for_saving_and_loading_is_a_piece(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    cache = quire_cache(model, kv_dtype=kv_dtype)
    for layer in (0, 1):
        cache.update(torch.randn(2, 2, 201, 16), torch.randn(2, 2, 201, 16), layer)
    monkeypatch.setattr("quire.hf.file._PIECE_BYTES", 4096)
    written: list[int] = []
    write = FileCalls.write

    def recorded(calls: FileCalls, descriptor: int, parts: Any, offset: int) -> int:
        written.extend(part.nbytes for part in parts)
        return write(calls, descriptor, parts, offset)

    monkeypatch.setattr(FileCalls, "write", recorded)
    cache.save(tmp_path / "cache", model)
    assert max(written) <= 4096
    empty = torch.empty
    made: list[int] = []
    monkeypatch.setattr(
        "quire.hf.file.torch.empty", lambda *sizes, **how: _recorded(empty(*sizes, **how), made)
    )
    loaded = QuireCache.load(tmp_path / "cache", model, **OPTIONS)
    monkeypatch.undo()
    assert max(made, default=0) <= 4096
    for mine, theirs in zip(cache, loaded, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def _recorded(tensor: torch.Tensor, made: list[int]) -> torch.Tensor:
    made.append(tensor.nbytes)
    return tensor


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model = _filled("llama"), model_of("llama")
    path = tmp_path / "cache"
    cache.save(path)
    good, random_ = path.read_bytes(), random.Random(4)
    own = fingerprint(model)
    monkeypatch.setattr("quire.hf.file.fingerprint", lambda model: own)  # which takes a pass over the model
    data = 8 + int.from_bytes(good[:8], "little")
    digest = good.index(b'"header_sha256":"') + 17
    assert good[data - 1 : data] == b" "  # the header is padded
    for begin, end, told in (
        (0, digest, "expected"),  # the header's length, and the name of its digest
        (
            digest,
            data,
            "expected the header's SHA-256",
        ),  # both digests, description, dtypes, shapes, offsets, padding
        (data, len(good), "expected the tensors' SHA-256"),
    ):
        for place in range(begin, end) if end <= data else random_.sample(range(begin, end), 60):
            bad = bytearray(good)
            bad[place] ^= 1 << random_.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(LoadError, match=told):
                QuireCache.load(path, model, **OPTIONS)
    path.write_bytes(good)
    QuireCache.load(path, model, **OPTIONS)


def test_a_file_that_is_no_saved_cache_is_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    save_file({"layers.0.k": torch.zeros(2, 3)}, path, {"format": "pt"})
    for content in (path.read_bytes(), b"QUIREKV1" + bytes(200), b"GGUF", b""):
        path.write_bytes(content)
        with pytest.raises(LoadError, match="expected a cache file of Quire, a safetensors file"):
            QuireCache.load(path, model_of("llama"), **OPTIONS)
    with pytest.raises(LoadError, match="cannot read"):
        QuireCache.load(tmp_path / "none", model_of("llama"), **OPTIONS)


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
    model.generate(torch.randint(3, 131, (1, 5)), **{CACHE: cache}, max_new_tokens=2, do_sample=False)
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
    for at in range(14):  # the header twice, and 3 layers' keys and values, each of 2 rows
        room = at
        with pytest.raises(OSError, match="No space left"):
            cache.save(path)
        assert path.read_bytes() == good
        assert os.listdir(tmp_path) == ["cache"]
    room = 14
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
from support.cache_argument import CACHE
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
model.generate(ids, **{CACHE: cache}, **options)
cache.save(path)
print("saved", flush=True)
longer = cache.fork()
with torch.no_grad():
    model(torch.full((2, 1), 5), **{CACHE: longer}, use_cache=True)
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
print(sorted(lengths), model.generate(more, **{CACHE: cache}, **options).tolist())
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
    return model.generate(more, **{CACHE: cache}, max_new_tokens=4, do_sample=False).tolist()


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
