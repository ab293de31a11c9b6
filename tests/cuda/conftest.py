"""Triton's interpreter runs the kernels of this folder: on CPU tensors, in float32 and float16.

TRITON_INTERPRET is read when `triton.jit` makes a kernel, so it is set before any test of the folder imports triton. A
process that compiles kernels unsets it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from support import exact_interpreter

    exact_interpreter.install()
