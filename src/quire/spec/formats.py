"""The formats of keys and values: what an element of the KV cache is, by name.

The one table: the spec counts bytes by it, the storages make tensors by it, a stored segment and the fingerprint carry
the name. A new format is one file that calls `register`. It is not the arithmetic: the back ends compute in `element`.

Cost: a look-up in a dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.registry import Registry

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "KVFormat", "format_of", "register", "unregister"]


@dataclass(frozen=True)
class KVFormat:
    """name: as users and `KVSpec.dtype` have it. element: torch's and the kernels' name of the stored element."""

    name: str
    element: str
    num_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # a spec alone needs none

        return getattr(torch, self.element)


_NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMATS = Registry(
    "a format", "dtype", {name: KVFormat(name, name, size) for name, size in _NUM_BYTES.items()}
)
unregister = FORMATS.unregister


def register(new: KVFormat) -> None:
    """*raises:* ArgumentError: the name is taken by another format."""
    FORMATS.register(new.name, new)


def format_of(name: str) -> KVFormat:
    """*raises:* ArgumentError: there is none of this name."""
    return FORMATS[name]
