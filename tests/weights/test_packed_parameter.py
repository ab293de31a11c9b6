"""A Parameter for a weight in packed form: torch reads and writes it like a dense one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from quire.weights.packed_parameter import LazyDenseWeight, PackedParameter

WEIGHT = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def parameter() -> Any:
    made = nn.Parameter(WEIGHT.clone())
    form = WEIGHT.clone()
    assert PackedParameter.replace_parameter(
        made, LazyDenseWeight(packed="form", unpack=lambda: form.clone()), made.detach()
    )
    return made


def test_it_is_a_parameter_without_memory(parameter: Any) -> None:
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (WEIGHT.shape, torch.float32, True)
    for _ in range(5):
        assert torch.equal(parameter, WEIGHT)
        assert torch.equal(parameter.detach().clone(), WEIGHT)
        assert parameter.to(torch.bfloat16).dtype is torch.bfloat16
    assert parameter.lazy_weight.dense is None


def test_read_in_inference_mode_it_may_be_trained_again(parameter: Any) -> None:
    """As LongCat Flash's router does, again and again, in a forward."""
    with torch.inference_mode():
        for _ in range(12):
            assert torch.equal(parameter.type(torch.float32), WEIGHT)
        parameter.view(-1)
    parameter.restore()
    assert type(parameter) is nn.Parameter
    assert not parameter.is_inference()
    assert parameter.requires_grad


WRITES: dict[str, Any] = {
    "in place": lambda p: p.data.mul_(2),
    "no_grad": lambda p: torch.no_grad()(lambda: p.add_(1))(),
    "a row": lambda p: p.data.__setitem__(1, 7.0),
    "a view": lambda p: p.data[1:3].t().zero_(),
    "detached": lambda p: p.detach().fill_(3),
    "foreach": lambda p: torch._foreach_mul_([p.data], 3.0),
    "numpy": lambda p: p.detach().numpy().__setitem__(0, 5.0),
    "copied": lambda p: p.data.copy_(torch.ones(5, 4)),
    "out": lambda p: torch.add(torch.ones(5, 4), 1, out=p.data),
    "another's": lambda p: setattr(p, "data", torch.ones(5, 4)),
}


@pytest.mark.parametrize("name", WRITES)
def test_no_write_is_lost_and_each_is_counted(name: str, parameter: Any) -> None:
    plain = nn.Parameter(WEIGHT.clone())
    held, count = parameter.lazy_weight, parameter.lazy_weight.num_writes
    WRITES[name](parameter)
    WRITES[name](plain)
    parameter.lazy_weight.settle()
    assert torch.equal(parameter, plain)
    assert parameter.lazy_weight is not held or held.num_writes > count
    parameter.restore()
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, plain)


def test_memory_that_was_only_looked_at_is_packed_away_again(parameter: Any) -> None:
    row = parameter[1]
    parameter.lazy_weight.settle()
    assert parameter.lazy_weight.dense is not None
    del row
    gc.collect()
    parameter.lazy_weight.settle()
    assert parameter.lazy_weight.dense is None
    assert parameter.lazy_weight.num_writes == 0


def test_an_alias_goes_on_with_the_memory_it_was_of(parameter: Any) -> None:
    alias = parameter.detach()
    parameter.data = torch.zeros(5, 4, dtype=torch.bfloat16)
    assert torch.equal(alias, WEIGHT)
    assert parameter.dtype is torch.bfloat16
    alias = parameter.detach()
    parameter.restore()
    alias.fill_(2)
    assert torch.equal(parameter, torch.full((5, 4), 2, dtype=torch.bfloat16))


def test_gradients_reach_it_and_stay(parameter: Any) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    (torch.ones(1, 4) @ parameter.t()).sum().backward()
    assert torch.equal(parameter.grad, torch.ones(5, 4))
    optimizer.step()
    torch.testing.assert_close(parameter.detach().clone(), WEIGHT - 1)
    parameter.restore()
    assert torch.equal(parameter.grad, torch.ones(5, 4))
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), WEIGHT - 2)


def test_copies_and_pickles_are_ordinary(parameter: Any) -> None:
    buffer = io.BytesIO()
    torch.save({"weight": parameter.detach(), "again": parameter.detach()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert loaded["weight"].data_ptr() == loaded["again"].data_ptr()
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), loaded["weight"]):
        assert type(other) in (nn.Parameter, torch.Tensor)
        assert torch.equal(other, WEIGHT)
    assert "5" in repr(parameter.shape)
    assert repr(parameter) == repr(nn.Parameter(WEIGHT))
    assert parameter.tolist() == WEIGHT.tolist()
