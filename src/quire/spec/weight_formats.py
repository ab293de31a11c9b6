"""How the weights of a plain checkpoint are rounded to codes as it is loaded: what `weights=` and `head=` may say.

    int8       one scale for each output          int8:64    groups of 64 inputs
    int4       groups of 128 inputs               int4:32    groups of 32 inputs
    bf16       in the type that the model computes in, whatever that is; codes of a quantized checkpoint are widened

Not the rounding itself (`quire.quantized.rounding`). Imports no torch: options are checked before anything is loaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ArgumentError

__all__ = ["GROUPS", "Rounding", "WeightFormats", "parse_rounding", "parse_weights"]

GROUPS = (128, 64, 32, 16)
_AS_IT_IS = "bf16"


@dataclass(frozen=True)
class Rounding:
    """To `bits` (4 or 8), with a scale for each `group` inputs; None: for all inputs of an output."""

    bits: int
    group: int | None

    def group_of(self, num_inputs: int) -> int:
        """The group for a weight of so many inputs: the largest up to `group` that divides them, else all."""
        if self.group is None:
            return num_inputs
        return next((g for g in GROUPS if g <= self.group and num_inputs % g == 0), num_inputs)

    def __str__(self) -> str:
        return f"int{self.bits}" if self.group is None else f"int{self.bits}:{self.group}"


@dataclass(frozen=True)
class WeightFormats:
    """By pattern of the names of linear layers and of experts' parameters, of which the first that fits counts; and for
    head and embeddings.

    None: left as they are.
    """

    by_pattern: tuple[tuple[str, Rounding | None], ...]
    head: Rounding | None

    @property
    def rounds(self) -> bool:
        """Whether any weight is rounded."""
        return self.head is not None or any(rounding is not None for _, rounding in self.by_pattern)

    def of(self, name: str) -> Rounding | None:
        """That of the linear layer or experts' parameter `name`; one that no pattern fits is left as it is."""
        return next((found for pattern, found in self.by_pattern if fnmatch.fnmatchcase(name, pattern)), None)


def parse_rounding(text: str, where: str = "weights") -> Rounding | None:
    """One format of the module's text; None of "bf16".

    *raises:* ArgumentError: it is something else.
    """
    if text == _AS_IT_IS:
        return None
    found = re.fullmatch(r"int(4|8)(?::(\d+))?", text) if isinstance(text, str) else None
    if found is None or (found[2] is not None and int(found[2]) not in GROUPS):
        groups = ", ".join(str(group) for group in sorted(GROUPS))
        raise ArgumentError(
            f"expected int8, int4, either with a group of {groups} (int4:64), or bf16, got {text!r} - in `{where}`"
        )
    bits = int(found[1])
    return Rounding(bits, int(found[2]) if found[2] is not None else 128 if bits == 4 else None)


def parse_weights(weights: str | Mapping[str, str], head: str | None = None) -> WeightFormats:
    """weights: one format for all linear layers and experts, or formats by pattern of names, as a mapping or as
    "*.mlp.*=int4,*=int8". head: of head and embeddings; None: int8, or bf16 where no linear layer is rounded.

    *raises:* ArgumentError: it is something else.
    """
    if isinstance(weights, str) and "=" in weights:
        weights = {name: text for name, _, text in (part.partition("=") for part in weights.split(","))}
    by_pattern = weights if isinstance(weights, Mapping) else {"*": weights}
    if not by_pattern or not all(isinstance(name, str) and name for name in by_pattern):
        raise ArgumentError(f"expected formats by pattern of layers' names, got {weights!r} - in `weights`")
    found = tuple((name, parse_rounding(text)) for name, text in by_pattern.items())
    if head is None:
        head = "int8" if any(rounding for _, rounding in found) else _AS_IT_IS
    return WeightFormats(found, parse_rounding(head, "head"))
