"""The mixer of a state layer in one native call: projections, convolution, gates, recurrence, gated norm, output.

Matched by its adapter (`quire.model.state`), which recognises its structure and has proved it in float32: the same
parts, with packed linear layers. Whether the gate is applied before or after the norm is left open: each is a
candidate, and `fused_state_proof` chooses one.
Cost of a call: the products, the recurrence, and about 10 us.
"""

from __future__ import annotations

from typing import Any

import torch

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices.cpu.native_recurrence import handle_of
from quire.model.fused.attention import RotaryTable
from quire.model.fused.structure import PackedLayer, can_run_together, packed_layer
from quire.model.state import StateAdapter, StateSource, state_source
from quire.model.state.adapter import CONVOLUTION, RECURRENT
from quire.model.state.parts import MixerParts

__all__ = ["FusedMixer", "mixer_candidates"]


class FusedMixer:
    """The parts of a mixer; `block` makes the native call with a norm and residual around it.

    finding: whether the gate is applied before the norm. adapter: the same in torch's operators.
    """

    proved_rotation = "none"  # its rows know no positions

    def __init__(
        self,
        adapter: StateAdapter,
        layer: int,
        parts: MixerParts,
        inputs: list[PackedLayer],
        output: PackedLayer,
        finding: bool,
    ) -> None:
        self.adapter, self.layer, self.finding = adapter, layer, finding
        self._output = output
        self.width, self.dtype = output.num_outputs, output.dtype
        # Here, not at the first call: then the operators of a forward may be recorded (`row_invariant.Recorder`).
        self._arguments = (
            [layer.product for layer in inputs],
            [list(columns) for columns in (parts.x, parts.gate, parts.a, parts.b)],
            _float32_copy(parts.conv.weight[:, 0]),
            _float32_copy_or_none(parts.conv.bias),
            parts.heads,
            None if parts.a_log is None else -torch.exp(_float32_copy(parts.a_log)),
            _float32_copy_or_none(parts.dt_bias),
            _float32_copy_or_none(parts.d),
            parts.limits,
            parts.factor,
            None if parts.norm is None else _float32_copy(parts.norm.weight),
            0.0 if parts.norm is None else _epsilon_of(parts.norm),
            parts.norm_width,
            finding,
            *output.product,
        )
        self._kind = parts.kind
        self._standalone_block: Any = None

    def block(self, around: Any, rotation: str = "none") -> Any:
        return _native.MixerBlock(self._kind, around, *self._arguments)

    def serves(self, hidden: Any, cache: object, mask: Any) -> bool:
        source = state_source(cache)
        return (
            source is not None
            and source.state_step is not None
            and mask is None
            and hidden.dtype is self.dtype
            and hidden.dim() == 3
            and hidden.shape[0] == 1
            and hidden.is_contiguous()
        )

    def run(self, block: Any, hidden: torch.Tensor, cache: StateSource, table: RotaryTable) -> torch.Tensor:
        """Runs hidden [1, T, width], contiguous, through `block`, and updates the states."""
        states = cache.state_of(self.layer)
        out = torch.empty_like(hidden)
        assert cache.state_step is not None  # within a step
        handle = handle_of(cache.state_step)
        block.run(handle, states[CONVOLUTION], states.get(RECURRENT), hidden, out)
        return out

    def __call__(
        self, hidden: torch.Tensor, cache: StateSource, table: RotaryTable = (None, None)
    ) -> torch.Tensor:
        """The mixer's output [1, T, width] for rows of a `StateSource`'s step."""
        if self._standalone_block is None:
            self._standalone_block = self.block(_native.Surroundings(None, None, None))
        return self.run(self._standalone_block, hidden, cache, table)


@torch.inference_mode()
def mixer_candidates(adapter: StateAdapter, layer: int) -> dict[bool, FusedMixer]:
    """The mixer as a native call, by its possible finding (`FusedMixer.finding`); empty if no kernel has its kind.

    layer: number of the layer whose states it uses.
    """
    parts = adapter.parts()
    if parts is None or (parts.norm is not None and _epsilon_of(parts.norm) is None):
        return {}
    packed_inputs, output = [packed_layer(module) for module in parts.inputs], packed_layer(parts.output)
    if output is None or any(layer is None or layer.dtype is not output.dtype for layer in packed_inputs):
        return {}
    known_inputs = [part for part in packed_inputs if part is not None]
    if any(part.num_inputs != output.num_outputs for part in known_inputs) or not can_run_together(
        known_inputs
    ):
        return {}
    kinds = (False,) if parts.norm is None else (True, False)
    return {finding: FusedMixer(adapter, layer, parts, known_inputs, output, finding) for finding in kinds}


def _epsilon_of(norm: Any) -> Any:
    return next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)


def _float32_copy_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _float32_copy(tensor)


def _float32_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A float32, contiguous copy."""
    return tensor.detach().float().contiguous().clone()
