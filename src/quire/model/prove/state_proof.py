"""Proof that an adapter computes what its mixer computes, made before it serves.

    distance          F1: in float32, on a copy with upcast weights, against the mixer's own forward over a prompt.
                      It detects a mixer of known structure with other arithmetic (another activation, a factor).
    is_within_bounds  F2: in the model's own type, if that has 16 bits. The reference computation is the mixer's own
                      forward on a copy in float32, its tables included; the mixer's own error sets the bound.

One of all equal mixers (`quire.modules.equal_modules`) is tested: apart from its weights, its result holds for all
of them.

Cost, for each kind: a copy of a mixer in float32, and its forward over 1, 8 and 65 rows, four times; in 16 bits
one more copy, and three forwards of at least 74 rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch

from quire.errors import UnsupportedModelError
from quire.model.state.adapter import StateAdapter
from quire.modules.equal_modules import kind_of
from quire.modules.error_bounds import NUM_ROWS, row_parts, within_bounds
from quire.recurrence import recurrence_step

__all__ = ["TOLERANCE", "distance", "is_within_bounds", "prove_states"]

TOLERANCE = 1e-5  # of the rms of the mixer's output
_PERTURBATION = 2.0**-21  # some units in the last place of float32, put on each input
_NOISE_FACTOR = 4.0  # allowed distance of a row, in multiples of what the perturbations move it


def distance(adapter: StateAdapter, num_rows: int) -> float:
    """Distance of the adapter from its mixer's own forward over a fresh text: the largest difference over the rms.

    Both run on a copy in float32; random rows, the same at every call. A norm may amplify the last bits of a row whose
    heads nearly cancel: the effect of perturbed last input bits on the mixer's own output is subtracted.
    """
    wide = adapter.float32_copy()
    generator = torch.Generator().manual_seed(num_rows)
    place = wide.first_projection.weight.device
    hidden = torch.randn(num_rows, wide.hidden_size, generator=generator).to(place)
    with torch.no_grad():
        expected = wide.module_output(hidden)
        got = _in_parts(wide, hidden, [slice(0, num_rows)])
        noise = torch.zeros(num_rows, device=place)
        for _ in range(2):
            perturbations = (torch.rand(hidden.shape, generator=generator) < 0.5).float().to(place) * (
                2 * _PERTURBATION
            ) - _PERTURBATION
            noise = torch.maximum(
                noise, (wide.module_output(hidden * (1 + perturbations)) - expected).abs().amax(-1)
            )
    beyond = (got - expected).abs().amax(-1) - _NOISE_FACTOR * noise
    return float(beyond.max().clamp(min=0.0) / expected.square().mean().sqrt())


def is_within_bounds(adapter: StateAdapter) -> bool:
    """Whether the adapter, in its mixer's type, loses no more than the mixer does (`error_bounds.within_bounds`)."""
    wide, num_rows = copy.deepcopy(adapter.module).float(), max(NUM_ROWS, adapter.text_lengths[-1])
    weight = adapter.first_projection.weight
    dtype = weight.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, adapter.hidden_size, generator=generator).to(weight.device, dtype)
    parts = row_parts(num_rows)
    with torch.no_grad():
        expected = type(adapter)(wide, adapter.recurrence).module_output(hidden.float())
        return within_bounds(
            _in_parts(adapter, hidden, parts), adapter.module_output(hidden), expected, dtype, parts
        )


def _in_parts(adapter: StateAdapter, hidden: torch.Tensor, parts: Iterable[slice]) -> torch.Tensor:
    """The adapter's output for the rows of one sequence, computed part by part."""
    states = {name: torch.zeros(1, *shape, device=hidden.device) for name, shape in adapter.fields.items()}
    steps = [torch.arange(part.start, part.stop, device=hidden.device) for part in parts]
    return torch.cat([
        adapter.forward(hidden[rows], states, recurrence_step([0, len(rows)], [0], positions=rows))
        for rows in steps
    ])  # fmt: skip


def prove_states(adapters: Mapping[int, StateAdapter]) -> None:
    """Return if each adapter computes what its mixer does; one of each set of equal mixers is tested.

    Raises:
        UnsupportedModelError: one does not; with its layer and its distance.
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
        if dtype in (torch.bfloat16, torch.float16) and not is_within_bounds(adapter):
            raise UnsupportedModelError(
                f"expected {adapter.kind} for layer {layer}'s {type(adapter.module).__name__} to lose no more in "
                f"{dtype} than the module's own forward does, got more; load the model in float32"
            )
