"""Whether the states that a cache file's header tells can be those of this cache, to be gone on from.

Beside `file_header`, for what is true of states only: one step needs all of them, each in the shape that the model's
config tells (where `quire.spec` knows it), and of as many rows as there are keys.

Cost: some 10 us a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from quire.errors import UnsupportedModelError
from quire.hf.file_header import BadHeaderError, FileLayer, FileState
from quire.hf.state_layers import BoundStates
from quire.spec.state_spec import state_specs

__all__ = ["check_states"]


def check_states(
    stored: tuple[FileLayer, ...], layers: list[Any], config: Any, dtypes: frozenset[torch.dtype]
) -> None:
    """*raises:* BadHeaderError: the states of these layers could not be filled so. `check_layers` has passed `stored`.

    config: the model's. dtypes: of its weights, floating point.
    """
    rows = [entry.rows for entry in stored if entry.rows is not None]
    num_rows = rows[0].shape.num_rows if rows else None
    has_any = any(one.length for one in rows)
    for where, state in _all(stored):
        _check_one(state, where)
        for name, tensor in state.tensors.items():
            _check_width(tensor.dtype, dtypes, f"{where}, {name}")
            num_rows = tensor.shape[0] if num_rows is None else num_rows
            if tensor.shape[0] != num_rows:
                raise BadHeaderError(
                    f"expected states of {num_rows} rows, got {tensor.shape[0]} - in {where}, {name}"
                )
            has_any = True
    for index, entry in enumerate(stored):
        if has_any and entry.states and not any(state.tensors for state in entry.states):
            raise BadHeaderError(
                f"expected states in every layer that keeps some, got none in layers[{index}]"
            )
    for index, sizes in _told(config).items():
        if index < len(stored) and isinstance(layers[index], BoundStates):
            _check_sizes(stored[index].states or (), sizes, f"layers[{index}].states")


def _all(stored: tuple[FileLayer, ...]) -> Iterator[tuple[str, FileState]]:
    for index, entry in enumerate(stored):
        for number, state in enumerate(entry.states or ()):
            yield f"layers[{index}].states[{number}]", state


def _check_one(state: FileState, where: str) -> None:
    """That its fields tell one story."""
    convolution, width = state.tensors.get("conv_states"), state.conv_kernel_size
    if (convolution is None) != (width is None) or (
        convolution is not None and (len(convolution.shape) < 2 or convolution.shape[-1] != width)
    ):
        raise BadHeaderError(
            f"expected conv_states whose last size is conv_kernel_size, got "
            f"{None if convolution is None else list(convolution.shape)} and {width} - in {where}"
        )
    if state.has_previous_state != (convolution is not None) and "recurrent_states" not in state.tensors:
        raise BadHeaderError(
            f"expected has_previous_state where there are states, got {state.has_previous_state} with "
            f"{sorted(state.tensors) or 'none'} - in {where}"
        )
    if convolution is not None and not state.has_previous_state:
        raise BadHeaderError(f"expected has_previous_state true, got false - in {where}")


def _told(config: Any) -> dict[int, tuple[int | None, int | None]]:
    """By layer: channels of its convolution, and numbers of its recurrent state for one row; empty if not known."""
    try:
        specs = state_specs(config)
    except UnsupportedModelError:
        return {}
    told: dict[int, tuple[int | None, int | None]] = {}
    for spec in specs:
        shapes = {field.name: field.shape for field in spec.fields}
        if shapes.keys() <= {"convolution", "recurrent"}:
            told[spec.layer] = (
                shapes["convolution"][1] if "convolution" in shapes else None,
                math.prod(shapes["recurrent"]) if "recurrent" in shapes else None,
            )
    return told


def _check_sizes(states: tuple[FileState, ...], sizes: tuple[int | None, int | None], where: str) -> None:
    got = (
        [math.prod(one.shape[1:-1]) for state in states if (one := state.tensors.get("conv_states"))],
        [math.prod(one.shape[1:]) for state in states if (one := state.tensors.get("recurrent_states"))],
    )
    for what, expected, found in zip(("channels", "recurrent numbers"), sizes, got, strict=True):
        if found and sum(found) != (expected or 0):
            raise BadHeaderError(
                f"expected {expected or 0} {what} for each row, got {sum(found)} - in {where}"
            )


def _check_width(dtype: torch.dtype, dtypes: frozenset[torch.dtype], where: str) -> None:
    """Of states, which models keep in float32 or as their weights are."""
    if dtypes and dtype.itemsize > max(4, *(one.itemsize for one in dtypes)):
        raise BadHeaderError(f"expected at most 4 bytes a number, got {dtype} - in {where}")
