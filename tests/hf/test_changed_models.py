"""A model that changes while it is accelerated answers as it would without Quire."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.adapters import add_adapter, disable_adapters, enable_adapters, set_adapter
from support.architectures import tiny
from support.cache_argument import CACHE
from torch import nn
from transformers import AutoModelForCausalLM

from quire.errors import ArgumentError, LoadError
from quire.hf import QuireCache, accelerate, restore

pytest.importorskip("quire._native")

IDS = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(0))
Change = Callable[[Any], object]


def make() -> Any:
    torch.manual_seed(3)
    return tiny("qwen3")


def tokens(model: Any, quire: bool = False) -> list[list[int]]:
    options: dict[str, Any] = {CACHE: QuireCache(model.config, kv_memory="16MiB")} if quire else {}
    return model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False, **options
    ).tolist()


def noise(shape: torch.Size, seed: int = 4) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linears(model: Any) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def add_noise(model: Any) -> None:
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(noise(parameter.shape, seed) * 0.3)


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def new_parameter(model: Any) -> None:
    layer = linears(model)[1]
    layer.weight = nn.Parameter(noise(layer.weight.shape))


def new_data(model: Any) -> None:
    layer = linears(model)[3]
    layer.weight.data = noise(layer.weight.shape)


def load_state(model: Any, assign: bool = False) -> None:
    model.load_state_dict({k: noise(v.shape) for k, v in model.state_dict().items()}, assign=assign)


def negate_layer(module: Any, args: Any, output: Any) -> Any:
    return output * -1.5 if isinstance(output, torch.Tensor) else (output[0] * -1.5, *output[1:])


def patch_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: -forward(x)


def set_epsilons(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def lora(model: Any, name: str = "one", seed: int = 5) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
    add_adapter(model, config, name)
    fill(model, seed)


def fill(model: Any, seed: int) -> None:
    """Same numbers in the adapters of two models; those of the newest only differ by the seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def two_adapters(model: Any) -> None:
    lora(model)
    lora(model, "two", 6)
    set_adapter(model, "two")


def disabled_adapter(model: Any) -> None:
    lora(model)
    disable_adapters(model)


CHANGES: dict[str, tuple[Change, str]] = {
    "to another dtype and back": (lambda model: model.to(torch.bfloat16).to(torch.float32), "whole"),
    "to a dtype of no kernel": (lambda model: model.double(), "linears"),
    "written through .data": (lambda model: linears(model)[2].weight.data.mul_(-1.0), "whole"),
    "rows written through .data": (lambda model: linears(model)[2].weight.data[3:9].mul_(-9.0), "whole"),
    "a norm written through .data": (lambda model: model.model.norm.weight.data.mul_(-3.0), "whole"),
    "the embedding's rows written": (lambda model: model.get_input_embeddings().weight.data[5:20].fill_(0.3), "whole"),
    "all written": (add_noise, "whole"),
    "an optimizer": (train_a_step, "whole"),
    "a new Parameter": (new_parameter, "whole"),
    "new .data": (new_data, "whole"),
    "load_state_dict": (load_state, "whole"),
    "load_state_dict(assign=True)": (lambda model: load_state(model, assign=True), "whole"),
    "a hook": (lambda model: model.model.layers[0].register_forward_hook(negate_layer), "linears"),
    "a pre-hook": (
        lambda model: model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] * -1.5,)),
        "linears",
    ),
    "a forward of its own": (patch_forward, "whole"),
    "epsilons": (set_epsilons, "whole"),
    "training mode": (lambda model: model.train(), "linears"),
    "an adapter": (lora, "whole"),
    "two adapters, the second on": (two_adapters, "whole"),
    "an adapter that is off": (disabled_adapter, "whole"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_followed_and_stays_after_restore(name: str) -> None:
    change, level = CHANGES[name]
    model, plain = make(), make()
    assert accelerate(model).level == "whole"
    tokens(model, quire=True)
    change(model)
    change(plain)
    want = tokens(plain)
    assert tokens(model, quire=True) == want
    assert accelerate(model).level == level
    restore(model)
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert state[key].dtype is value.dtype
        assert torch.equal(state[key], value), key
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(module) is type(other)
        assert module.training == other.training
        assert module.__dict__.keys() == other.__dict__.keys()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert tokens(model) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_converted_model_runs_in_its_new_dtype(dtype: torch.dtype) -> None:
    """Token for token as a model that was converted before."""
    model, before = make(), make().to(dtype)
    accelerate(model)
    tokens(model, quire=True)
    model.to(dtype)
    accelerate(before)
    assert tokens(model, quire=True) == tokens(before, quire=True)
    restore(model)
    assert model.dtype is dtype
    assert torch.equal(model(IDS).logits, make().to(dtype)(IDS).logits)


def test_a_model_moved_away_goes_its_own_way() -> None:
    model = make()
    accelerate(model)
    model.to("meta")
    assert "weights in memory" in str(accelerate(model).reason)
    assert model(IDS.to("meta")).logits.is_meta
    restore(model)
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())


def test_what_is_taken_back_is_followed_too() -> None:
    model, plain = make(), make()
    accelerate(model)
    want = tokens(plain)
    handle = model.model.layers[0].register_forward_hook(negate_layer)
    assert tokens(model, quire=True) != want
    assert "negate_layer on model.layers.0" in str(accelerate(model).reason)
    handle.remove()
    assert accelerate(model).level == "whole"
    assert tokens(model, quire=True) == want
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: negate_layer(module, args, output) if hasattr(module, "mlp") else None
    )
    try:
        assert tokens(model, quire=True) == tokens(plain) != want
    finally:
        everywhere.remove()
    model.train()
    assert "training mode" in str(accelerate(model).reason)
    model.eval()
    assert accelerate(model).level == "whole"
    assert tokens(model, quire=True) == want


