"""Triton's interpreter with products whose bits do not depend on the number of rows.

The interpreter computes `tl.dot` by numpy's BLAS, which chooses the order of a sum by the sizes of the matrices and the
place of a row in them; a card's matrix instruction does not. With `install`, a product's element is the sum over k in
order, in float32, so tests compare bits of rows.

Cost: a product of [16, 128] and [128, 64] takes about 0.3 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """first [.., m, k] times second [.., k, n] in float32, added in the order of k."""
    first, second = first.astype(np.float32), second.astype(np.float32)
    total = first[..., :, :1] * second[..., :1, :]
    scratch = np.empty_like(total)
    for k in range(1, first.shape[-1]):
        np.multiply(first[..., :, k : k + 1], second[..., k : k + 1, :], out=scratch)
        total += scratch
    return total


def install() -> None:
    """Replace the product of the interpreter of this process."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return interpreter.TensorHandle(product(a.data, b.data) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
