"""Latent layers (MLA) on paged memory: proved, compared with their record, and never expanded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.cache_case import BACKENDS
from support.generate_oracle import MAX_TOKENS, PROMPTS, generate
from support.hand_loop import Loop

from quire import LLM, SamplingParams
from quire.errors import UnsupportedModelError
from quire.hf import accelerate
from quire.model import PreparedModel
from quire.model.latent import LatentHeads, is_latent
from quire.model.prove import latent_proof as proof
from quire.weights import load

PROMPT = torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_latent(module)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_are_never_expanded(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("deepseek_v3")
    prepared = PreparedModel(load((model, None)), backend=backend)
    calls: list[tuple[int, ...]] = []
    cls = type(attentions(model)[0].kv_b_proj)
    own = cls.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == 24:  # the latents' width: no other layer's
            calls.append(tuple(x.shape))
        return own(self, x)

    monkeypatch.setattr(cls, "forward", forward)
    tokens, _ = Loop(prepared, PROMPTS[:3]).run(MAX_TOKENS)
    assert not calls
    attentions(model)[0].kv_b_proj(torch.zeros(1, 24))
    assert calls  # they would have been seen
    prepared.restore()
    assert tokens == [generate(model, prompt)[0] for prompt in PROMPTS[:3]]


def test_given_back_the_modules_are_what_they_were() -> None:
    model = tiny("minicpm3")
    before = [(type(module), set(module.__dict__)) for module in model.modules()]
    prepared = PreparedModel(load((model, None)), backend="python")
    assert all("expand_kv" not in module.__dict__ for module in attentions(model))
    prepared.restore()
    assert [(type(module), set(module.__dict__)) for module in model.modules()] == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "wrong", ["the first rows", "another head's", "the values"], ids=lambda name: name.replace(" ", "_")
)
def test_what_computes_something_else_is_refused(
    wrong: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one head of one layer, a product that is not the module's."""
    own = LatentHeads.__init__

    def init(self: LatentHeads, *args: Any) -> None:
        own(self, *args)
        if wrong == "the first rows":
            self.into_latent[1] = self.into_latent[0]
        elif wrong == "another head's":
            self.out_of_latent[:2] = self.out_of_latent[1::-1]
        else:
            weight = self.out_of_latent[3].unpack() * 1.001
            self.out_of_latent[3] = type(self.out_of_latent[3])(weight)

    monkeypatch.setattr(LatentHeads, "__init__", init)
    with pytest.raises(
        UnsupportedModelError, match=r"model type youtu: expected YoutuAttention .* got something else"
    ):
        PreparedModel(load((tiny("youtu"), None)), backend=backend)


def test_a_module_whose_call_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "record", lambda *_: ({}, {}))
    with pytest.raises(UnsupportedModelError, match="got no call of it to compare"):
        PreparedModel(load((tiny("youtu"), None)), backend="python")


def test_a_scale_that_the_module_changes_is_its_own() -> None:
    """Yarn's factor is in the scale; the tokens of the tiny DeepSeek V3 depend on it."""
    model = tiny("deepseek_v3")
    module = attentions(model)[0]
    assert module.scaling == pytest.approx((12 + 8) ** -0.5 * (0.1 * torch.tensor(4.0).log().item() + 1) ** 2)
    for one in attentions(model):
        one.scaling *= 0.5
    prepared = PreparedModel(load((model, None)), backend="python")
    tokens, _ = Loop(prepared, PROMPTS[:3]).run(MAX_TOKENS)
    prepared.restore()
    assert tokens == [generate(model, prompt)[0] for prompt in PROMPTS[:3]]
    assert tokens != [generate(tiny("deepseek_v3"), prompt)[0] for prompt in PROMPTS[:3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_kv_b_proj_is_absorbed_again(backend: str) -> None:
    model, plain = tiny("deepseek_v3"), tiny("deepseek_v3")
    with LLM((model, None), kv_memory="4MiB", max_num_seqs=4, backend=backend) as llm:
        first = llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids
        for one in (model, plain):
            attentions(one)[1].kv_b_proj.weight.data[10:40].mul_(-3.0)
        want = generate(plain, PROMPT, 8)[0]
        output = llm.generate(PROMPT, greedy(8))[0]
        assert output.outputs[0].token_ids == want != first
        assert output.num_cached_tokens == 0


def test_what_is_put_on_kv_b_proj_is_refused_and_taken_off_again_served() -> None:
    model = tiny("deepseek_v3")
    with LLM((model, None), kv_memory="4MiB", max_num_seqs=4) as llm:
        want = llm.generate(PROMPT, greedy(4))[0].outputs[0].token_ids
        handle = attentions(model)[0].kv_b_proj.register_forward_hook(lambda *_: None)
        with pytest.raises(
            UnsupportedModelError, match=r"layers\.0\.self_attn\.kv_b_proj, which is multiplied into"
        ):
            llm.generate(PROMPT, greedy(4))
        handle.remove()
        assert llm.generate(PROMPT, greedy(4))[0].outputs[0].token_ids == want


def test_hooks_beside_it_are_called() -> None:
    model, calls = tiny("minicpm3"), []
    with LLM((model, None), kv_memory="4MiB", max_num_seqs=4) as llm:
        attentions(model)[0].kv_a_layernorm.register_forward_hook(lambda *_: calls.append(1))
        llm.generate(PROMPT, greedy(2))
    assert calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_served(dtype: torch.dtype) -> None:
    model = tiny("deepseek_v2").to(dtype)
    with LLM((model, None), kv_memory="4MiB", max_num_seqs=4) as llm:
        assert len(llm.generate(PROMPT, greedy(4))[0].outputs[0].token_ids) == 4
        assert llm.stats()["kv_memory_bytes"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped_out_stored_and_loaded_the_same_bits(backend: str, tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    prompts = [[*PROMPT, number, *PROMPT[:number]] for number in range(1, 6)]
    options: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "backend": backend}
    with LLM((model, None), kv_memory="4MiB", prefix_caching=False, **options) as llm:
        want = [llm.generate(prompt, greedy(24))[0].outputs[0].token_ids for prompt in prompts]
    options["disk_cache"] = str(tmp_path)
    with LLM((model, None), kv_memory="20KiB", host_cache="1MiB", cache_write="through", **options) as llm:
        outputs = llm.generate(prompts, greedy(24))
        assert [output.outputs[0].token_ids for output in outputs] == want
        assert llm.stats()["num_preemptions"] > 0
    with LLM((model, None), kv_memory="4MiB", **options) as llm:
        (output,) = llm.generate(prompts[4], greedy(24))
        assert output.outputs[0].token_ids == want[4]
        assert output.num_cached_tokens > 0


def test_a_copy_of_a_prepared_model_is_the_models_own() -> None:
    model = tiny("youtu")
    prepared = PreparedModel(load((model, None)), backend="python")
    copied = copy.deepcopy(model)
    assert {type(module) for module in copied.modules()} == {type(m) for m in tiny("youtu").modules()}
    prepared.restore()


def test_accelerate_leaves_latent_attention_to_the_model() -> None:
    pytest.importorskip("quire._native")
    model = tiny("deepseek_v3")
    done = accelerate(model)
    assert done.level == "linears"
    assert "model type deepseek_v3: its layers keep latents" in (done.reason or "")
