"""One prepared model at a time: a second is refused, and the changes of a dropped one are undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny_llm
from support.cache_argument import CACHE
from support.cache_case import BACKENDS, LONG_BACKENDS

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.hf import QuireCache, accelerate, restore

PROMPT = list(range(5, 30))
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def open_llm(model: Any, **options: Any) -> LLM:
    return LLM((model, None), kv_memory="2MiB", max_num_seqs=4, **options)


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_second_llm_on_a_model_is_refused_and_the_first_goes_on(backend: str) -> None:
    model = tiny_llm.model()
    plain = model(torch.tensor([PROMPT])).logits
    with open_llm(model, backend=backend) as llm:
        want = tokens(llm)
        for _ in range(2):
            with pytest.raises(
                ArgumentError, match="Qwen3ForCausalLM that is not in use, got one that an open LLM"
            ):
                open_llm(model, backend=backend)
        assert tokens(llm) == want
    with open_llm(model, backend=backend) as llm:
        assert tokens(llm) == want
    assert torch.equal(model(torch.tensor([PROMPT])).logits, plain)


def test_accelerate_and_an_llm_refuse_each_other() -> None:
    model, ids = tiny_llm.model(), torch.tensor([PROMPT])
    plain = model(ids).logits

    def accelerated() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, **{CACHE: QuireCache(model.config, kv_memory="16MiB")}).logits

    with open_llm(model) as llm:
        want = tokens(llm)
        with pytest.raises(ArgumentError, match="close that LLM"):
            accelerate(model)
        restore(model)  # nothing of ours to undo
        assert tokens(llm) == want
    accelerate(model)
    logits = accelerated()
    with pytest.raises(ArgumentError, match=r"quire\.hf\.restore"):
        open_llm(model)
    assert torch.equal(accelerated(), logits)
    restore(model)
    with open_llm(model) as llm:
        assert tokens(llm) == want
    assert torch.equal(model(ids).logits, plain)


def _let_drop(make: Callable[[], Any]) -> None:
    make()


@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_an_llm_that_was_dropped_without_close_is_undone_by_the_next(backend: str) -> None:
    model = tiny_llm.model()
    plain = model(torch.tensor([PROMPT])).logits
    with open_llm(model, backend=backend) as llm:
        want = tokens(llm)
    _let_drop(lambda: tokens(open_llm(model, backend=backend)))
    with open_llm(model, backend=backend) as llm:
        assert tokens(llm) == want
    assert torch.equal(model(torch.tensor([PROMPT])).logits, plain)


@pytest.mark.skipif("native" not in BACKENDS, reason="torch cannot copy oneDNN's packed weights")
def test_a_copy_of_a_model_that_is_run_is_another_model() -> None:
    model = tiny_llm.model()
    with open_llm(model, backend="python") as llm:
        want = tokens(llm)
        with open_llm(copy.deepcopy(model), backend="python") as other:
            assert tokens(other) == want
        assert tokens(llm) == want
