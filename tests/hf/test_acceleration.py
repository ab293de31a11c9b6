"""`accelerate`: the same tokens on Quire's kernels; the model's own forward for other calls; `restore` undoes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from support.architectures import CORE
from support.cache_argument import CACHE
from support.hf_case import (
    MODES,
    STORAGES,
    WITH_STATES,
    as_lists,
    expected,
    model_of,
    modes_of,
    prompts,
    quire_cache,
)
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from quire.errors import CapacityError
from quire.hf import QuireCache, accelerate, acceleration, restore

pytest.importorskip("quire._native")


@contextmanager
def _accelerated(model: PreTrainedModel) -> Iterator[None]:
    done = accelerate(model)
    assert done.level == "whole", done.reason
    try:
        yield
    finally:
        restore(model)


class _Counter:
    """How many forwards were Quire's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run = acceleration._Steps._run

        def counted(*args: object) -> object:
            answer = run(*args)  # type: ignore[arg-type]
            self.count += answer is not None
            return answer

        monkeypatch.setattr(acceleration._Steps, "_run", counted)


QUICK = ("llama", "gemma3_text", "gpt2", "gpt_oss", "llama4_text", "mimo_v2_flash")


@pytest.mark.parametrize("name", QUICK)
def test_every_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other mode of a model, the others of the next; all of each below."""
    _check(name, ["virtual"], monkeypatch, slice(QUICK.index(name) % 2, None, 2))


@pytest.mark.ci
@pytest.mark.parametrize(
    # Tokens of gemma3n_text turn on rounding; of latents the linear layers alone are packed.
    "name",
    [name for name in CORE if name not in ("gemma3n_text", "deepseek_v3")],
)
def test_every_architecture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, list(STORAGES), monkeypatch)


def _check(
    name: str, storages: list[str], monkeypatch: pytest.MonkeyPatch, modes: slice = slice(None)
) -> None:
    model = model_of(name)
    wanted = {mode: expected(name, mode) for mode in modes_of(name)[modes]}
    with _accelerated(model):
        for storage in storages:
            for mode, tokens in wanted.items():
                counter = _Counter(monkeypatch)
                got = as_lists(MODES[mode](model, lambda storage=storage: quire_cache(model, storage)))
                assert got == tokens, (mode, storage)
                padded = mode not in ("lookup", "assisted", "continued")
                assert counter.count >= (0 if padded and name == "llama4_text" else 4), mode


@pytest.mark.ci
@pytest.mark.parametrize("storage", STORAGES[1:])
def test_windows_and_chunks_on_plain_memory(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for growing buffers to leave their first tokens behind."""
    for name in ("gemma3_text", "llama4_text"):
        model = model_of(name)
        ids = prompts()[0][1:2]
        options = {"max_new_tokens": 170, "min_new_tokens": 170, "do_sample": False}
        want = model.generate(ids, **{CACHE: DynamicCache(config=model.config)}, **options)
        with _accelerated(model):
            counter = _Counter(monkeypatch)
            got = model.generate(ids, **{CACHE: quire_cache(model, storage)}, **options)
            assert torch.equal(got, want)
            assert counter.count == 170


def test_logits_are_those_of_the_model() -> None:
    model = model_of("qwen3")
    ids, mask = prompts()
    with torch.no_grad():
        want = model(ids, attention_mask=mask, **{CACHE: DynamicCache(config=model.config)}).logits
        with _accelerated(model):
            whole = model(ids, attention_mask=mask, **{CACHE: quire_cache(model)}, use_cache=True).logits
            last = model(ids, mask, None, quire_cache(model), logits_to_keep=2).logits  # by position
    real = mask.bool()
    torch.testing.assert_close(whole[real], want[real], atol=1e-4, rtol=0)
    assert not whole[~real].any()
    torch.testing.assert_close(last, want[:, -2:], atol=1e-4, rtol=0)
    whole[0, 0, 0] = 1.0  # an ordinary tensor, not one of inference mode


def test_what_a_step_does_not_give_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    ids, mask = prompts()
    hole = mask.clone()
    hole[1, 4] = 0
    with _accelerated(model), torch.no_grad():
        counter = _Counter(monkeypatch)
        for options in (
            {"output_hidden_states": True},
            {"attention_mask": hole},
            {"labels": ids},
            {"return_dict": False},
        ):
            cache = quire_cache(model)
            got = model(ids, **{CACHE: cache}, use_cache=True, **options)
            want = model(ids, **{CACHE: DynamicCache(config=model.config)}, use_cache=True, **options)
            assert torch.equal(
                got[1] if "labels" in options else got[0], want[1] if "labels" in options else want[0]
            )
            assert cache.get_seq_length() == ids.shape[1]
            assert type(got) is type(want)
        assert counter.count == 0
        # And a cache goes on from either: padding is zeros, not what memory held.
        cache = quire_cache(model)
        model(ids, attention_mask=mask, **{CACHE: cache}, use_cache=True)
        assert counter.count == 1
        twin = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, **{CACHE: twin}, use_cache=True)
        longer = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
        position = longer.sum(1, keepdim=True) - 1
        outputs = [
            model(
                torch.full((3, 1), 9), attention_mask=longer, position_ids=position, **{CACHE: one},
                use_cache=True, output_hidden_states=True,
            ).logits
            for one in (cache, twin)
        ]  # fmt: skip
        assert counter.count == 1
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-3, rtol=0)


