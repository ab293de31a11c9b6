"""A model that changes while an LLM has it open: prepared again, without content cached before, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.adapters import add_adapter, disable_adapters, enable_adapters, set_adapter
from support.architectures import tiny
from support.cache_case import LONG_BACKENDS
from torch import nn

from quire import LLM, AsyncEngine, SamplingParams
from quire.errors import ArgumentError, UnsupportedModelError

PROMPT = torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(0)).tolist()
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def make() -> Any:
    torch.manual_seed(3)
    return tiny("qwen3")


def plain_tokens(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    answer = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
    )
    return answer[0, len(PROMPT) :].tolist()


def open_llm(model: Any, **options: Any) -> LLM:
    return LLM((model, None), kv_memory="4MiB", max_num_seqs=4, **options)


def run(llm: LLM) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt came from the cache."""
    output = llm.generate(PROMPT, PARAMS)[0]
    return output.outputs[0].token_ids, output.num_cached_tokens


def linears(model: Any) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def add_noise(model: Any, factor: float = 0.3) -> None:
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.add_(noise * factor)


def negate_layer(module: Any, args: Any, output: Any) -> Any:
    return output * -1.5 if isinstance(output, torch.Tensor) else (output[0] * -1.5, *output[1:])


def lora(model: Any, name: str = "one", seed: int = 5) -> None:
    add_adapter(model, peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"]), name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f".{name}." in key and "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


CHANGES: dict[str, Callable[[Any], object]] = {
    "through .data": lambda model: linears(model)[2].weight.data[3:9].mul_(-9.0),
    "a norm": lambda model: model.model.norm.weight.data.mul_(-3.0),
    "all": add_noise,
    "the embedding": lambda model: model.get_input_embeddings().weight.data[5:20].fill_(0.3),
    "converted and back": lambda model: model.to(torch.bfloat16).float(),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(negate_layer),
    "an adapter": lora,
}


@pytest.mark.parametrize("backend", LONG_BACKENDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_followed_and_nothing_cached_is_used(name: str, backend: str) -> None:
    model, plain = make(), make()
    with open_llm(model, backend=backend) as llm:
        run(llm)
        assert run(llm)[1] == 39
        CHANGES[name](model)
        CHANGES[name](plain)
        want = plain_tokens(plain)
        assert run(llm) == (want, 0)
        assert run(llm) == (want, 39)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(module) is type(other)
        assert module.training == other.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert plain_tokens(model) == want


def test_what_cannot_be_followed_is_refused_until_it_is_changed_back() -> None:
    model = make()
    with open_llm(model) as llm:
        want = run(llm)[0]
        model.train()
        for _ in range(2):
            with pytest.raises(ArgumentError, match=r"training mode.*model\.eval\(\)"):
                run(llm)
        model.eval()
        assert run(llm)[0] == want
        model.double()
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="float64"):
                run(llm)
        model.to(torch.bfloat16)
        with pytest.raises(ArgumentError, match="weights of float32, as it was opened, got bfloat16"):
            run(llm)
        model.float()
        assert run(llm) == (plain_tokens(model), 0)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArgumentError, match="autocast"):
            run(llm)
        model.resize_token_embeddings(model.config.vocab_size + 8)
        with pytest.raises(ArgumentError, match="vocabulary"):
            run(llm)
        model.to("meta")
        with pytest.raises(ArgumentError, match=r"weights in memory, got .* on meta"):
            run(llm)
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())


def test_the_mode_it_came_in_is_given_back() -> None:
    model = make()
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with open_llm(model) as llm:
        run(llm)
    assert [module.training for module in model.modules()] == before
    with open_llm(model):
        model.eval()
    assert not any(module.training for module in model.modules())


def test_adapters_switched_under_an_open_llm() -> None:
    model, plain = make(), make()
    with open_llm(model) as llm:
        run(llm)
        for change in (
            lambda one: lora(one, "one", 5),
            lambda one: lora(one, "two", 6),
            lambda one: set_adapter(one, "two"),
            disable_adapters,
            enable_adapters,
        ):
            change(model)
            change(plain)
            assert run(llm)[0] == plain_tokens(plain)


def test_a_peft_model_is_opened_by_its_base_model_with_the_adapter_as_it_is() -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(make(), config)
    torch.manual_seed(1)
    plain = peft.get_peft_model(make(), config)
    with open_llm(model) as llm:
        assert run(llm)[0] == plain_tokens(plain)
        model.merge_adapter()
        plain.merge_adapter()
        assert run(llm) == (plain_tokens(plain), 0)
    assert plain_tokens(model) == plain_tokens(plain)
    prompt = peft.get_peft_model(make(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ArgumentError, match=r"get_base_model\(\)"):
        open_llm(prompt)


def test_tiers_keep_what_each_state_of_the_model_has_stored(tmp_path: Path) -> None:
    model, options = make(), {"disk_cache": tmp_path, "block_size": 4}
    lora(model)
    with open_llm(model, **options) as llm:
        on, _ = run(llm)
        llm.flush()
        disable_adapters(model)
        off, cached = run(llm)
        assert cached == 0
        assert off != on
        llm.flush()
        enable_adapters(model)
        tokens, cached = run(llm)
        assert tokens == on
        assert cached > 0  # from the disk, where it lies under the model's name as it was then
    disable_adapters(model)
    with open_llm(model, **options) as llm:
        tokens, cached = run(llm)
        assert tokens == off
        assert cached > 0


def test_pins_go_with_the_content(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with open_llm(model) as llm:
        llm.pins.add(PROMPT)
        add_noise(model)
        assert run(llm)[1] == 0
        assert not list(llm.cache.pins)
        assert "1 pins are removed" in caplog.text
        llm.cache.check()


def test_an_async_engine_hears_of_what_cannot_be_followed() -> None:
    model = make()

    async def main() -> None:
        async with AsyncEngine((model, None), kv_memory="4MiB") as engine:
            async for _ in engine.generate(PROMPT, PARAMS):
                pass
            model.train()
            with pytest.raises(ArgumentError, match="training mode"):
                async for _ in engine.generate(PROMPT, PARAMS):
                    pass
            model.eval()
            async for output in engine.generate(PROMPT, PARAMS):
                last = output
            assert last.outputs[0].token_ids == plain_tokens(make())

    asyncio.run(main())


def test_quantized_weights_are_refused_by_name() -> None:
    model = make()
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        torch.zeros(128, 64, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(UnsupportedModelError, match=r"quantized by .*up_proj\.weight is torch\.int8"):
        open_llm(model)