def test_a_forward_outside_of_generate_looks_first() -> None:
    model, plain = make(), make()
    accelerate(model)
    for one in (model, plain):
        linears(one)[0].weight.data.mul_(3.0)
    with torch.no_grad():
        got = model(IDS, **{CACHE: QuireCache(model.config, kv_memory="16MiB")}).logits
        torch.testing.assert_close(got, plain(IDS).logits, atol=1e-4, rtol=1e-4)


def test_an_optimizer_made_before_goes_on_before_and_after_restore() -> None:
    models = make(), make()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    accelerate(models[0])
    tokens(models[0], quire=True)
    step()
    assert tokens(models[0], quire=True) == tokens(models[1])
    step()
    restore(models[0])
    assert tokens(models[0]) == tokens(models[1])
    step()
    assert tokens(models[0]) == tokens(models[1])


def test_a_copy_or_pickle_is_a_model_of_its_own() -> None:
    model, plain = make(), make()
    accelerate(model)
    want = tokens(model, quire=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in other.modules()] == [type(module) for module in plain.modules()]
        assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
        assert not any("quire" in name for module in other.modules() for name in module.__dict__)
        assert tokens(other) == want
        linears(other)[0].weight.data.zero_()
        assert tokens(model, quire=True) == want
        assert accelerate(other).level == "whole"


def test_it_is_counted_and_saved_as_the_model_it_is(tmp_path: Path) -> None:
    model, plain = make(), make()
    accelerate(model)
    assert model.num_parameters() == plain.num_parameters()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    linears(model)[0].weight.data.mul_(2.0)
    linears(plain)[0].weight.data.mul_(2.0)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for state in (saved, torch.load(tmp_path / "state.pt"), model.state_dict()):
        assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())


def test_autocast_is_followed_or_refused() -> None:
    model, plain = make(), make()
    accelerate(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        with pytest.raises(ArgumentError, match=r"torch\.autocast"):
            model(IDS, **{CACHE: QuireCache(model.config, kv_memory="16MiB")})


class Scaled(torch.Tensor):
    """As packages for quantization have them: codes and a scale behind a weight."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        self.codes, self.scale = codes, scale
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        dense = [value.codes * value.scale if isinstance(value, Scaled) else value for value in args]
        return func(*dense, **(kwargs or {}))


def quantize(model: Any) -> None:
    layer = linears(model)[0]
    codes = (layer.weight.detach() * 100).round()
    layer.weight = nn.Parameter(Scaled(codes, 0.01), requires_grad=False)


@pytest.mark.parametrize("is_later", [False, True])
def test_quantized_weights_leave_the_model_its_own_forward(is_later: bool) -> None:
    model, plain = make(), make()
    quantize(plain)
    if not is_later:
        quantize(model)
    done = accelerate(model)
    if is_later:
        quantize(model)
        tokens(model, quire=True)
        done = accelerate(model)
    assert done.level == "linears"
    assert "quantized" in str(done.reason)
    assert "Scaled" in str(done.reason)
    assert tokens(model, quire=True) == tokens(plain)
    restore(model)
    assert tokens(model) == tokens(plain)


def test_a_peft_model_is_accelerated_through_its_base_model() -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(make(), config)
    torch.manual_seed(1)
    plain = peft.get_peft_model(make(), config)
    fill(model, 5)
    fill(plain, 5)
    assert accelerate(model).level == "whole"
    assert tokens(model, quire=True) == tokens(plain)
    with model.disable_adapter(), plain.disable_adapter():
        assert tokens(model, quire=True) == tokens(plain) == tokens(make())
    merged, own = model.merge_and_unload(), plain.merge_and_unload()
    assert tokens(merged, quire=True) == tokens(own)
    restore(merged)
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), own.parameters(), strict=True))
    prompt = peft.get_peft_model(make(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ArgumentError, match=r"get_base_model\(\)"):
        accelerate(prompt)


@contextmanager
def no_adapters(model: Any) -> Iterator[None]:
    disable_adapters(model)
    yield
    enable_adapters(model)


def test_a_saved_cache_is_of_the_adapter_that_was_on(tmp_path: Path) -> None:
    model = make()
    lora(model)
    accelerate(model)
    cache = QuireCache(model.config, kv_memory="16MiB")
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
    cache.save(tmp_path / "cache")
    assert QuireCache.load(tmp_path / "cache", model).get_seq_length() == 9
    with no_adapters(model), pytest.raises(LoadError, match="adapters on or off"):
        QuireCache.load(tmp_path / "cache", model)
    linears(model)[0].weight.data.mul_(2.0)
    with pytest.raises(LoadError, match="weights"):
        QuireCache.load(tmp_path / "cache", model)


def test_a_compiled_model_is_refused_by_name() -> None:
    compiled = torch.compile(make())
    with pytest.raises(ArgumentError, match="_orig_mod"):
        accelerate(compiled)  # type: ignore[arg-type]


@pytest.mark.ci
def test_an_accelerated_model_that_is_compiled_answers() -> None:
    model, plain = make(), make()
    accelerate(model)
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, plain(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.ci
def test_a_compiled_model_with_a_quire_cache_is_refused_and_goes_on_without() -> None:
    model, plain = make(), make()
    accelerate(model)
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="not compiled"):
            compiled(IDS, **{CACHE: QuireCache(model.config, kv_memory="16MiB")})
        got = model(IDS, **{CACHE: QuireCache(model.config, kv_memory="16MiB")}).logits
        torch.testing.assert_close(got, plain(IDS).logits, atol=1e-4, rtol=1e-4)
