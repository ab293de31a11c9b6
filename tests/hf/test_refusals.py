"""Unsupported uses are refused with a clear error and change nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import state_layers
from support.cache_argument import CACHE
from support.hf_case import model_of, quire_cache
from transformers import DynamicCache
from transformers.cache_utils import Cache

from quire.errors import ArgumentError
from quire.hf import QuireCache, accelerate, restore


def _filled() -> QuireCache:
    cache = quire_cache(model_of("llama"))
    k = torch.randn(2, 2, 5, 16)
    for layer in (0, 1):
        cache.update(k, k, layer)
    return cache


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.randn(3, 2, 1, 16), "reset"),
        (torch.randn(2, 4, 1, 16), "reset"),
        (torch.randn(2, 2, 1, 8), "reset"),
        (torch.randn(2, 2, 1, 16, dtype=torch.bfloat16), "float32"),
        (torch.empty(2, 2, 1, 16, device="meta"), "CPU"),
        (torch.randn(2, 2, 1, 16, requires_grad=True), "no_grad"),
    ],
)
def test_tokens_of_another_kind(tensor: torch.Tensor, message: str) -> None:
    cache = _filled()
    before = cache.layers[0].keys.clone()
    with pytest.raises(ArgumentError, match=message):
        cache.update(tensor, tensor, 0)
    assert torch.equal(cache.layers[0].keys, before)
    assert cache.get_seq_length() == 5


def test_what_would_take_the_cache_elsewhere() -> None:
    cache = _filled()
    assert cache.to("cpu") is cache
    attempts: list[Any] = [
        lambda: cache.to("cuda"),
        lambda: cache.to(torch.float16),
        lambda: cache.offload(0),
        lambda: cache.prefetch(0),
        lambda: cache.layers[0].offload(),
        lambda: pickle.dumps(cache),
        lambda: copy.deepcopy(cache.layers[0]),
        lambda: setattr(cache.layers[0], "keys", torch.zeros(1)),
        lambda: cache.layers[0].reorder_cache(torch.tensor([1, 0])),
    ]
    for attempt in attempts:
        with pytest.raises(ArgumentError, match="expected"):
            attempt()
    assert cache.get_seq_length() == 5


def test_counts_and_rows_out_of_range() -> None:
    cache = _filled()
    for call in (
        lambda: cache.crop(1),
        lambda: cache.crop(-6),
        lambda: cache.reorder_cache(torch.tensor([0, 2])),
        lambda: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        lambda: cache.batch_repeat_interleave(0),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert cache.get_seq_length() == 5
    cache.crop(0)
    cache.crop(-5)
    assert cache.get_seq_length() == 0


def test_cropping_a_window_that_recorded_nothing() -> None:
    cache = quire_cache(model_of("mistral"))
    k = torch.randn(1, 2, 20, 16)
    for num_tokens in (20, 1, 1, 1, 1, 1):
        for layer in (0, 1):
            cache.update(k[:, :, :num_tokens], k[:, :, :num_tokens], layer)
    with pytest.raises(ArgumentError, match="activate_past_recording"):
        cache.crop(-15)


def test_arguments() -> None:
    config = model_of("llama").config
    for options in ({"storage": "paged"}, {"max_length": 0}, {"kv_memory": "some"}, {"kv_memory": 0}):
        with pytest.raises(ArgumentError):
            QuireCache(config, **options)
    with pytest.raises(ArgumentError, match=r"model\.config"):
        QuireCache(model_of("llama"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        accelerate("llama")  # type: ignore[arg-type]


def test_compiling_is_refused() -> None:
    cache = _filled()
    k = torch.randn(2, 2, 1, 16)
    compiled = torch.compile(lambda: cache.update(k, k, 0)[0] * 2, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compile cannot trace a QuireCache"):
        compiled()
    assert cache.layers[0].get_seq_length() == 5
    assert not cache.is_compileable


@pytest.mark.parametrize("name", ["mpt", "llama"])
@pytest.mark.parametrize("accelerated", [False, True])
def test_generating_without_a_cache_on_one(name: str, accelerated: bool) -> None:
    """MPT's config says use_cache=False: each step would store all tokens again, behind what is there."""
    model, ids = model_of(name), torch.randint(3, 131, (2, 9))
    options = {"max_new_tokens": 4, "do_sample": False}
    if accelerated:
        accelerate(model)
    try:
        cache = quire_cache(model)
        without: dict[str, Any] = {} if name == "mpt" else {"use_cache": False}
        with pytest.raises(ArgumentError, match="use_cache=True"):
            model.generate(ids, **{CACHE: cache}, **without, **options)
        assert cache.get_seq_length() == cache.used_bytes == 0
        answer = model.generate(ids, **{CACHE: cache}, use_cache=True, **options)
        assert cache.get_seq_length() == 12
        with pytest.raises(ArgumentError, match="use_cache=True"):  # on a filled one too
            model.generate(answer.repeat(1, 2), **{CACHE: cache}, **without, **options)
        assert cache.get_seq_length() == 12
    finally:
        restore(model)
    twin = DynamicCache(config=model.config)
    assert torch.equal(answer, model.generate(ids, **{CACHE: twin}, use_cache=True, **options))


