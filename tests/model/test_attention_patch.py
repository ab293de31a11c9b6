"""Attention modules of Bloom, MPT and Falcon on Quire's attention: proved, or left unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_case import BACKENDS
from support.engine_run import EngineRun
from support.every_type import build
from support.generate_oracle import MAX_TOKENS, PROMPTS, generate
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.mpt.modeling_mpt import MptModel

from quire import LLM, SamplingParams
from quire.errors import UnsupportedModelError
from quire.model import PreparedModel, attention_patch
from quire.weights import load

# Numbers of heads that are no power of two have slopes of two series.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "mpt": ("mpt", {"n_heads": 6, "d_model": 96, "attn_config": {"clip_qkv": 2.0}}),
    "falcon": ("falcon", {}),
    "falcon, a K and V for each head": ("falcon", {"multi_query": False}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
}


def _made(form: str) -> PreTrainedModel:
    name, fields = FORMS[form]
    return build(AutoModelForCausalLM, name, **fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_of_generate_in_one_row_with_others(form: str, backend: str) -> None:
    model = _made(form)
    want = [generate(model, prompt)[0] for prompt in PROMPTS]
    run = EngineRun(model, PROMPTS, MAX_TOKENS, backend=backend, room=3.0)
    with run.llm:
        assert not run.llm.stats()["by_own_forward"]
        assert [answer.token_ids for answer in run.answer()] == want


@pytest.mark.parametrize("form", ["bloom", "mpt", "falcon, grouped"])
def test_the_same_bits_alone_and_beside_others_in_chunks_and_whole(form: str) -> None:
    pytest.importorskip("quire._native")
    model = _made(form)
    found = []
    for options in (
        {"max_batch_tokens": 64, "max_num_seqs": 1, "prefix_caching": False, "block_size": 16},
        {"max_batch_tokens": 11, "block_size": 4, "num_threads": 2},
    ):
        run = EngineRun(model, PROMPTS, MAX_TOKENS, backend="native", room=8.0, **options)
        with run.llm:
            found.append([answer.logits for answer in run.answer()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_positions_far_beyond_the_proofs_are_bloom_s() -> None:
    """Slopes hold at any distance: 700 tokens, over several partials of the kernels."""
    model = _made("bloom")
    prompt = torch.randint(2, 131, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    want = generate(model, prompt, 4)[0]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM((model, None), max_model_len=720, kv_memory="4MiB", max_batch_tokens=256) as llm:
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == want


def test_the_model_s_own_calls_are_its_own_meanwhile() -> None:
    model = _made("mpt")
    want = generate(model, PROMPTS[3])[0]
    with LLM((model, None), max_model_len=64, kv_memory="1MiB", backend="python"):
        assert generate(model, PROMPTS[3])[0] == want
    assert generate(model, PROMPTS[3])[0] == want
    assert type(model.get_submodule("transformer.blocks.0.attn")).__name__ == "MptAttention"


def test_attention_that_adds_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are known; what it computes is not: F1."""
    made = BloomAttention.__init__

    def halved(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.beta = 0.5

    monkeypatch.setattr(BloomAttention, "__init__", halved)
    model = _made("bloom")
    assert attention_patch.patch_attention(model) is None
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        PreparedModel(load((model, None)), backend="python")
    with LLM((model, None), max_model_len=64, kv_memory="1MiB", backend="python") as llm:
        assert llm.stats()["by_own_forward"]


def test_slopes_that_are_none_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases that do not rise evenly: the proof asks at 512 positions what two positions seemed to say."""
    own = MptModel.build_mpt_alibi_tensor

    def uneven(self: Any, num_heads: int, length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        biases = own(self, num_heads, length, *args, **kwargs)
        return biases * 2 if length == 2 else biases

    monkeypatch.setattr(MptModel, "build_mpt_alibi_tensor", uneven)
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        PreparedModel(load((_made("mpt"), None)), backend="python")


def test_falcon_s_rounded_biases_are_left_alone() -> None:
    assert attention_patch.patch_attention(build(AutoModelForCausalLM, "falcon", alibi=True)) is None


def test_another_s_forward_on_a_module_is_left_alone() -> None:
    model = _made("falcon")
    module = model.get_submodule("transformer.h.0.self_attention")
    module.forward = module.forward
    with LLM((model, None), max_model_len=64, kv_memory="1MiB", backend="python") as llm:
        assert llm.stats()["by_own_forward"]


def test_opened_again_with_its_proof_kept(tmp_path: Path) -> None:
    pytest.importorskip("quire._native")
    model = _made("bloom")
    model.save_pretrained(tmp_path / "model")
    want = generate(model, PROMPTS[3])[0]
    options: dict[str, Any] = {
        "packed_weights": tmp_path / "packed",
        "max_model_len": 64,
        "kv_memory": "1MiB",
    }
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    for _ in range(2):
        with LLM(tmp_path / "model", dtype="float32", **options) as llm:
            assert not llm.stats()["by_own_forward"]
            assert llm.generate([PROMPTS[3]], params)[0].outputs[0].token_ids == want
