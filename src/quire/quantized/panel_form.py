"""What must be known beside a quantized weight's panels to read them: `told` says it as JSON, `of_told` takes it back.

Both go by way of a weight of one output with made-up numbers whose panels have the same form (`row_like`), so that the
extension alone says what a form is. Not the panels (`panels`), nor what a reader of a checkpoint knows (`code_form`).

Invariant: a weight and the one output that stands for it get the same `QuantizedForm` (native/kernels/quantized.hpp).

Cost: a pass over the zeros, where there are some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from quire.quantized.code_form import packed_dtype
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["of_told", "row_like", "told"]

_OF_32_BITS = 1.0 + 2.0**-20  # no number of 16 bits, so a scale like this is held in 32


def row_like(weight: QuantizedWeight) -> QuantizedWeight:
    """One output of the form of `weight`."""
    zeros = weight.zeros
    if isinstance(zeros, torch.Tensor):
        # What the largest is decides how codes are looked up.
        zeros = torch.full((1, zeros.shape[1]), zeros.max().item(), dtype=zeros.dtype)
    return QuantizedWeight(
        torch.zeros(1, weight.num_inputs, dtype=torch.uint8),
        weight.bits,
        weight.group,
        _like(weight.scales),
        weight.label,
        zeros,
        None if weight.minimums is None else _like(weight.minimums),
        weight.table,
        weight.order,
    )


def told(like: QuantizedWeight) -> dict[str, Any]:
    """Of a weight of one output that `row_like` made."""
    zeros = like.zeros
    return {
        "label": like.label,
        "bits": like.bits,
        "group": like.group,
        "scales": _told(like.scales),
        "zeros": [_name(zeros.dtype), zeros.max().item()] if isinstance(zeros, torch.Tensor) else zeros,
        "minimums": None if like.minimums is None else _told(like.minimums),
        "table": None if like.table is None else like.table.float().numpy().tobytes().hex(),
        "order": None if like.order is None else like.order.tolist(),
    }


def of_told(said: Mapping[str, Any], num_inputs: int) -> QuantizedWeight:
    """What `told` was asked about."""
    num_groups = num_inputs // said["group"]
    zeros, table, order = said["zeros"], said["table"], said["order"]
    if isinstance(zeros, list):
        zeros = torch.full((1, num_groups), zeros[1], dtype=getattr(torch, zeros[0]))
    if table is not None:
        table = torch.from_numpy(np.frombuffer(bytearray.fromhex(table), dtype=np.float32))
    return QuantizedWeight(
        torch.zeros(1, num_inputs, dtype=torch.uint8),
        said["bits"],
        said["group"],
        _of_told(said["scales"], num_groups),
        said["label"],
        zeros,
        None if said["minimums"] is None else _of_told(said["minimums"], num_groups),
        table,
        None if order is None else torch.tensor(order, dtype=torch.int64),
    )


def _like(factor: Factor) -> Factor:
    coarse = factor.coarse
    return Factor(
        _number((1, factor.fine.shape[1]), packed_dtype(factor.fine)),
        None if coarse is None else _number((1, coarse.shape[1]), packed_dtype(coarse)),
    )


def _told(factor: Factor) -> list[Any]:
    coarse = factor.coarse
    return [_name(factor.fine.dtype)] + ([] if coarse is None else [_name(coarse.dtype), coarse.shape[1]])


def _of_told(said: list[Any], num_groups: int) -> Factor:
    fine = _number((1, num_groups), getattr(torch, said[0]))
    return Factor(fine, _number((1, said[2]), getattr(torch, said[1])) if len(said) > 1 else None)


def _number(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, _OF_32_BITS if dtype is torch.float32 else 1, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
