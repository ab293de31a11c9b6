"""A kernel's second form, for arguments of any alignment.

Triton compiles another kernel where a pointer or an integer is a multiple of 16, and loads 16 bytes at once there. A
file of kernels launches its kernels with aligned arguments only, and the second form with any others, so that each
launch is one of two variants.

Cost: none at a launch.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton

__all__ = ["for_any_alignment"]


def for_any_alignment(kernel: Any) -> Any:
    """The kernel of `triton.jit`, not specialised for any argument."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    names = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    jit: Any = triton.jit
    return jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(kernel.fn)
