"""The metadata needed to read a quantized weight's panels: `to_metadata` gives it as JSON, `from_metadata` reads it.

Both use a weight of one output with made-up numbers whose panels have the same form (`single_output`), so that the
extension alone defines a form. Not the panels (`panels`), nor the form that a checkpoint reader gives (`code_form`).

Invariant: a weight and its single output get the same `QuantizedForm` (native/kernels/quantized.hpp).

Cost: a pass over the zeros, if it has some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from quire.weights.codes.code_form import packed_dtype
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["from_metadata", "single_output", "to_metadata"]

_OF_32_BITS = 1.0 + 2.0**-20  # no 16-bit type has this number, so such a scale is packed in 32 bits


def single_output(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight of one output with the form of `weight`."""
    zeros = weight.zeros
    if isinstance(zeros, torch.Tensor):
        # The largest zero decides how codes are looked up.
        zeros = torch.full((1, zeros.shape[1]), zeros.max().item(), dtype=zeros.dtype)
    return QuantizedWeight(
        torch.zeros(1, weight.num_inputs, dtype=torch.uint8),
        weight.bits,
        weight.group,
        _like_factor(weight.scales),
        weight.label,
        zeros,
        None if weight.minimums is None else _like_factor(weight.minimums),
        weight.table,
        weight.order,
    )


def to_metadata(output: QuantizedWeight) -> dict[str, Any]:
    """The metadata of a weight of one output from `single_output`."""
    zeros = output.zeros
    return {
        "label": output.label,
        "bits": output.bits,
        "group": output.group,
        "scales": _factor_metadata(output.scales),
        "zeros": [_name(zeros.dtype), zeros.max().item()] if isinstance(zeros, torch.Tensor) else zeros,
        "minimums": None if output.minimums is None else _factor_metadata(output.minimums),
        "table": None if output.table is None else output.table.float().numpy().tobytes().hex(),
        "order": None if output.order is None else output.order.tolist(),
    }


def from_metadata(metadata: Mapping[str, Any], num_inputs: int) -> QuantizedWeight:
    """The weight of one output with this metadata."""
    num_groups = num_inputs // metadata["group"]
    zeros, table, order = metadata["zeros"], metadata["table"], metadata["order"]
    if isinstance(zeros, list):
        zeros = torch.full((1, num_groups), zeros[1], dtype=getattr(torch, zeros[0]))
    if table is not None:
        table = torch.from_numpy(np.frombuffer(bytearray.fromhex(table), dtype=np.float32))
    return QuantizedWeight(
        torch.zeros(1, num_inputs, dtype=torch.uint8),
        metadata["bits"],
        metadata["group"],
        _read_factor(metadata["scales"], num_groups),
        metadata["label"],
        zeros,
        None if metadata["minimums"] is None else _read_factor(metadata["minimums"], num_groups),
        table,
        None if order is None else torch.tensor(order, dtype=torch.int64),
    )


def _like_factor(factor: Factor) -> Factor:
    coarse = factor.coarse
    return Factor(
        _number((1, factor.fine.shape[1]), packed_dtype(factor.fine)),
        None if coarse is None else _number((1, coarse.shape[1]), packed_dtype(coarse)),
    )


def _factor_metadata(factor: Factor) -> list[Any]:
    coarse = factor.coarse
    return [_name(factor.fine.dtype)] + ([] if coarse is None else [_name(coarse.dtype), coarse.shape[1]])


def _read_factor(metadata: list[Any], num_groups: int) -> Factor:
    fine = _number((1, num_groups), getattr(torch, metadata[0]))
    return Factor(fine, _number((1, metadata[2]), getattr(torch, metadata[1])) if len(metadata) > 1 else None)


def _number(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, _OF_32_BITS if dtype is torch.float32 else 1, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
