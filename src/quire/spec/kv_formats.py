"""The formats of keys and values: what the row of a token and head is as it is stored, by name.

The one table: the spec counts bytes by it, the storages make rows by it, a stored segment and the fingerprint carry
the name. A new format is one file that calls `register`. It is not the arithmetic: what computes from elements is the
back ends, what makes codes of a row and a row of codes is `quire.attention.codecs`.

A format of codes has a row of `width` codes, padding up to a whole number of the model's elements, and its scales of
two bytes at the row's end: one, or one for each group of numbers, the last of which may be shorter. Codes and scales of
a token lie together, so whoever copies rows copies both.

Cost: a look-up in a dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.registry import Registry

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMATS",
    "INT4",
    "INT8",
    "PAIRS",
    "KVFormat",
    "element_formats",
    "format_of",
    "pair_name",
    "register",
    "unregister",
]


@dataclass(frozen=True)
class KVFormat:
    """name: as users, `KVSpec.dtype` and `kv_dtype` have it. element: torch's and the kernels' name of the stored
    element, of `num_bytes`. scale: torch's name of the scales behind a row of codes; empty where elements are the
    numbers themselves. codes: in an element. group: numbers that have a scale; 0: all of the row.
    """

    name: str
    element: str
    num_bytes: int
    scale: str = ""
    codes: int = 1
    group: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # a spec alone needs none

        return getattr(torch, self.element)

    @property
    def is_coded(self) -> bool:
        """Whether a row is codes and scales. Such a format is no dtype of a model."""
        return bool(self.scale)

    def num_elements(self, width: int) -> int:
        """Stored elements of a row of `width` numbers, without its scales."""
        return -(-width // self.codes)

    def num_scales(self, width: int) -> int:
        """Of a row of `width` numbers."""
        if not self.scale:
            return 0
        return -(-width // self.group) if self.group else 1

    def row_bytes(self, width: int) -> int:
        """Of a stored row of `width` numbers, without padding."""
        return self.num_elements(width) * self.num_bytes + 2 * self.num_scales(width)


INT8 = KVFormat("int8", "int8", 1, scale="bfloat16")
INT4 = KVFormat("int4", "uint8", 1, scale="bfloat16", codes=2, group=32)
PAIRS = {"k8v4": (INT8.name, INT4.name)}
"""What `kv_dtype` calls K in one format of codes and V in another."""

_NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMATS = Registry(
    "a format",
    "dtype",
    {
        **{name: KVFormat(name, name, size) for name, size in _NUM_BYTES.items()},
        INT8.name: INT8,
        INT4.name: INT4,
    },
)
unregister = FORMATS.unregister


def register(new: KVFormat) -> None:
    """*raises:* ArgumentError: the name is taken by another format."""
    FORMATS.register(new.name, new)


def format_of(name: str) -> KVFormat:
    """*raises:* ArgumentError: there is none of this name."""
    return FORMATS[name]


def pair_name(k_format: str, v_format: str) -> str:
    """What `kv_dtype` calls K and V in these."""
    if k_format == v_format:
        return k_format
    found = (name for name, pair in PAIRS.items() if pair == (k_format, v_format))
    return next(found, f"{k_format}/{v_format}")


def element_formats() -> list[str]:
    """Names of those that a model can compute in."""
    return [name for name, found in FORMATS.items() if not found.is_coded]
