"""Checks that the states in a cache file's header fit this cache and that a step can continue from them.

It adds to `file_header` the rules for states: a step needs all of them, each in the shape from the model's config (if
`quire.spec` knows it), with as many rows as the keys have.

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
    """*raises:* BadHeaderError: the stored states do not fit these layers. `check_layers` has accepted `stored`.

    config: the model's. dtypes: floating point dtypes of its weights.
    """
    rows = [entry.rows for entry in stored if entry.rows is not None]
    num_rows = rows[0].shape.num_rows if rows else None
    has_any = any(entry.length for entry in rows)
    for where, state in _named_states(stored):
        _check_state(state, where)
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
            raise BadHeaderError(f"expected states in every state layer, got none in layers[{index}]")
    for index, sizes in _config_sizes(config).items():
        if index < len(stored) and isinstance(layers[index], BoundStates):
            _check_sizes(stored[index].states or (), sizes, f"layers[{index}].states")


def _named_states(stored: tuple[FileLayer, ...]) -> Iterator[tuple[str, FileState]]:
    for index, entry in enumerate(stored):
        for number, state in enumerate(entry.states or ()):
            yield f"layers[{index}].states[{number}]", state


def _check_state(state: FileState, where: str) -> None:
    """*raises:* BadHeaderError: the fields of the state contradict each other."""
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


def _config_sizes(config: Any) -> dict[int, tuple[int | None, int | None]]:
    """By layer: channels of its convolution, and numbers of its recurrent state for one row; empty if unknown."""
    try:
        specs = state_specs(config)
    except UnsupportedModelError:
        return {}
    sizes_of_layer: dict[int, tuple[int | None, int | None]] = {}
    for spec in specs:
        shapes = {field.name: field.shape for field in spec.fields}
        if shapes.keys() <= {"convolution", "recurrent"}:
            sizes_of_layer[spec.layer] = (
                shapes["convolution"][1] if "convolution" in shapes else None,
                math.prod(shapes["recurrent"]) if "recurrent" in shapes else None,
            )
    return sizes_of_layer


def _check_sizes(states: tuple[FileState, ...], sizes: tuple[int | None, int | None], where: str) -> None:
    got = (
        [math.prod(tensor.shape[1:-1]) for state in states if (tensor := state.tensors.get("conv_states"))],
        [
            math.prod(tensor.shape[1:])
            for state in states
            if (tensor := state.tensors.get("recurrent_states"))
        ],
    )
    for noun, expected, numbers in zip(("channels", "recurrent numbers"), sizes, got, strict=True):
        if numbers and sum(numbers) != (expected or 0):
            raise BadHeaderError(
                f"expected {expected or 0} {noun} for each row, got {sum(numbers)} - in {where}"
            )


def _check_width(dtype: torch.dtype, dtypes: frozenset[torch.dtype], where: str) -> None:
    """*raises:* BadHeaderError: a state wider than float32 and than the weights; models keep states in one of these."""
    if dtypes and dtype.itemsize > max(4, *(weight.itemsize for weight in dtypes)):
        raise BadHeaderError(f"expected at most 4 bytes a number, got {dtype} - in {where}")
