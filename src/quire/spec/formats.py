"""The formats of keys and values: what the row of a token and head is as it is stored, by name.

The one table: the spec counts bytes by it, the storages make rows by it, a stored segment and the fingerprint carry
the name. A new format is one file that calls `register`. It is not the arithmetic: what computes from elements is the
back ends, what makes codes of a row and a row of codes is `quire.attention.codecs`.

A format of codes has a row of `width` codes, padding up to a whole number of the model's elements, and the scale in the
row's last two bytes. Codes and scale of a token lie together, so whoever copies rows copies both.

Cost: a look-up in a dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.registry import Registry

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "INT8", "KVFormat", "element_formats", "format_of", "register", "unregister"]


@dataclass(frozen=True)
class KVFormat:
    """name: as users, `KVSpec.dtype` and `kv_dtype` have it. element: torch's and the kernels' name of the stored
    element. scale: torch's name of the scale behind a row of codes; empty where elements are the numbers themselves.
    """

    name: str
    element: str
    num_bytes: int
    scale: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # a spec alone needs none

        return getattr(torch, self.element)

    @property
    def is_coded(self) -> bool:
        """Whether a row is codes and a scale. Such a format is no dtype of a model."""
        return bool(self.scale)

    def row_bytes(self, width: int) -> int:
        """Of a stored row of `width` numbers, without padding."""
        return width * self.num_bytes + (2 if self.scale else 0)


INT8 = KVFormat("int8", "int8", 1, scale="bfloat16")

_NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMATS = Registry(
    "a format",
    "dtype",
    {**{name: KVFormat(name, name, size) for name, size in _NUM_BYTES.items()}, INT8.name: INT8},
)
unregister = FORMATS.unregister


def register(new: KVFormat) -> None:
    """*raises:* ArgumentError: the name is taken by another format."""
    FORMATS.register(new.name, new)


def format_of(name: str) -> KVFormat:
    """*raises:* ArgumentError: there is none of this name."""
    return FORMATS[name]


def element_formats() -> list[str]:
    """Names of those that a model can compute in."""
    return [name for name, found in FORMATS.items() if not found.is_coded]
