"""A forward gets its cache by the keyword of its own signature, in every installed transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected
from support.hand_loop import Loop
from transformers import PreTrainedModel

from quire.hf import QuireCache, accelerate, restore
from quire.model import PreparedModel
from quire.model.cache_keyword import cache_keyword, given_cache
from quire.weights import load


def test_the_name_comes_from_the_signature() -> None:
    def older(input_ids: Any, past_key_values: Any = None) -> None: ...

    def newer(input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...

    @functools.wraps(newer)
    def wrapped(*args: Any, **kwargs: Any) -> None: ...

    def neither(input_ids: Any, **kwargs: Any) -> None: ...

    assert [cache_keyword(function) for function in (older, newer, wrapped, neither)] == [
        "past_key_values", "cache", "cache", None,
    ]  # fmt: skip
    assert given_cache("cache", {"cache": 1}) == 1
    assert given_cache("cache", {"past_key_values": 2}) == 2  # which transformers takes too
    assert given_cache("past_key_values", {"cache": 3}) is None  # which means something else, or nothing
    assert given_cache(None, {"cache": 4, "past_key_values": 5}) is None


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_whose_forward_has_the_other_name_runs(name: str) -> None:
    """A checkpoint's own code may be older or newer than the library."""
    model = tiny("llama")
    _rename(model, name)
    prepared = PreparedModel(load((model, None)))
    assert Loop(prepared, PROMPTS).run(MAX_TOKENS)[0] == expected("llama")[1]
    prepared.restore()


def test_generate_takes_a_quire_cache_by_every_name_that_its_forward_takes() -> None:
    model: Any = tiny("llama")
    names = ["past_key_values", "cache"] if cache_keyword(model.forward) == "cache" else ["past_key_values"]
    ids = torch.tensor([PROMPTS[3]])
    want = expected("llama")[1][3]
    for accelerated in (False, True):
        if accelerated:
            pytest.importorskip("quire._native")
            assert accelerate(model).level == "whole"
        for name in names:
            cache = QuireCache(model.config, kv_memory="16MiB", max_length=256)
            got = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                **{name: cache},
            )
            assert got[0, ids.shape[1] :].tolist() == want, (name, accelerated)
            assert cache.get_seq_length() == ids.shape[1] + MAX_TOKENS - 1
    restore(model)


def _rename(model: PreTrainedModel, name: str) -> None:
    """Have the model's forward take its cache as `name`."""
    own: Any = model.forward
    installed = cache_keyword(own)
    assert installed is not None

    def newer(
        input_ids: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        logits_to_keep: Any = 0,
        **kwargs: Any,
    ) -> Any:
        return own(
            input_ids=input_ids,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **{installed: cache},
            **kwargs,
        )

    def older(
        input_ids: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        logits_to_keep: Any = 0,
        **kwargs: Any,
    ) -> Any:
        return newer(input_ids, position_ids, past_key_values, logits_to_keep, **kwargs)

    model.__dict__["forward"] = newer if name == "cache" else older
