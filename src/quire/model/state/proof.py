"""Whether an adapter computes what its mixer computes: asked of the mixer itself, in float32, before it serves.

The mixer's own forward over a whole prompt is the yardstick, on a copy whose weights are widened to float32. A mixer
whose structure is known and whose arithmetic is not (another activation, an added factor) is found out by this.

Of all mixers that are alike (`quire.model.prove.alike`) one is asked: what it computes, apart from its weights, holds
for all of them.

Cost, for each kind: a copy of a mixer in float32, and its forward over 1, 8 and 65 rows, four times.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from quire.errors import UnsupportedModelError
from quire.model.prove.alike import kind_of
from quire.model.state.adapter import StateAdapter
from quire.model.state.step import StateStep
from quire.recurrence import RecurrenceStep

__all__ = ["NUM_ROWS", "TOLERANCE", "distance", "prove_states"]

TOLERANCE = 1e-5  # of the rms of what the mixer answers
NUM_ROWS = (1, 8, 65)
_NUDGE = 2.0**-21  # some units in the last place of float32, put on each input
_TIMES = 4.0  # a row may be that many times as far as the nudges move it


def distance(adapter: StateAdapter, num_rows: int) -> float:
    """How far the adapter is from its mixer's own forward over a fresh text: the largest difference over the rms.

    Both run on a copy in float32; random rows, the same at every call. A norm may blow up the last bits of a row whose
    heads all but cancel: what nudges of the inputs' last bits do to the mixer's own answer is not counted.
    """
    wide = type(adapter)(copy.deepcopy(adapter.module).float(), adapter.recurrence)
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, wide.hidden_size, generator=generator)
    step = StateStep(RecurrenceStep([0, num_rows], [0]), torch.arange(num_rows))
    states = {name: torch.zeros(1, *shape) for name, shape in wide.fields.items()}
    with torch.no_grad():
        expected = wide.own(hidden)
        got = wide.forward(hidden, states, step)
        moved = torch.zeros(num_rows)
        for _ in range(2):
            nudges = (torch.rand(hidden.shape, generator=generator) < 0.5).float() * (2 * _NUDGE) - _NUDGE
            moved = torch.maximum(moved, (wide.own(hidden * (1 + nudges)) - expected).abs().amax(-1))
    beyond = (got - expected).abs().amax(-1) - _TIMES * moved
    return float(beyond.max().clamp(min=0.0) / expected.square().mean().sqrt())


def prove_states(adapters: Mapping[int, StateAdapter]) -> None:
    """Each adapter computes what its mixer does: one of those that are alike is asked.

    Raises:
        UnsupportedModelError: one does not; says which layer, and how far it is.
    """
    proved = set()
    for layer, adapter in adapters.items():
        kind = kind_of(adapter.module, type(adapter))
        if kind in proved:
            continue
        proved.add(kind)
        farthest = max(distance(adapter, num_rows) for num_rows in NUM_ROWS)
        if not farthest <= TOLERANCE:  # NaN too
            raise UnsupportedModelError(
                f"expected layer {layer}'s {type(adapter.module).__name__} to compute what quire knows "
                f"as {adapter.kind}, within {TOLERANCE} of its answer's rms, got {farthest:.1e}; "
                "the model's own forward would have to run"
            )
