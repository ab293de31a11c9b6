"""Arguments of `LLM` as people give them, checked before minutes of loading; each raises ArgumentError."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError

__all__ = ["check_range", "writable_folder"]


def writable_folder(name: str, value: str | os.PathLike[str]) -> Path:
    """A folder to write in, made if it is not there."""
    folder = Path(value).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"expected a folder that is there or can be made, got {str(value)!r} ({error.strerror}) - in `{name}`"
        ) from error
    return folder


def check_range(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value <= high:
        raise ArgumentError(f"expected an integer of {low} to {high}, got {value!r} - in `{name}`")
