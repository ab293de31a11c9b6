"""Packed experts: the model's output, bits independent of the batch, and a complete restore."""

from __future__ import annotations

import pytest
import torch
from support.architectures import tiny
from torch import nn

from quire.weights.experts import pack_experts

pytest.importorskip("quire._native")

# Plain, transposed with biases and interleaved gates, and with a router of its own.
NAMES = ["mixtral", "gpt_oss", "qwen3_moe"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def experts_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if hasattr(module, "has_gate"))


def routed(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(num_tokens, 64).to(dtype),
        torch.rand(num_tokens, 4).topk(2).indices,
        torch.rand(num_tokens, 2).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_as_the_original_and_is_given_back(name: str, dtype: torch.dtype) -> None:
    model = tiny(name).to(dtype)
    experts = experts_of(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    parameters, cls = dict(experts.named_parameters()), type(experts)
    arguments = routed(33, dtype)
    with torch.inference_mode():
        want = experts(*arguments)
        undo = pack_experts(model)
        assert type(experts) is not cls
        assert isinstance(experts, cls)
        got = experts(*arguments)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
        for index in range(33):
            alone = experts(*(tensor[index : index + 1] for tensor in arguments))
            assert torch.equal(alone[0], got[index])
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    undo()
    undo()
    assert type(experts) is cls
    assert all(experts.get_parameter(key) is value for key, value in parameters.items())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_experts_that_answer_otherwise_stay_as_they_are() -> None:
    model = tiny("mixtral")
    experts = experts_of(model)
    cls = type(experts)

    class Odd(cls):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states, *args) + 1.0

    experts.__class__ = Odd
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pack_experts(model)
    assert type(experts) is Odd
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
