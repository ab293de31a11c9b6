"""Packing the linear layers of whole models: same outputs, no weight in memory twice, a complete restore."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from quire.devices.cpu import packed_weights
from quire.devices.cpu.packed_weights import NativeWeight
from quire.errors import QuireError
from quire.weights import linear
from quire.weights.linear import PackedEmbedding, PackedLinear, choose_packing, pack_linears

pytest.importorskip("quire._native")

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 150,
}
CONFIGS = {
    "tied": Qwen3Config(**TINY, tie_word_embeddings=True),
    "untied": Qwen3Config(**TINY, tie_word_embeddings=False),
    "biased": Qwen2Config(**TINY),
    "conv1d": GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=150, bos_token_id=0, eos_token_id=0),
    "scaled_embedding": Gemma3TextConfig(**TINY, query_pre_attn_scalar=16),
    "experts": MixtralConfig(**TINY, num_local_experts=4),
}
IDS = torch.arange(17)[None] * 7 % 150


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()
    for parameter in model.parameters():  # large enough that a wrong row or column shows
        nn.init.normal_(parameter, std=0.2)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()


def copied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(state)
    for name, value in state.items():
        assert now[name].dtype == value.dtype
        assert torch.equal(now[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_answers_as_before_and_comes_back_whole(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype)
    before, state = logits(model), copied_state(model)
    parameters = dict(model.named_parameters())
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    restore = pack_linears(model)
    assert linears
    assert all(isinstance(module, PackedLinear) for module in linears)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(
        logits(model), before, rtol=tolerance, atol=tolerance * before.abs().max().item()
    )
    assert_same_state(model, state)  # also while packed
    restore()
    restore()
    assert not any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())
    assert_same_state(model, state)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(now is parameters[key] for key, now in model.named_parameters())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["tied", "conv1d", "scaled_embedding"])
def test_a_tied_weight_is_held_once(name: str) -> None:
    model = tiny_model(name)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = embedding(IDS).clone()
    restore = pack_linears(model)
    assert isinstance(embedding, PackedEmbedding)
    assert embedding._packed is head._packed
    assert torch.equal(embedding(IDS), rows)
    restore()
    assert embedding.weight is head.weight


def test_an_untied_embedding_keeps_its_memory_and_is_watched() -> None:
    model = tiny_model("untied")
    embedding = model.get_input_embeddings()
    rows, address = embedding(IDS).clone(), embedding.weight.data_ptr()
    restore = pack_linears(model)
    assert torch.equal(embedding(IDS), rows)
    assert embedding.weight.lazy_weight.dense.data_ptr() == address
    restore()
    assert type(embedding) is nn.Embedding
    assert embedding.weight.data_ptr() == address


def test_the_dense_weights_are_freed() -> None:
    model = tiny_model("tied")
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters() if p.dim() == 2]
    parameters = list(model.parameters())
    pack_linears(model)
    gc.collect()
    assert all(storage() is None for storage in storages)
    assert [parameter.shape for parameter in model.parameters()] == [p.shape for p in parameters]


def test_experts_stay_and_are_answered() -> None:
    model = tiny_model("experts")
    pack_linears(model)
    shapes = [parameter.dim() for parameter in model.parameters()]
    assert 3 in shapes


def test_the_weight_still_reads_and_may_be_another() -> None:
    layer = nn.Linear(5, 7)
    weight, other = layer.weight.detach().clone(), torch.randn(7, 5)
    restore = pack_linears(layer)
    assert isinstance(layer, nn.Linear)
    for _ in range(5):  # read often, it is kept
        assert torch.equal(layer.weight, weight)
    assert layer.weight is layer.weight
    assert (layer.in_features, layer.out_features) == (5, 7)
    layer.weight = nn.Parameter(other)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, other)
    restore()
    assert torch.equal(layer.weight, other)


def test_any_shape_of_input() -> None:
    layer = nn.Linear(6, 4).to(torch.bfloat16)
    dense = nn.Linear(6, 4).to(torch.bfloat16)
    dense.load_state_dict(layer.state_dict())
    pack_linears(layer)
    x = torch.randn(3, 6, 5, dtype=torch.bfloat16)
    with torch.inference_mode():
        for given in (x[0, :, 0], x.transpose(1, 2), x[:, :, 2], x.transpose(1, 2)[:, :0]):
            torch.testing.assert_close(layer(given), dense(given), rtol=2**-7, atol=1e-2)
        for shape in ((2, 3, 1, 2, 6), (1, 2, 1, 3, 1, 2, 6), (2, 0, 1, 2, 6)):  # as an image's tiles have
            given = torch.randn(shape, dtype=torch.bfloat16)
            assert torch.equal(layer(given), layer(given.reshape(-1, 6)).reshape(*shape[:-1], 4))


def test_bad_inputs_get_torch_s_own_errors() -> None:
    layer = nn.Linear(6, 4)
    pack_linears(layer)
    for given in (torch.ones(2, 5), torch.ones(2, 6, dtype=torch.float64), torch.tensor(1.0)):
        with pytest.raises(RuntimeError):
            layer(given)


def test_with_a_gradient_asked_for_torch_computes() -> None:
    layer = nn.Linear(6, 4)
    weight = layer.weight.detach().clone()
    pack_linears(layer)
    x = torch.ones(2, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 6))


class DenseReader(nn.Module):
    """A subclass of nothing packable that holds a linear layer's weight too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.table)


