"""`QuireCache(kv_dtype=...)`: memory holds the engine's codes; tokens equal those of a cache with encoded and decoded
keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_argument import CACHE
from support.hf_case import (
    MODES,
    STORAGES,
    CodedTwin,
    as_lists,
    int8_twin,
    model_of,
    modes_of,
    prompts,
    quire_cache,
)
from transformers import LlamaConfig, PreTrainedModel, T5Config

from quire.attention import reference_attention
from quire.backends import native_module
from quire.devices import device_of
from quire.errors import ArgumentError, CapacityError, LoadError
from quire.hf import QuireCache, accelerate, acceleration, restore
from quire.hf.layers import RowLayer
from quire.memory import PagedStorage
from quire.model.key_offsets import KeyOffsets, key_offset
from quire.spec import KVSpec
from quire.spec.kv_dtype import with_kv_dtype

HEADS, WIDTH = 2, 16
OPTIONS: dict[str, Any] = {"kv_memory": "64MiB", "piece_size": 4096, "max_length": 256}
BACKENDS = [
    "python",
    pytest.param("native", marks=pytest.mark.skipif(native_module() is None, reason="not built")),
]


def _cache(model: PreTrainedModel, storage: str = "virtual", **options: Any) -> QuireCache:
    return quire_cache(model, storage, kv_dtype="int8", **options)


def _keys(
    num_rows: int, num_tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """With a channel far from zero, as real models have them."""
    keys = torch.randn(num_rows, HEADS, num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    keys[..., 3] -= 40
    return keys.to(dtype)


def _codes(layer: RowLayer) -> list[torch.Tensor]:
    """Codes and scales of what the layer holds, [rows, heads, tokens, ..]."""
    view, at = layer.codes(), layer.rows[0].origin
    assert view.k_scale is not None
    assert view.v_scale is not None
    parts = (view.k, view.k_scale, view.v, view.v_scale)
    return [part[:, :, : layer.length - at].clone() for part in parts]


@contextmanager
def _accelerated(model: PreTrainedModel) -> Iterator[None]:
    assert accelerate(model).level == "whole"
    try:
        yield
    finally:
        restore(model)


# The same tokens.


@pytest.mark.parametrize(
    ("name", "storage", "modes"),
    [
        ("llama", "virtual", ["greedy", "beams", "continued"]),
        ("llama", "growing", ["lookup", "chunks"]),
        ("gemma3_text", "contiguous", ["greedy"]),
        ("gpt_oss", "virtual", ["greedy"]),  # sinks
        ("mimo_v2_flash", "virtual", ["beams"]),  # keys and values of two widths
        ("lfm2", "growing", ["continued"]),  # states beside them
    ],
)
def test_tokens_are_those_of_a_cache_that_was_codes(name: str, storage: str, modes: list[str]) -> None:
    _check(name, storage, modes)


@pytest.mark.ci
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["bamba", "gemma2", "gpt2", "llama4_text", "phi3", "qwen2"])
def test_tokens_of_modes_by_storage(name: str, storage: str) -> None:
    _check(name, storage, modes_of(name)[STORAGES.index(storage) :: len(STORAGES)])


@pytest.mark.parametrize("storage", ["virtual", "growing"])
@pytest.mark.parametrize(
    ("kv_dtype", "formats"),
    [
        ("k8v4", [("int8", "int4")] * 3),
        ({"default": "int4", "first:1": "auto", 2: "int8"}, [None, ("int4", "int4"), ("int8", "int8")]),
    ],
)
def test_every_format_and_layers_of_their_own(
    kv_dtype: Any, formats: list[Any], storage: str, tmp_path: Path
) -> None:
    model = model_of("gemma3_text")
    kept = {layer: one for layer, one in enumerate(formats) if one}
    ids, mask = prompts()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids, **{CACHE: CodedTwin(model.config, kept)}, **options)
    cache = quire_cache(model, storage, kv_dtype=kv_dtype)
    assert torch.equal(model.generate(ids, **{CACHE: cache}, **options), want)
    cache.save(tmp_path / "cache")
    loaded = QuireCache.load(tmp_path / "cache", model, **OPTIONS)
    assert loaded.kv_dtype == cache.kv_dtype
    for mine, theirs in zip(loaded, cache, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def _check(name: str, storage: str, modes: list[str]) -> None:
    model = model_of(name)
    like = _cache(model)
    for mode in modes:
        want = as_lists(MODES[mode](model, lambda: int8_twin(like)))
        assert as_lists(MODES[mode](model, lambda: _cache(model, storage))) == want, mode


@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", "k8v4"), ("gemma3_text", "int8")])
def test_tokens_under_accelerate(name: str, kv_dtype: str) -> None:
    pytest.importorskip("quire._native")
    model = model_of(name)
    ids, mask = prompts()
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    with _accelerated(model):
        cache = quire_cache(model, kv_dtype=kv_dtype)
        got = model.generate(ids, **{CACHE: cache}, **options)
        assert cache.formats.is_known
    pair = ("int8", "int4") if kv_dtype == "k8v4" else ("int8", "int8")
    twin = CodedTwin(model.config, dict.fromkeys(range(len(cache.row_layers)), pair), cache.key_offsets)
    want = model.generate(ids, **{CACHE: twin}, **options)
    assert torch.equal(got, want)


# The codes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BACKENDS)
def test_codes_are_those_that_an_engine_keeps(name: str, dtype: torch.dtype) -> None:
    model = model_of("llama")
    keys, values = _keys(1, 37, dtype=dtype), torch.randn(1, HEADS, 37, WIDTH).to(dtype)
    offsets = {0: torch.randn(HEADS, WIDTH)}
    cache = _cache(model, key_offsets=offsets, backend=name)
    cache.update(keys[:, :, :20], values[:, :, :20], 0)
    cache.update(keys[:, :, 20:], values[:, :, 20:], 0)

    spec = with_kv_dtype(KVSpec.from_config(model.config, dtype=str(dtype).removeprefix("torch.")), "int8")
    paged = PagedStorage(spec, 5, 8)
    view = reference_attention.KVView(**{**paged.view(0).__dict__, "k_offset": offsets[0]})
    reference_attention.write(view, keys[0].transpose(0, 1), values[0].transpose(0, 1), torch.arange(37))
    for mine, theirs in zip(
        _codes(cache.layers[0]), (view.k, view.k_scale, view.v, view.v_scale), strict=True
    ):
        assert theirs is not None
        assert torch.equal(mine[0], theirs.transpose(0, 1).flatten(1, 2)[:, :37])


def test_codes_of_a_step_are_those_of_its_keys_and_offsets_the_engine_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("quire._native")
    model = model_of("llama")
    ids = prompts()[0][1:2]
    offset = torch.full((HEADS, WIDTH), 0.5)
    measured: list[Any] = []

    def measure(prepared: Any, spec: KVSpec) -> KeyOffsets:
        measured.append((prepared, spec))
        return KeyOffsets({0: offset}, frozenset())

    monkeypatch.setattr(acceleration, "measure_key_offsets", measure)
    with _accelerated(model), torch.no_grad():
        plain, coded = quire_cache(model), _cache(model)
        for cache in (plain, coded, _cache(model)):
            model(ids, **{CACHE: cache}, use_cache=True)
    assert len(measured) == 1  # of a model, once
    assert torch.equal(coded.key_offsets.pop(0), offset)
    by_update = _cache(model, key_offsets={0: offset})
    by_update.update(plain.layers[0].keys, plain.layers[0].values, 0)
    for mine, theirs in zip(_codes(coded.layers[0]), _codes(by_update.layers[0]), strict=True):
        assert torch.equal(mine, theirs)


# What is taken off keys.


def test_offsets_are_the_mean_of_the_first_keys_and_stay() -> None:
    cache = _cache(model_of("llama"), max_length=2048)
    keys = _keys(2, 700)
    first = cache.update(keys, keys.flip(-1), 0)[0]
    mean = keys[:, :, -256:].double().mean((0, 2))
    torch.testing.assert_close(cache.key_offsets[0].double(), mean, rtol=1e-5, atol=1e-4)
    assert list(cache.key_offsets) == [0]  # the other layer has no token yet
    assert (first - keys).abs().max() < 0.2  # and 40 without one
    before = cache.key_offsets[0]
    cache.update(_keys(2, 5) + 7, keys[:, :, :5], 0)
    cache.layers[0].crop(-705)
    cache.update(_keys(2, 5) + 7, keys[:, :, :5], 0)
    assert torch.equal(cache.key_offsets[0], before)
    assert torch.equal(cache.fork().key_offsets[0], before)
    other = _cache(model_of("llama"), key_offsets=cache.key_offsets)
    cache.reset()
    assert not cache.key_offsets
    for one in (cache, other):
        one.update(_keys(1, 9) + 7, keys[:1, :, :9], 0)
    assert not torch.equal(cache.key_offsets[0], before)
    other.reset()
    assert torch.equal(other.key_offsets[0], before)  # given, not measured


def test_one_key_tells_nothing_and_even_keys_need_nothing() -> None:
    assert key_offset(_keys(1, 1)[0].transpose(0, 1), "int8") is None
    for count in (2, 3, 30):
        assert key_offset(_keys(1, count)[0].transpose(0, 1), "int8") is not None
    assert key_offset(torch.randn(30, HEADS, WIDTH), "int8") is None
    cache = _cache(model_of("llama"))
    cache.update(_keys(1, 1), _keys(1, 1), 0)
    assert not cache.key_offsets


def test_layers_that_cannot_have_an_offset_stay_in_the_models_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("quire._native")
    model = model_of("gemma2")
    monkeypatch.setattr(acceleration, "measure_key_offsets", lambda *_: KeyOffsets({}, frozenset({1})))
    ids = prompts()[0][1:2]
    options = {"max_new_tokens": 4, "do_sample": False}
    with _accelerated(model):
        cache = _cache(model)
        got = model.generate(ids, **{CACHE: cache}, **options)
        assert [layer.shape.is_coded for layer in cache.row_layers] == [True, False]
        cache.save(tmp_path / "cache")
        # One that was measured by the model's own forward goes on there.
        own = _cache(model, key_offsets={0: torch.ones(HEADS, WIDTH)})
        assert torch.equal(model.generate(ids, **{CACHE: own}, **options), got)
    assert "layers 1 of a QuireCache keep K and V in float32" in caplog.text
    want = model.generate(ids, **{CACHE: CodedTwin(model.config, {0: ("int8", "int8")}, {})}, **options)
    assert torch.equal(got, want)
    loaded = QuireCache.load(tmp_path / "cache", model, **OPTIONS)
    assert [layer.shape.is_coded for layer in loaded.row_layers] == [True, False]


# Memory.


@pytest.mark.parametrize("storage", STORAGES)
def test_memory_holds_nearly_twice_the_tokens(storage: Any) -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=2, vocab_size=64
    )
    limit, token = 16 << 20, 2 * 2 * 8 * 64 * 2
    tokens = torch.zeros(1, 8, int(1.9 * limit / token), 64, dtype=torch.bfloat16)
    spare = 256 if storage == "growing" else 0  # a buffer has room for some more
    for kv_dtype, count in (("auto", limit // token + 1), ("int8", tokens.shape[2] - spare)):
        cache = QuireCache(
            config, storage=storage, kv_memory=limit, max_length=count, piece_size=4096, kv_dtype=kv_dtype
        )
        new = tokens[:, :, :count]
        for layer in (0, 1):
            if kv_dtype == "auto":
                with pytest.raises(CapacityError):
                    cache.update(new, new, layer)
                break
            cache.update(new, new, layer)
        assert cache.used_bytes <= limit


def test_a_window_gives_back_what_lies_behind_it() -> None:
    cache = _cache(model_of("mistral"), max_length=100_000)  # both layers slide
    token = torch.randn(1, HEADS, 64, WIDTH)
    used: list[int] = []
    for _ in range(120):
        for layer in (0, 1):
            cache.update(token, token, layer)
        used.append(cache.used_bytes)
    assert max(used[60:]) <= max(used[:60]) + 64 * 1024
    assert cache.layers[0].kept > 7000


# Files.


@pytest.mark.parametrize("storage", STORAGES)
def test_a_file_keeps_codes_and_offsets(storage: Any, tmp_path: Path) -> None:
    model = model_of("gemma3_text")
    cache = _cache(model)
    ids = torch.randint(3, 131, (2, 37), generator=torch.Generator().manual_seed(1))
    model.generate(ids, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
    # As if its keys needed one: any will do for what is stored from now on.
    cache.formats.set_offset(1, torch.randn(HEADS, WIDTH))
    cache.save(tmp_path / "one")
    loaded = QuireCache.load(tmp_path / "one", model, storage=storage, **OPTIONS)
    assert loaded.kv_dtype == "int8"
    assert torch.equal(loaded.key_offsets[1], cache.key_offsets[1])
    for mine, theirs in zip(loaded.row_layers, cache.row_layers, strict=True):
        first = theirs.first_kept() - theirs.rows[0].origin
        at = mine.first_kept() - mine.rows[0].origin
        for ours, before in zip(_codes(mine), _codes(theirs), strict=True):
            assert torch.equal(ours[:, :, at:], before[:, :, first:])
    more = torch.randint(3, 131, (2, 50), generator=torch.Generator().manual_seed(2))
    loaded.save(tmp_path / "two", model)
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    again = QuireCache.load(tmp_path / "two", model, storage=storage, kv_dtype="int8", **OPTIONS)
    answers = [
        model.generate(more, **{CACHE: one}, max_new_tokens=6, do_sample=False) for one in (loaded, again)
    ]
    assert torch.equal(*answers)


def test_a_file_of_another_format_or_with_a_wrong_byte_is_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    for name, cache in (("codes", _cache(model)), ("plain", quire_cache(model))):
        for layer in (0, 1):
            cache.update(_keys(1, 20), _keys(1, 20, seed=1), layer)
        cache.save(tmp_path / name, model)
    with pytest.raises(LoadError, match="of kv_dtype='auto', got 'int8'"):
        QuireCache.load(tmp_path / "codes", model, kv_dtype="auto", **OPTIONS)
    with pytest.raises(LoadError, match="of kv_dtype='int8', got 'auto'"):
        QuireCache.load(tmp_path / "plain", model, kv_dtype="int8", **OPTIONS)
    content = bytearray((tmp_path / "codes").read_bytes())
    content[-1] ^= 1  # of the last layer's offset
    (tmp_path / "codes").write_bytes(content)
    with pytest.raises(LoadError, match="damaged"):
        QuireCache.load(tmp_path / "codes", model, **OPTIONS)


# What cannot be.


def test_what_cannot_be_kept_so_is_refused() -> None:
    llama = model_of("llama").config
    offset = torch.zeros(HEADS, WIDTH)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (llama, {"kv_dtype": "int3"}, "expected one of auto"),
        (llama, {"kv_dtype": "bfloat16"}, "float32"),
        (model_of("deepseek_v3").config, {"kv_dtype": "int8"}, "latents"),
        (T5Config(), {"kv_dtype": "int8"}, "encoder-decoder"),
        (LlamaConfig(hidden_size=80, num_attention_heads=8), {"kv_dtype": "int8"}, "multiple of 8"),
        (llama, {"key_offsets": {0: offset}}, "kv_dtype='auto'"),
        (llama, {"kv_dtype": "int8", "key_offsets": {2: offset}}, "0, 1, got offsets of layer 2"),
        (llama, {"kv_dtype": "int8", "key_offsets": {1: offset[0]}}, r"\[2, 16\]"),
        (llama, {"kv_dtype": "int8", "key_offsets": {1: offset / 0}}, "finite"),
    ]
    for config, options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            QuireCache(config, **options)


def test_a_back_end_without_the_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(device_of("python")), "kv_formats", ())
    with pytest.raises(ArgumentError, match="the model dtype alone, got int8"):
        _cache(model_of("llama"), backend="python")


def test_keys_of_another_kind_are_refused() -> None:
    cache = _cache(model_of("llama"))
    with pytest.raises(ArgumentError, match="as the config says"):
        cache.update(torch.zeros(1, HEADS, 3, 8), torch.zeros(1, HEADS, 3, 8), 0)
    plain = quire_cache(model_of("llama"), kv_dtype="float32")
    half = torch.zeros(1, HEADS, 3, WIDTH, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="kv_dtype='float32' says"):
        plain.update(half, half, 0)
    assert cache.used_bytes == plain.used_bytes == 0
    cache.update(_keys(1, 3), _keys(1, 3), 0)
