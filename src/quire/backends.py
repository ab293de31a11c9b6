"""Which back end a part of this machine runs on: the one place where "native or python" is decided.

Other devices are in `quire.attention.devices`, the registry of all that a model may run on; what stays on this machine
beside them (the block manager) is decided here.

`native` is the extension `quire._native`, `python` what runs without it. Asked for by argument, else by the
environment variable QUIRE_BACKEND, else native where it is built.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any, Literal

from quire.errors import ArgumentError, BackendError

__all__ = ["BackendName", "choose_backend", "extension", "is_host_backend", "native_module"]

BackendName = Literal["native", "python"]


def native_module() -> ModuleType | None:
    """`quire._native`, or None where it was not built. For who asks what there is; who computes asks `extension`."""
    try:
        return importlib.import_module("quire._native")
    except ImportError:
        return None


def is_host_backend(name: str | None) -> bool:
    """Whether `LLM(backend=name)` computes on this machine; other names are those of registered devices."""
    return name in (None, "native", "python")


def choose_backend(name: str | None, *, needs: str) -> BackendName:
    """The back end to use for a part whose native form is `quire._native.<needs>`.

    Raises ArgumentError for an unknown name, BackendError if native is asked for and is not there.
    """
    asked = name if name is not None else os.environ.get("QUIRE_BACKEND") or None
    where = "backend" if name is not None else "the environment variable QUIRE_BACKEND"
    if asked not in (None, "native", "python"):
        raise ArgumentError(f'expected "native" or "python", got {asked!r} for {where}')
    if asked == "python":
        return "python"
    if hasattr(native_module(), needs):
        return "native"
    if asked == "native":
        raise BackendError(
            f'expected quire._native with {needs} for backend "native" (from {where}), and it is not built here; '
            f'install with a C++20 compiler, or use backend="python"'
        )
    return "python"


def extension(backend: str | None = None) -> Any:
    """`quire._native` for what runs on this machine beside `LLM(backend=backend)`; None where it is not to be called.

    That is with "python", and where it was not built. Beside a registered device, and without a name, the environment
    decides. *raises:* as `choose_backend`.
    """
    name = backend if is_host_backend(backend) else None
    return native_module() if choose_backend(name, needs="copy_rows") == "native" else None