def test_it_is_a_dynamic_cache() -> None:
    cache = quire_cache(model_of("llama"))
    assert isinstance(cache, DynamicCache)
    assert isinstance(cache, Cache)
    assert cache.is_croppable
    assert len(cache) == 2
    assert cache.get_max_length() == -1


def test_a_crop_that_one_layer_cannot_do_changes_none() -> None:
    model = model_of("gemma3_text")  # windows and full layers
    cache = quire_cache(model)
    with torch.no_grad():
        for num_tokens in (40, 1, 1, 1, 1):
            model(torch.randint(3, 120, (1, num_tokens)), **{CACHE: cache}, use_cache=True)
    before = [tensor.clone() for k, v, _ in cache for tensor in (k, v)]
    for count, words in ((1, "0 or below"), (-45, "at most the 44 tokens"), (-30, "activate_past_recording")):
        for _ in range(2):
            cache.layers.reverse()  # whichever comes first
            with pytest.raises(ArgumentError, match=words):
                cache.crop(count)
            assert [layer.get_seq_length() for layer in cache.layers] == [44] * len(cache.layers)
    after = [tensor for k, v, _ in cache for tensor in (k, v)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_crop_of_states_that_recorded_nothing_changes_no_layer() -> None:
    model = model_of("bamba")
    cache = quire_cache(model)
    with torch.no_grad():
        model(torch.randint(3, 120, (1, 9)), **{CACHE: cache}, use_cache=True)
    rows = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    cache.layers.reverse()
    with pytest.raises(ArgumentError, match="activate_past_recording"):
        cache.crop(-2)
    assert rows
    assert all(layer.get_seq_length() == 9 for layer in rows)


@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_a_crop_of_recurrent_states_is_refused_and_changes_no_layer(name: str) -> None:
    model = model_of(name)
    cache = quire_cache(model)
    cache.activate_past_recording()
    with pytest.raises(ArgumentError, match="a filled cache"):
        cache.crop(-1)
    with torch.no_grad():
        model(torch.randint(3, 120, (1, 9)), **{CACHE: cache}, use_cache=True)
    states = [
        state.clone()
        for layer in cache.layers
        if hasattr(layer, "recurrent_states")
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
    ]
    with pytest.raises(ArgumentError, match=r"no recurrent states.* fork\(\)"):
        cache.crop(-2)
    after = [
        state
        for layer in cache.layers
        if hasattr(layer, "recurrent_states")
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
    ]
    assert states
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    assert cache.get_seq_length() == 9


def test_rows_of_states_alone_are_counted_before_they_are_reordered() -> None:
    model = state_layers.tiny_model("mamba2")
    cache = quire_cache(model)
    with torch.no_grad():
        model(torch.randint(3, 60, (2, 9)), **{state_layers.keyword_of(model): cache}, use_cache=True)
    with pytest.raises(ArgumentError, match="rows of 0 to 1"):
        cache.reorder_cache(torch.tensor([0, 2]))
    before = [layer.recurrent_states[0].clone() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer, state in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.recurrent_states[0], state[[1, 0]])
