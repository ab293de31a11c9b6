"""The kinds of mixers, and all mixers of a model by layer.

A new kind is one file with a subclass of `StateAdapter`, named in `KINDS`.

Cost: one pass over the names of every module's children.
"""

from __future__ import annotations

from torch import nn

from quire.devices import device_of
from quire.errors import UnsupportedModelError
from quire.model.state.adapter import StateAdapter
from quire.model.state.convolved_attention import ConvolvedAttention
from quire.model.state.gated_delta import GatedDeltaNet, KimiDeltaAttention
from quire.model.state.lightning import LightningAttention
from quire.model.state.mamba1 import Mamba1, ZambaHeads
from quire.model.state.mamba2 import Mamba2
from quire.model.state.rg_lru import RecurrentBlock
from quire.model.state.short_convolution import ShortConvolution
from quire.recurrence import RecurrenceBackend

__all__ = ["KINDS", "adapter_of", "state_adapters"]

KINDS: tuple[type[StateAdapter], ...] = (
    ConvolvedAttention, GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba1, Mamba2, RecurrentBlock,
    ShortConvolution, ZambaHeads,
)  # fmt: skip


def adapter_of(module: nn.Module, recurrence: RecurrenceBackend | None = None) -> StateAdapter | None:
    """`module` as a mixer with states; None if no kind matches.

    recurrence: its backend; by default that of `quire.devices.device_of()`.
    """
    for kind in KINDS:
        if kind.match(module):
            return kind(module, device_of().recurrence if recurrence is None else recurrence)
    return None


def state_adapters(model: nn.Module, recurrence: RecurrenceBackend | None = None) -> dict[int, StateAdapter]:
    """Every mixer of `model` whose kind is known, by the index of its layer.

    The index is the module's `layer_idx`, or the last number in its name ("model.layers.3.temporal_block").

    Raises:
        UnsupportedModelError: two mixers in one layer, or a mixer without a layer index.
    """
    adapters: dict[int, StateAdapter] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        adapter = adapter_of(module, recurrence)
        if adapter is None:
            continue
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        index = getattr(module, "layer_idx", None)
        layer = index if isinstance(index, int) else (numbers[-1] if numbers else None)
        if layer is None or layer in adapters:
            before = "no layer" if layer is None else f"layer {layer}, which has {names[layer]}"
            raise UnsupportedModelError(
                f"expected one mixer with states a layer, got {name or type(module).__name__} in {before}; "
                "quire runs no model of that structure"
            )
        adapters[layer], names[layer] = adapter, name
    return adapters
