"""Rounding of a dense checkpoint's weights to codes while it is loaded: the values of `weights=` and `head=`.

    int8       one scale for each output          int8:64    groups of 64 inputs
    int4       groups of 128 inputs               int4:32    groups of 32 inputs
    bf16       the type that the model computes in, whichever it is; quantized checkpoints are dequantized

Not the rounding itself (`quire.weights.codes.rounding`). Imports no torch: options are checked before
anything is loaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ArgumentError

__all__ = ["GROUPS", "Rounding", "WeightFormats", "parse_rounding", "parse_weights"]

GROUPS = (128, 64, 32, 16)
_UNROUNDED = "bf16"


@dataclass(frozen=True)
class Rounding:
    """Rounding to `bits` (4 or 8), with a scale for each `group` inputs; None: for all inputs of an output."""

    bits: int
    group: int | None

    def group_of(self, num_inputs: int) -> int:
        """The group for a weight of so many inputs: the largest of `GROUPS` up to `group` that divides them, or all."""
        if self.group is None:
            return num_inputs
        return next((g for g in GROUPS if g <= self.group and num_inputs % g == 0), num_inputs)

    def __str__(self) -> str:
        return f"int{self.bits}" if self.group is None else f"int{self.bits}:{self.group}"


@dataclass(frozen=True)
class WeightFormats:
    """Rounding by pattern of the names of linear layers and of experts' parameters, of which the first match counts,
    and of head and embeddings.

    None: not rounded.
    """

    by_pattern: tuple[tuple[str, Rounding | None], ...]
    head: Rounding | None

    @property
    def has_rounding(self) -> bool:
        """Whether any weight is rounded."""
        return self.head is not None or any(rounding is not None for _, rounding in self.by_pattern)

    def rounding_of(self, name: str) -> Rounding | None:
        """Rounding of the linear layer or experts' parameter `name`; None if no pattern matches."""
        return next(
            (rounding for pattern, rounding in self.by_pattern if fnmatch.fnmatchcase(name, pattern)), None
        )


def parse_rounding(text: str, option: str = "weights") -> Rounding | None:
    """The rounding of one format of the module's text; None for "bf16".

    *raises:* ArgumentError: an unknown format.
    """
    if text == _UNROUNDED:
        return None
    match = re.fullmatch(r"int(4|8)(?::(\d+))?", text) if isinstance(text, str) else None
    if match is None or (match[2] is not None and int(match[2]) not in GROUPS):
        groups = ", ".join(str(group) for group in sorted(GROUPS))
        raise ArgumentError(
            f"expected int8, int4, either with a group of {groups} (int4:64), or bf16, got {text!r} - in `{option}`"
        )
    bits = int(match[1])
    return Rounding(bits, int(match[2]) if match[2] is not None else 128 if bits == 4 else None)


def parse_weights(weights: str | Mapping[str, str], head: str | None = None) -> WeightFormats:
    """weights: one format for all linear layers and experts, or formats by pattern of names, as a mapping or as
    "*.mlp.*=int4,*=int8". head: of head and embeddings; None: int8, or bf16 if no linear layer is rounded.

    *raises:* ArgumentError: an unknown format.
    """
    if isinstance(weights, str) and "=" in weights:
        weights = {name: text for name, _, text in (part.partition("=") for part in weights.split(","))}
    by_pattern = weights if isinstance(weights, Mapping) else {"*": weights}
    if not by_pattern or not all(isinstance(name, str) and name for name in by_pattern):
        raise ArgumentError(f"expected formats by pattern of layers' names, got {weights!r} - in `weights`")
    roundings = tuple((name, parse_rounding(text)) for name, text in by_pattern.items())
    if head is None:
        head = "int8" if any(rounding for _, rounding in roundings) else _UNROUNDED
    return WeightFormats(roundings, parse_rounding(head, "head"))
