"""Cache files: they come back whole, for the same model, or not at all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.architectures import tiny
from support.hf_case import STORAGES, model_of, quire_cache

from quire.errors import ArgumentError, LoadError
from quire.hf import QuireCache, accelerate, restore

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
        with pytest.raises(LoadError, match="nothing of it is used"):
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
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:

            def fail(*args: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space"):
                cache.save(path)
        assert path.read_bytes() == good
        assert os.listdir(tmp_path) == ["cache"]


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
    with pytest.raises(ArgumentError, match="still there"):
        cache.save(tmp_path / "cache")


_READER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from support.hf_case import model_of
from quire.errors import LoadError
from quire.hf import QuireCache
model = model_of("llama")
for _ in range(30):
    cache = QuireCache.load(sys.argv[2], model, kv_memory="64MiB", piece_size=4096, max_length=256)
    length = cache.get_seq_length()
    assert length in (40, 41), length
    assert all(bool((k == k).all()) for k, v, w in cache)
print("read")
"""


@pytest.mark.ci
def test_processes_read_a_file_while_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = _filled("llama")
    cache.save(path)
    longer = cache.fork()
    with torch.no_grad():
        model_of("llama")(torch.full((2, 1), 5), past_key_values=longer, use_cache=True)
    tests = str(Path(__file__).parent.parent)
    readers = [
        subprocess.Popen([sys.executable, "-c", _READER, tests, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    while any(reader.poll() is None for reader in readers):
        for one in (longer, cache):
            one.save(path)
    assert [reader.communicate()[0] for reader in readers] == ["read\n"] * 2
