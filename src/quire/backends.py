"""The choice between native and python for the parts of this machine, made in one place.

Other devices are in `quire.devices.device`, the registry of all devices; parts that stay on this machine in any case
(the block manager) choose here.

`native` is the extension `quire._native`, `python` runs without it. The argument decides, else the environment variable
QUIRE_BACKEND, else native is used if it was built.
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
    """`quire._native`, or None if it was not built. To inspect it; code that computes calls `extension`."""
    try:
        return importlib.import_module("quire._native")
    except ImportError:
        return None


def is_host_backend(name: str | None) -> bool:
    """Whether `LLM(backend=name)` computes on this machine; other names are registered devices."""
    return name in (None, "native", "python")


def choose_backend(name: str | None, *, needs: str) -> BackendName:
    """The backend of a part whose native form is `quire._native.<needs>`.

    Raises ArgumentError for an unknown name, BackendError if native is requested but missing.
    """
    requested = name if name is not None else os.environ.get("QUIRE_BACKEND") or None
    source = "backend" if name is not None else "the environment variable QUIRE_BACKEND"
    if requested not in (None, "native", "python"):
        raise ArgumentError(f'expected "native" or "python", got {requested!r} for {source}')
    if requested == "python":
        return "python"
    if hasattr(native_module(), needs):
        return "native"
    if requested == "native":
        raise BackendError(
            f'expected quire._native with {needs} for backend "native" (from {source}), and it is not built here; '
            f'install with a C++20 compiler, or use backend="python"'
        )
    return "python"


def extension(backend: str | None = None) -> Any:
    """`quire._native` for the parts that run on this machine with `LLM(backend=backend)`; None if it may not be called.

    It is None with "python", and if it was not built. With a registered device, or without a name, the environment
    decides. *raises:* as `choose_backend`.
    """
    name = backend if is_host_backend(backend) else None
    return native_module() if choose_backend(name, needs="copy_rows") == "native" else None
