"""The mixer of a state layer in one native call: projections, convolution, gates, recurrence, gated norm, output.

Matched by its adapter (`quire.model.state`), which knows it by its structure and has proved it in float32: its parts,
with packed linear layers. Whether the gate comes before the norm or behind it is what is left open: the candidates, of
which `fused_state_proof` finds one.
Cost of a call: the products, the recurrence, and about 10 us.
"""

from __future__ import annotations

from typing import Any

import torch

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.model.fused.attention import RotaryTable
from quire.model.fused.structure import PackedLayer, go_together, packed_layer
from quire.model.state import StateAdapter, StateSource, state_source
from quire.model.state.adapter import CONVOLUTION, RECURRENT
from quire.model.state.parts import MixerParts
from quire.recurrence.native_recurrence import handle_of

__all__ = ["FusedMixer", "mixer_candidates"]


class FusedMixer:
    """The parts of a mixer; `block` makes the native call with a norm and residual around it.

    found: whether the gate comes before the norm. adapter: the same in torch's operators.
    """

    proved_rotation = "none"  # its rows know no positions

    def __init__(
        self,
        adapter: StateAdapter,
        layer: int,
        parts: MixerParts,
        inputs: list[PackedLayer],
        output: PackedLayer,
        found: bool,
    ) -> None:
        self.adapter, self.layer, self.found = adapter, layer, found
        self._output = output
        self.width, self.dtype = output.num_outputs, output.dtype
        # Now, not at the first call: somebody may be looking for torch operators then (`row_invariant.Recorder`).
        self._before = (
            [layer.product for layer in inputs],
            [list(columns) for columns in (parts.x, parts.gate, parts.a, parts.b)],
            _wide(parts.conv.weight[:, 0]),
            _wide_or_none(parts.conv.bias),
            parts.heads,
            None if parts.a_log is None else -torch.exp(_wide(parts.a_log)),
            _wide_or_none(parts.dt_bias),
            _wide_or_none(parts.d),
            parts.limits,
            parts.factor,
            None if parts.norm is None else _wide(parts.norm.weight),
            0.0 if parts.norm is None else _epsilon_of(parts.norm),
            parts.norm_width,
            found,
            *output.product,
        )
        self._kind = parts.kind
        self._alone: Any = None

    def block(self, around: Any, rotation: str = "none") -> Any:
        return _native.MixerBlock(self._kind, around, *self._before)

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
        """hidden [1, T, width], contiguous, through `block`; the states are those after it."""
        states = cache.state_of(self.layer)
        out = torch.empty_like(hidden)
        assert cache.state_step is not None  # within a step
        handle = handle_of(cache.state_step)
        block.run(handle, states[CONVOLUTION], states.get(RECURRENT), hidden, out)
        return out

    def __call__(
        self, hidden: torch.Tensor, cache: StateSource, table: RotaryTable = (None, None)
    ) -> torch.Tensor:
        """The mixer's answer [1, T, width] to rows of a `StateSource`'s step."""
        if self._alone is None:
            self._alone = self.block(_native.Surroundings(None, None, None))
        return self.run(self._alone, hidden, cache, table)


@torch.inference_mode()
def mixer_candidates(adapter: StateAdapter, layer: int) -> dict[bool, FusedMixer]:
    """The mixer as a native call, by what it may be (`FusedMixer.found`); empty if it is of no such kind.

    layer: whose states its are.
    """
    parts = adapter.parts()
    if parts is None or (parts.norm is not None and _epsilon_of(parts.norm) is None):
        return {}
    inputs, output = [packed_layer(module) for module in parts.inputs], packed_layer(parts.output)
    if output is None or any(one is None or one.dtype is not output.dtype for one in inputs):
        return {}
    known = [one for one in inputs if one is not None]
    if any(one.num_inputs != output.num_outputs for one in known) or not go_together(known):
        return {}
    kinds = (False,) if parts.norm is None else (True, False)
    return {found: FusedMixer(adapter, layer, parts, known, output, found) for found in kinds}


def _epsilon_of(norm: Any) -> Any:
    return next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)


def _wide_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _wide(tensor)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """float32, contiguous, nobody else's."""
    return tensor.detach().float().contiguous().clone()
