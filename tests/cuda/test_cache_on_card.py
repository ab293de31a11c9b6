"""`QuireCache` under an accelerated model on the fake card: the tokens of `DynamicCache`, with prompts on the card."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hf_case
from support.cache_argument import CACHE
from support.card import card, counted
from support.hf_case import MODES, as_lists, expected, model_of, prompts, quire_cache
from transformers import DynamicCache, PreTrainedModel

from quire.errors import ArgumentError
from quire.hf import QuireCache, accelerate, restore

BACKEND = "torch@card:0"


@pytest.fixture
def device() -> torch.device:
    return card()


@pytest.fixture
def on_card(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Copies a model there, and from then on prompts and assistants of every mode are on the card too."""
    made: list[PreTrainedModel] = []

    def move(name: str) -> PreTrainedModel:
        model, assistant = (copy.deepcopy(model_of(known)).to(device) for known in (name, "llama"))
        ids, mask = prompts()
        monkeypatch.setattr(hf_case, "prompts", lambda: (ids.to(device), mask.to(device)))
        monkeypatch.setattr(hf_case, "model_of", lambda _: assistant)
        made.append(model)
        return model

    yield move
    for model in made:
        restore(model)


def cache_of(model: PreTrainedModel, storage: str = "growing") -> QuireCache:
    return quire_cache(model, storage, backend=BACKEND, max_length=64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.ci)])
def test_every_mode(name: str, mode: str, on_card: Any) -> None:
    wanted = expected(name, mode)
    model = on_card(name)
    assert accelerate(model, backend=BACKEND).level == "whole"
    for storage in ("growing", "contiguous"):
        assert as_lists(MODES[mode](model, lambda storage=storage: cache_of(model, storage))) == wanted


def test_another_cache_is_served_by_the_models_own_forward(on_card: Any) -> None:
    wanted = expected("llama", "greedy")
    model = on_card("llama")
    accelerate(model, backend=BACKEND)
    assert as_lists(MODES["greedy"](model, lambda: DynamicCache(config=model.config))) == wanted
    ids = hf_case.prompts()[0]
    with torch.no_grad(), pytest.raises(ArgumentError, match="which runs the model, reads"):
        model(ids, **{CACHE: quire_cache(model)})


def test_a_model_of_the_host_is_lent_to_the_card(device: torch.device) -> None:
    """`accelerate` moves it there and `restore` back."""
    model, wanted = copy.deepcopy(model_of("llama")), expected("llama", "greedy")
    accelerate(model, backend=BACKEND)
    try:
        assert {parameter.device for parameter in model.parameters()} == {device}
        assert as_lists(MODES["greedy"](model, lambda: cache_of(model))) == wanted
    finally:
        restore(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert as_lists(MODES["greedy"](model, lambda: DynamicCache(config=model.config))) == wanted


def test_a_file_goes_from_the_card_to_the_host(on_card: Any, tmp_path: Path) -> None:
    model = on_card("llama")
    accelerate(model, backend=BACKEND)
    cache = cache_of(model)
    ids, _ = hf_case.prompts()
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    cache.save(tmp_path / "one.kv")
    host: Any = QuireCache.load(tmp_path / "one.kv", model_of("llama"))
    with torch.no_grad():
        want = DynamicCache(config=model.config)
        model(ids, **{CACHE: want})
    for (k, v, _), (k_twin, v_twin, _) in zip(host, want, strict=True):
        torch.testing.assert_close(k, k_twin.cpu(), atol=1e-4, rtol=0)
        torch.testing.assert_close(v, v_twin.cpu(), atol=1e-4, rtol=0)


def test_logits_stay_on_the_card(on_card: Any) -> None:
    """A step copies its ids and a hash of the weights here, and its numbers and tables there."""
    model = on_card("llama")
    accelerate(model, backend=BACKEND)
    cache = cache_of(model)
    ids, _ = hf_case.prompts()
    with torch.inference_mode():
        for _ in range(3):
            with counted() as counts:
                logits = model(ids, **{CACHE: cache}).logits
            assert logits.device == ids.device
            assert (counts.to_card, counts.to_host, counts.to_host_bytes) == (1, 2, ids.nbytes + 8)
            assert counts.races == 0
            ids = logits[:, -1:].argmax(-1)
