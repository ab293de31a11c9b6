"""An MLP in one native call: gate and up, activation, down; or up, activation, down.

Matched by structure: two or three packed linear layers whose widths fit, one activation that the kernels have (a child,
or silu by that name in the forward), nothing else but dropouts. The order of gate and up is left open: each is a
candidate, and `fused_proof` chooses one.
Cost of a call: the products, and about 3 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.model.fused.structure import PackedLayer, RowCall, can_run_together, forward_names, packed_layers

__all__ = ["FusedMlp", "mlp_candidates"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")
# Names that a forward may use besides its own children; dropouts do nothing outside of training.
_FORWARD_NAMES = frozenset(
    {"chunk", "nn", "functional", "F", "silu", "dropout", "residual_dropout", "training"}
)


class FusedMlp(RowCall):
    """The products and the activation; `block` makes the native call with norms and residual around it.

    finding: whether up comes before gate.
    """

    def __init__(
        self,
        inputs: list[PackedLayer],
        gated: bool,
        activation: str,
        output: PackedLayer,
        finding: bool = False,
    ) -> None:
        self.finding = finding
        self._inputs, self._gated, self._activation, self._output = inputs, gated, activation, output
        self.width, self.dtype = output.num_outputs, output.dtype
        self._run = self.block(_native.Surroundings(None, None, None)).run

    def block(self, around: Any) -> Any:
        return _native.MlpBlock(
            around,
            [layer.product for layer in self._inputs],
            self._gated,
            self._activation,
            *self._output.product,
        )


@torch.inference_mode()
def mlp_candidates(module: nn.Module) -> dict[bool, FusedMlp]:
    """The module as a fused MLP, by its possible finding (`FusedMlp.finding`); empty if it has another structure."""
    layers = packed_layers(module)
    if len(layers) not in (2, 3) or forward_names(module) - set(module._modules) - _FORWARD_NAMES:
        return {}
    activation = _activation_of(module)
    others = [
        child
        for name, child in module.named_children()
        if name not in layers and name not in _ACTIVATION_NAMES and not isinstance(child, nn.Dropout)
    ]
    if activation is None or others:
        return {}
    *inputs, output = layers.values()
    hidden, inner = output.num_outputs, output.num_inputs
    if any(layer.num_inputs != hidden or layer.dtype is not output.dtype for layer in inputs):
        return {}
    if not can_run_together(inputs):
        return {}
    widths = [layer.num_outputs for layer in inputs]
    candidates: list[tuple[list[PackedLayer], bool]] = []
    if widths == [inner, inner]:
        candidates = [(inputs, True), (inputs[::-1], True)]
    elif widths in ([2 * inner], [inner]):
        candidates = [(inputs, widths == [2 * inner])]
    return {
        bool(i): FusedMlp(*candidate, activation, output, bool(i)) for i, candidate in enumerate(candidates)
    }


def _activation_of(module: nn.Module) -> str | None:
    """The kernels' name of the module's activation, decided by its values in float32."""
    activation = next((getattr(module, name) for name in _ACTIVATION_NAMES if hasattr(module, name)), None)
    if activation is None:
        return "silu" if "silu" in forward_names(module) else None
    if not callable(activation):
        return None
    x = torch.linspace(-12.0, 12.0, 481)
    try:
        got = activation(x)
    except Exception:  # it takes other arguments
        return None
    for name, function in _ACTIVATIONS.items():
        if isinstance(got, torch.Tensor) and torch.allclose(got, function(x), atol=2e-6, rtol=1e-5):
            return name
    return None