def test_logits_are_nobody_elses_in_any_mode() -> None:
    """Whole or padded, with or without inference mode: ordinary tensors, not written by a later step."""
    model = model_of("qwen3")
    ids, mask = prompts()
    with _accelerated(model):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                cache = quire_cache(model)
                padded = model(ids, attention_mask=mask, **{CACHE: cache}, use_cache=True).logits
                whole = [model(ids, **{CACHE: quire_cache(model)}, use_cache=True).logits for _ in "ab"]
                kept = whole[0].clone()
                model(ids.flip(1), **{CACHE: quire_cache(model)}, use_cache=True)
            assert not padded.is_inference()
            assert not whole[0].is_inference()
            assert torch.equal(whole[0], kept)
            assert torch.equal(whole[0], whole[1])
            whole[0].zero_()
            assert torch.equal(whole[1], kept)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_that_was_emptied_takes_another_batch(storage: str) -> None:
    """Its rows are others then, and as many as the new batch has; emptied as a whole or layer by layer."""
    model = model_of("llama")
    ids, mask = prompts()
    with _accelerated(model):

        def tokens(cache: Any, rows: slice) -> list[list[int]]:
            options = {"attention_mask": mask[rows], "max_new_tokens": 4, "do_sample": False}
            return as_lists(cast(Any, model).generate(ids[rows], **{CACHE: cache}, **options))

        cache = quire_cache(model, storage)
        for rows in (slice(1, 2), slice(0, 3), slice(0, 2)):
            assert tokens(cache, rows) == tokens(quire_cache(model, storage), rows)
            for layer in cache.layers:
                layer.reset()
        cache.reset()
        assert tokens(cache, slice(2, 3)) == tokens(quire_cache(model, storage), slice(2, 3))


class _Threads(BaseStreamer):
    """Notes how many threads torch has where generate computes between two forwards."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def put(self, value: torch.Tensor) -> None:
        if value.numel() < 3 * 4:  # not the prompts, which come first
            self.seen.add(torch.get_num_threads())

    def end(self) -> None:
        pass


def test_generate_has_one_torch_thread_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    ids = prompts()[0][:1]
    in_steps: set[int] = set()
    answer = acceleration._Steps.answer

    def noted(*args: Any) -> Any:
        in_steps.add(torch.get_num_threads())
        return answer(*args)

    monkeypatch.setattr(acceleration._Steps, "answer", noted)

    def between(cache: Any, **options: Any) -> set[int]:
        threads = _Threads()
        options = {"max_new_tokens": 3, **options}
        cast(Any, model).generate(ids, **{CACHE: cache}, do_sample=False, streamer=threads, **options)
        assert torch.get_num_threads() == 3
        return threads.seen

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with _accelerated(model):
            assert between(quire_cache(model)) == {1}
            assert between(quire_cache(model), output_hidden_states=True, return_dict_in_generate=True) == {1}
            assert between(DynamicCache(config=model.config)) == {3}
            user = LogitsProcessorList([lambda ids, scores: scores])  # may compute, with all threads
            assert between(quire_cache(model), logits_processor=user) == {3}
            with pytest.raises(CapacityError):
                between(QuireCache(model.config, max_length=ids.shape[1] - 1))
            assert torch.get_num_threads() == 3
        assert between(quire_cache(model)) == {3}
    finally:
        torch.set_num_threads(before)
    assert in_steps == {3}  # the steps themselves, and the model's own forward, have all


def test_restore_gives_the_model_back_bit_for_bit() -> None:
    model = model_of("qwen3_moe")
    ids, _ = prompts()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        want = model(ids).logits
        forward = model.forward
        first = accelerate(model)
        assert accelerate(model) is first
        assert model.forward != forward
        restore(model)
        restore(model)
        assert model.forward == forward
        assert torch.equal(model(ids).logits, want)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not {"forward", "generate"} & model.__dict__.keys()
    assert not model.training
    model.train()
    accelerate(model)
    assert model.training
    restore(model)
    model.eval()


@pytest.mark.parametrize("name", [*WITH_STATES, "deepseek_v3"])
def test_models_quire_does_not_run_get_packed_layers_and_keep_their_answers(name: str) -> None:
    model = model_of(name)
    done = accelerate(model)
    try:
        assert done.level == "linears"
        assert done.reason
        for mode in ("greedy", "continued"):
            got = as_lists(MODES[mode](model, lambda: quire_cache(model)))
            assert got == as_lists(MODES[mode](model, lambda: DynamicCache(config=model.config)))
    finally:
        restore(model)


def test_memory_is_not_held_by_the_accelerated_model() -> None:
    import gc

    model = model_of("llama")
    with _accelerated(model):
        cache = quire_cache(model)
        memory = cache.memory
        model.generate(prompts()[0], **{CACHE: cache}, max_new_tokens=3, do_sample=False)
        cache.reset()
        assert memory.used_bytes == 0
        model.generate(prompts()[0], **{CACHE: cache}, max_new_tokens=3, do_sample=False)
        assert memory.used_bytes > 0
        del cache
        gc.collect()
        assert memory.used_bytes == 0
