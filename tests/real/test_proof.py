"""Fused blocks of a real checkpoint are proved on its weights, and the model's output is sane."""

from __future__ import annotations

from pathlib import Path

from quire import LLM, SamplingParams
from quire.model import PreparedModel
from quire.model.fused.attention import FusedAttention
from quire.model.fused.layer import FusedLayer
from quire.model.fused.mlp import FusedMlp
from quire.model.fused.norm import RowNorm
from quire.model.prove.fused_proof import Proof, ProofResult
from quire.model.prove.recorded_calls import record
from quire.weights import load


def test_a_real_model_opens_as_it_comes_and_runs_fused(checkpoint: Path) -> None:
    """As a user opens it: bfloat16 for a quantized GGUF file, widened, since layers of codes are not fused."""
    with LLM(checkpoint, weights="bf16", kv_memory="256MiB") as llm:
        fused = llm._opened.prepared.fused
        assert fused is not None
        assert sum(fused.counts.values()) > 0, "no module runs fused"
        params = SamplingParams(max_tokens=24, temperature=0)
        [output] = llm.generate(["The capital of France is"], params)
        text = output.outputs[0].text
        assert "Paris" in text or "capital" in text, text


def test_every_module_is_what_one_of_its_kind_was_found_to_be(checkpoint: Path) -> None:
    """A start asks one module of all that are alike. Here each is asked, with its own weights and activations: F1 finds
    the same for it, and its kernel loses no more than the module's own forward does (F2)."""
    prepared = PreparedModel(load(checkpoint, is_dense=True), backend="native")
    model, fused = prepared.loaded.model, prepared.fused
    assert fused is not None
    parts = {module: part for module in model.modules() if (part := fused.part_of(module)) is not None}
    attentions = {module: part for module, part in parts.items() if isinstance(part, FusedAttention)}
    layers = {module: part for module, part in parts.items() if isinstance(part, FusedLayer)}
    layer_of = {module: part.layer_and_options[0] for module, part in attentions.items()}
    layer_of |= {module: part.attention.layer_and_options[0] for module, part in layers.items()}
    near, far = record(prepared, parts, layer_of)
    proof = Proof(prepared, near, far)
    found = ProofResult(
        norms={module: part.finding for module, part in parts.items() if isinstance(part, RowNorm)},
        mlps={module: part.finding for module, part in parts.items() if isinstance(part, FusedMlp)},
        attentions=attentions,
    )
    assert found.norms
    assert layers
    assert {module: proof.norm(module) for module in found.norms} == found.norms
    assert {module: proof.mlp(module) for module in found.mlps} == found.mlps
    rotations = {module: proof.attention(module, part, found.norms) for module, part in attentions.items()}
    assert rotations == {module: part.rotation for module, part in attentions.items()}
    assert all(proof.layer(module, found) for module in layers)
    prepared.restore()
