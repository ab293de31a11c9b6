"""`fast=True`: torch's own products on a device of torch. The start and the key of stored K and V say so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support import quantized_checkpoints
from support.card import card
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected

from quire import LLM, SamplingParams, plan
from quire.config import EngineConfig
from quire.devices import device_of
from quire.devices.cuda.laid_out_codes import LaidOutCodes
from quire.errors import ArgumentError
from quire.model.fingerprint import engine_fingerprint
from quire.weights.load import load
from quire.weights.quantized_modules import quantized_weights

GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def test_the_start_says_so_and_tokens_are_those_of_generate(caplog: pytest.LogCaptureFixture) -> None:
    card()
    model, tokens, _ = expected("qwen3")
    with caplog.at_level(logging.INFO, "quire"):
        for fast in (True, False):
            caplog.clear()
            with LLM((model, None), device="card:0", backend="torch", fast=fast, kv_memory="4MiB") as llm:
                assert tokens_of(llm) == tokens
            assert ("fast: products by torch" in caplog.text) == fast


def test_the_key_of_stored_content_differs() -> None:
    loaded = load()
    keys = {
        engine_fingerprint(loaded, f"{kernels}@cpu")
        for kernels in ("torch", "torch+fast", "triton", "triton+fast")
    }
    versions = {device_of(name).version for name in ("torch@cpu", "torch+fast@cpu")}
    assert (len(keys), len(versions)) == (4, 2)


def test_quantized_weights_are_dequantized_for_each_product(tmp_path: Path) -> None:
    card()
    quantized_checkpoints.save(tmp_path, quantized_checkpoints.tiny(), *quantized_checkpoints.FORMATS["awq"])
    options: dict[str, Any] = {"kv_memory": "4MiB", "dtype": "float32"}
    prompts = [[7, 81, 3, 44], [5, 6]]
    with LLM(tmp_path, backend="python", **options) as llm:
        tokens = tokens_of(llm, prompts)
    with LLM(tmp_path, device="card:0", backend="torch", fast=True, **options) as llm:
        codes = quantized_weights(llm._opened.prepared._model).values()
        assert {type(packed._packed) for packed in codes} == {LaidOutCodes}  # pyright: ignore
        assert tokens_of(llm, prompts) == tokens


def test_it_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ArgumentError, match="expected with fast also device, such as cuda"):
        EngineConfig(fast=True)
    with pytest.raises(ArgumentError, match=r"expected the back end .* got 'torch\+quick' - in `backend`"):
        device_of("torch+quick@cpu")
    # A plan for a card that is elsewhere is of the same memory.
    config = EngineConfig(device="cuda", fast=True)
    assert plan(config=config, device="h100", context=64).fits


def test_no_kernel_of_products_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from quire.devices.cuda import product_kernels, row_kernels

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("expected torch's own operator")

    for module, names in (
        (product_kernels, ("multiply", "multiply_batch")),
        (row_kernels, ("softmax", "mean", "sum_rows")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    model, tokens, _ = expected("qwen3")
    with LLM((model, None), backend="triton+fast@cpu", kv_memory="4MiB") as llm:
        assert tokens_of(llm, PROMPTS[1:2]) == tokens[1:2]
        assert "fast" in llm.capacity
