"""A module computed in a wider type: all tensors that its code reads have that type, and are unchanged afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.backends import native_module
from quire.model.prove.upcast import packed_as, upcast_to
from quire.weights.linear import Packing, pack_linears


class PastItsLayer(nn.Module):
    """Multiplies by its layer and by the layer's weight, as Mamba 1 does."""

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.layer, self.is_transposed = layer, isinstance(layer, Conv1D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        return self.layer(x) + (x @ weight if self.is_transposed else (weight @ x.t()).t())


@pytest.mark.parametrize("packing", [None, "watched"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_a_weight_that_is_read_past_its_layer_is_wide(
    kind: str, dtype: torch.dtype, packing: Packing | None
) -> None:
    torch.manual_seed(0)
    module = PastItsLayer(nn.Linear(24, 40) if kind == "Linear" else Conv1D(40, 24)).to(dtype)
    x = torch.randn(5, 24)
    with torch.inference_mode():
        want = PastItsLayer(module.layer).to(torch.float32)(x)
    module = module.to(dtype)
    undo = pack_linears(module, packing)
    weight = module.layer.weight
    with torch.inference_mode():
        before = module(x.to(dtype))
        packs = packing is None and native_module() is not None  # into panels of the extension
        for computing in (upcast_to, packed_as) if packs else (upcast_to,):
            with computing(module, torch.float32):
                got = module(x)
                assert module.layer.weight.dtype is torch.float32
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            assert module.layer.weight is weight
            assert torch.equal(module(x.to(dtype)), before)
    undo()
    assert module.layer.weight.dtype is dtype