class OwnLinear(nn.Linear):
    """Its forward is not `nn.Linear`'s."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnLinear(4, 4),
        lambda: nn.Linear(4, 4).double(),
        lambda: nn.Linear(4, 4, device="meta"),
        lambda: nn.Bilinear(4, 4, 4),
        lambda: nn.MultiheadAttention(4, 1),
        lambda: (layer := nn.Sequential(nn.Linear(4, 4))).append(DenseReader(layer[0].weight)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=["subclass", "float64", "meta", "bilinear", "attention", "shared_with_another", "parametrized"],
)
def test_what_cannot_be_packed_is_left_alone(make: Callable[[], nn.Module]) -> None:
    model = make()
    classes = [type(module) for module in model.modules()]
    parameters = dict(model.named_parameters())
    pack_linears(model)
    assert [type(module) for module in model.modules()] == classes
    assert {name: id(value) for name, value in model.named_parameters()} == {
        name: id(value) for name, value in parameters.items()
    }
    assert all(parameter.numel() > 0 for parameter in model.parameters())


def test_two_layers_with_one_weight_share_the_packed_form() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    second.weight = first.weight
    restore = pack_linears(nn.ModuleList([first, second]))
    assert first._packed is second._packed
    restore()
    assert first.weight is second.weight


def test_a_failure_half_way_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("tied")
    state = copied_state(model)
    made = []

    class Failing(NativeWeight):
        def __init__(self, weight: torch.Tensor) -> None:
            if len(made) == 5:
                raise MemoryError
            made.append(weight.shape)
            super().__init__(weight)

    monkeypatch.setattr(linear, "NativeWeight", Failing)
    with pytest.raises(MemoryError):
        pack_linears(model)
    assert len(made) == 5
    assert_same_state(model, state)
    assert not any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())


def test_the_rule_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_packing(torch.float32) == choose_packing(torch.bfloat16) == "native"
    assert choose_packing(torch.float64) is None
    for module in (linear, packed_weights):
        monkeypatch.setattr(module, "native_module", lambda: None)
    monkeypatch.setattr(linear, "onednn_serves", lambda dtype: dtype is torch.float32)
    assert choose_packing(torch.float32) == "onednn"
    assert choose_packing(torch.bfloat16) is None
    with pytest.raises(QuireError, match="not built here"):
        NativeWeight(torch.ones(2, 2))


@pytest.mark.skipif(
    not packed_weights.onednn_serves(torch.float32), reason="torch has no packed oneDNN operator here"
)
def test_onednn_packs_and_gives_back_all_but_tied_weights() -> None:
    model = tiny_model("tied")
    before, state = logits(model), copied_state(model)
    restore = pack_linears(model, "onednn")
    kinds = {type(module).__name__ for module in model.modules()}
    assert "PackedLinear" in kinds
    assert model.get_output_embeddings().weight.lazy_weight.packed is None  # a tied weight stays dense
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    restore()
    assert_same_state(model, state)


def test_hooks_and_identity_survive() -> None:
    layer = nn.Linear(4, 4)
    seen = []
    layer.register_forward_hook(lambda *arguments: seen.append(arguments[0]))
    restore = pack_linears(layer)
    layer(torch.ones(1, 4))
    restore()
    layer(torch.ones(1, 4))
    assert seen == [layer, layer]


def test_a_parametrization_and_a_deleted_weight_are_torch_s_own() -> None:
    layer, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    restore = pack_linears(layer)
    for each in (layer, plain):
        nn.utils.parametrizations.weight_norm(each)
        each.parametrizations.weight.original1.data.mul_(3.0)
    assert torch.equal(layer(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    restore()
    assert torch.equal(layer(torch.ones(1, 4)), plain(torch.ones(1, 4)))
