"""A device of torch needs nothing of the extension: weights on it stay torch's, whatever this processor would pack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.architectures import tiny

from quire.devices import device_of
from quire.weights import linear


@pytest.mark.parametrize("built", [True, False])
def test_weights_on_another_device_are_not_packed_for_this_processor(
    built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension: Callable[[], object | None] = object if built else lambda: None
    monkeypatch.setattr(linear, "native_module", extension)
    assert linear.packing_on(device_of("torch@cpu")) == "watched"
    model = tiny("qwen3")
    undo = linear.pack_linears(model, "watched")
    packed = [module for module in model.modules() if getattr(module, "_packed", None) is not None]
    undo()
    assert not packed
    assert all(
        type(module) is torch.nn.Linear for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
