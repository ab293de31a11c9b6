"""Whether an adapter computes what its mixer computes: asked of the mixer itself before it serves.

    distance      F1: in float32, on a copy whose weights are widened, against the mixer's own forward over a whole
                  prompt. A mixer whose structure is known and whose arithmetic is not (another activation, an added
                  factor) is found out by this.
    is_as_good    F2: in the model's own type, if that has 16 bits. The yardstick is the mixer's own forward on a copy
                  of all that it has, its tables too, in float32; the mixer in its own type says how near is near.

Of all mixers that are alike (`quire.model.prove.equal_modules`) one is asked: what it computes, apart from its
weights, holds for all of them.

Cost, for each kind: a copy of a mixer in float32, and its forward over 1, 8 and 65 rows, four times; in 16 bits
one more copy, and three forwards of at least 74 rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch

from quire.errors import UnsupportedModelError
from quire.model.prove.equal_modules import kind_of
from quire.model.prove.error_bounds import NUM_ROWS, row_parts, within_bounds
from quire.model.state.adapter import StateAdapter
from quire.model.state.step import StateStep
from quire.recurrence import RecurrenceStep

__all__ = ["TOLERANCE", "distance", "is_as_good", "prove_states"]

TOLERANCE = 1e-5  # of the rms of what the mixer answers
_NUDGE = 2.0**-21  # some units in the last place of float32, put on each input
_TIMES = 4.0  # a row may be that many times as far as the nudges move it


def distance(adapter: StateAdapter, num_rows: int) -> float:
    """How far the adapter is from its mixer's own forward over a fresh text: the largest difference over the rms.

    Both run on a copy in float32; random rows, the same at every call. A norm may blow up the last bits of a row whose
    heads all but cancel: what nudges of the inputs' last bits do to the mixer's own answer is not counted.
    """
    wide = adapter.widened()
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, wide.hidden_size, generator=generator)
    with torch.no_grad():
        expected = wide.own(hidden)
        got = _in_parts(wide, hidden, [slice(0, num_rows)])
        moved = torch.zeros(num_rows)
        for _ in range(2):
            nudges = (torch.rand(hidden.shape, generator=generator) < 0.5).float() * (2 * _NUDGE) - _NUDGE
            moved = torch.maximum(moved, (wide.own(hidden * (1 + nudges)) - expected).abs().amax(-1))
    beyond = (got - expected).abs().amax(-1) - _TIMES * moved
    return float(beyond.max().clamp(min=0.0) / expected.square().mean().sqrt())


def is_as_good(adapter: StateAdapter) -> bool:
    """Whether the adapter, in the type of its mixer, loses no more than the mixer does (`yardstick.within_bounds`)."""
    wide, num_rows = copy.deepcopy(adapter.module).float(), max(NUM_ROWS, adapter.text_lengths[-1])
    dtype = adapter.first_projection.weight.dtype
    hidden = torch.randn(num_rows, adapter.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = row_parts(num_rows)
    with torch.no_grad():
        expected = type(adapter)(wide, adapter.recurrence).own(hidden.float())
        return within_bounds(_in_parts(adapter, hidden, parts), adapter.own(hidden), expected, dtype, parts)


def _in_parts(adapter: StateAdapter, hidden: torch.Tensor, parts: Iterable[slice]) -> torch.Tensor:
    """The adapter's answer to the rows of one sequence, some at a time."""
    states = {name: torch.zeros(1, *shape) for name, shape in adapter.fields.items()}
    steps = [torch.arange(part.start, part.stop) for part in parts]
    return torch.cat([
        adapter.forward(hidden[rows], states, StateStep(RecurrenceStep([0, len(rows)], [0]), rows))
        for rows in steps
    ])  # fmt: skip


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
        farthest = max(distance(adapter, num_rows) for num_rows in adapter.text_lengths)
        if not farthest <= TOLERANCE:  # NaN too
            raise UnsupportedModelError(
                f"expected layer {layer}'s {type(adapter.module).__name__} to compute what quire knows "
                f"as {adapter.kind}, within {TOLERANCE} of its answer's rms, got {farthest:.1e}; "
                "the model's own forward would have to run"
            )
        dtype = adapter.first_projection.weight.dtype
        if dtype in (torch.bfloat16, torch.float16) and not is_as_good(adapter):
            raise UnsupportedModelError(
                f"expected {adapter.kind} for layer {layer}'s {type(adapter.module).__name__} to lose no more in "
                f"{dtype} than the module's own forward does, got more; load the model in float32"
            )
