"""Quantized weights on a device of torch: loaded there as codes, with the reference's tokens, in planned bytes.

On the fake card the torch device computes their definition; the kernels run under the interpreter.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_case, quantized_checkpoints
from support.card import card, counted, limited_memory
from support.quantized_case import KINDS, random_weight
from support.quantized_checkpoints import FORMATS
from torch import nn

from quire import LLM, SamplingParams, plan
from quire.config import EngineConfig
from quire.errors import CapacityError, UnsupportedModelError
from quire.model.weight_sizes import measured_weights
from quire.weights.codes import QuantizedPanels, form_of
from quire.weights.codes.quantized_reference import multiply
from quire.weights.load import load
from quire.weights.quantized_modules import quantized_weights

PROMPTS = [[7, 81, 3, 44, 9, 90, 23], [5, 6], [7, 81, 3, 44, 11], [9] * 12]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_memory": "4MiB", "dtype": "float32", "max_batch_tokens": 9}
ON_CARD: dict[str, Any] = {"device": "card:0", "backend": "torch"}


@pytest.fixture
def place() -> torch.device:
    return card()


def saved(folder: Path, name: str, **sizes: int) -> Path:
    """A checkpoint: a format of `FORMATS`, of a kind of model after a slash; "gpt_oss"; "gguf"."""
    torch.manual_seed(1)
    if name == "gpt_oss":
        quantized_checkpoints.save_gpt_oss(folder)
    elif name == "gguf":
        types = iter(["Q4_0", "Q5_1", "Q8_0", "Q4_1"] * 100)
        model = gguf_case.tiny(kind="qwen3_moe")
        return gguf_case.write(
            folder.with_suffix(".gguf"), model, architecture="qwen3moe", quantized=lambda _: next(types)
        )
    else:
        quantization, kind = name.partition("/")[::2]
        quantized_checkpoints.save(
            folder, quantized_checkpoints.tiny(kind or "qwen3", **sizes), *FORMATS[quantization]
        )
    return folder


def model_of(llm: LLM) -> nn.Module:
    return llm._opened.prepared._model


def answers(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    with LLM(model, **(OPTIONS | options)) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


SMALLEST = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
CHECKPOINTS = ["gptq by activation order", "awq", "fp8", "nf4", "gpt_oss", "w4a16/qwen3_moe"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_has_the_tokens_of_the_reference(
    name: str, tmp_path: Path, place: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", name)
    expected = answers(folder, backend="python")
    module: Any = torch.get_device_module("card")
    gc.collect()  # other tests' models
    used = module.memory_allocated()
    with caplog.at_level(logging.WARNING, "quire"), LLM(folder, **OPTIONS, **ON_CARD) as llm:
        model = model_of(llm)
        assert all(packed.device == place for packed in quantized_weights(model).values())
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {place}
        assert sum(size.num_bytes for size in measured_weights(model)) == planned_bytes(folder, **ON_CARD)
        assert "are dequantized" not in caplog.text
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    del llm, model
    if name == "gpt_oss":
        gc.collect()  # its sinks
    assert module.memory_allocated() == used


def planned_bytes(model: Any, **options: Any) -> int:
    if options.get("device") == "card:0":  # as a plan's own argument it names a graphics card
        options = {"config": EngineConfig(model=model, dtype="float32", **options)}
        model = None
    else:
        options["dtype"] = "float32"
    return plan(model, context=64, concurrency=1, **options).num_bytes("weights")


@pytest.mark.parametrize("weights", ["int8", "int4:32"])
def test_a_rounded_model_has_the_tokens_of_the_reference(
    weights: str, tmp_path: Path, place: torch.device
) -> None:
    quantized_checkpoints.tiny("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path)
    expected = answers(tmp_path, backend="python", weights=weights)
    with LLM(tmp_path, weights=weights, **OPTIONS, **ON_CARD) as llm:
        model = model_of(llm)
        assert len(quantized_weights(model)) > 8
        assert {tensor.device for tensor in model.parameters()} == {place}
        with counted() as counts:
            outputs = llm.generate([PROMPTS[1]], GREEDY)
        assert outputs[0].outputs[0].token_ids == expected[1]
        # Experts ask for their numbers of rows: one more wait in each layer.
        assert counts.to_host <= GREEDY.max_tokens * (1 + 3 * 2)  # pyright: ignore[reportOptionalOperand]
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    assert planned_bytes(tmp_path, weights=weights, **ON_CARD) > 0


def test_a_step_of_codes_waits_once(tmp_path: Path, place: torch.device) -> None:
    folder = saved(tmp_path / "model", "awq")
    with LLM(folder, **OPTIONS, **ON_CARD) as llm:
        llm.generate([PROMPTS[1]], GREEDY)
        with counted() as counts:
            llm.generate([PROMPTS[1]], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    assert counts.to_host <= 10
    assert counts.waits <= 10


def test_a_gguf_file_has_the_tokens_of_the_reference(tmp_path: Path, place: torch.device) -> None:
    file = saved(tmp_path / "model", "gguf")
    assert answers(file, **ON_CARD) == answers(file, backend="python")


def test_codes_for_another_device_are_refused(tmp_path: Path, place: torch.device) -> None:
    folder = saved(tmp_path / "model", "awq")
    loaded = load(folder, dtype="float32")
    with pytest.raises(UnsupportedModelError, match="expected weights in codes that were loaded for device"):
        LLM((loaded.model, None), **OPTIONS, **ON_CARD)
    assert all(packed.device.type == "cpu" for packed in quantized_weights(loaded.model).values())


def test_no_room_for_codes_is_one_error(tmp_path: Path, place: torch.device) -> None:
    folder = saved(tmp_path / "model", "awq")
    module: Any = torch.get_device_module("card")
    used = module.memory_allocated()
    with limited_memory(used + (64 << 10)), pytest.raises(CapacityError, match="on card:0"):
        LLM(folder, **OPTIONS, **ON_CARD)
    assert module.memory_allocated() == used


# -- the kernels -------------------------------------------------------------------------------------------

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "name", ["awq", *(pytest.param(name, marks=pytest.mark.ci) for name in CHECKPOINTS if name != "awq")]
)
def test_the_kernels_give_the_tokens_of_the_reference(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", name, **SMALLEST)
    expected = answers(folder, PROMPTS[1:2], backend="python")
    with LLM(folder, backend="triton", **OPTIONS) as llm:
        model = model_of(llm)
        measured = sum(size.num_bytes for size in measured_weights(model))
        assert measured == planned_bytes(folder, backend="triton") < planned_bytes(folder, weights="bf16")
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS[1:2], GREEDY)] == expected


@pytest.mark.parametrize("backend", ["torch", "torch+fast", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_is_read_multiplied_and_planned(kind: str, backend: str) -> None:
    weight = random_weight(kind, 45, 512)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).half()
    packed = QuantizedPanels(weight, torch.float16, backend=f"{backend}@cpu")
    expected = multiply(x, weight).float()
    scale = float((x.float().abs() @ weight.dequantize().abs().t()).max())
    tolerance = {"torch": 0.0, "torch+fast": 2e-3, "triton": 1e-3}[backend]
    assert float((packed.multiply(x, None).float() - expected).abs().max()) <= tolerance * scale
    torch.testing.assert_close(packed.unpack(torch.float32), weight.dequantize(), rtol=1e-6, atol=1e-6)
    rows = packed.gather_rows(torch.tensor([[44, 0]]), torch.float32)
    assert torch.equal(rows[0], packed.unpack(torch.float32)[[44, 0]])
    assert packed.num_bytes == form_of(weight).num_bytes(45, 512, f"{backend}@cpu")


def test_a_plan_for_a_card_has_the_layout_of_its_kernels(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "awq")
    here = planned_bytes(folder, backend="triton")
    assert planned_bytes(folder, device="h100") == here
    assert planned_bytes(folder, device="h100", backend="torch") == planned_bytes(folder, backend="torch")
    said = plan(folder, dtype="bfloat16", device="h100", context=64, concurrency=1)
    dense = plan(folder, dtype="bfloat16", device="h100", context=64, concurrency=1, weights="bf16")
    assert said.decode_bound is not None
    assert dense.decode_bound is not None
    assert said.decode_bound.weight_bytes < 0.7 * dense.decode_bound.weight_bytes
