"""The formats of keys and values: the stored row of a token and head, by name.

The one table: the spec counts bytes by it, the storages lay out rows by it, a stored segment and the fingerprint have
the format's name. A new format is one file that calls `register`. Not the arithmetic: devices compute with elements,
`quire.attention.codecs` encodes and decodes rows.

A format of codes has a row of `width` codes, padding up to a whole number of the model's elements, and its scales of
two bytes at the row's end: one, or one for each group of numbers, the last of which may be shorter. Codes and scales of
a token are adjacent, so copying a row copies both.

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
    """name: of users, `KVSpec.dtype` and `kv_dtype`. element: torch's and the kernels' name of the stored element, of
    `num_bytes`. scale: torch's name of the scales after a row of codes; empty if elements are the numbers themselves.
    codes: in an element. group: numbers with a common scale; 0: the whole row.
    """

    name: str
    element: str
    num_bytes: int
    scale: str = ""
    codes: int = 1
    group: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # here, since a spec alone does not need it

        return getattr(torch, self.element)

    @property
    def is_coded(self) -> bool:
        """Whether a row has codes and scales. Such a format is not a dtype of models."""
        return bool(self.scale)

    def num_elements(self, width: int) -> int:
        """Stored elements of a row of `width` numbers, without its scales."""
        return -(-width // self.codes)

    def num_scales(self, width: int) -> int:
        """Scales of a row of `width` numbers."""
        if not self.scale:
            return 0
        return -(-width // self.group) if self.group else 1

    def row_bytes(self, width: int) -> int:
        """Bytes of a stored row of `width` numbers, without padding."""
        return self.num_elements(width) * self.num_bytes + 2 * self.num_scales(width)


INT8 = KVFormat("int8", "int8", 1, scale="bfloat16")
INT4 = KVFormat("int4", "uint8", 1, scale="bfloat16", codes=2, group=32)
PAIRS = {"k8v4": (INT8.name, INT4.name)}
"""`kv_dtype`'s names for K in one format of codes and V in another."""

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


def register(kv_format: KVFormat) -> None:
    """Adds a format. *raises:* ArgumentError: the name is taken by another format."""
    FORMATS.register(kv_format.name, kv_format)


def format_of(name: str) -> KVFormat:
    """The format `name`. *raises:* ArgumentError: it does not exist."""
    return FORMATS[name]


def pair_name(k_format: str, v_format: str) -> str:
    """`kv_dtype`'s name for K and V in these formats."""
    if k_format == v_format:
        return k_format
    match = (name for name, pair in PAIRS.items() if pair == (k_format, v_format))
    return next(match, f"{k_format}/{v_format}")


def element_formats() -> list[str]:
    """Names of the formats that a model can compute in."""
    return [name for name, match in FORMATS.items() if not match.is_coded]
