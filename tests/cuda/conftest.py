"""Triton's interpreter runs the kernels of this folder: on CPU tensors, in float32 and float16.

tests/conftest.py sets TRITON_INTERPRET.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("triton") is not None:
    from support import exact_interpreter

    exact_interpreter.install()
