"""Distributions of lengths as short texts: `uniform:16-512`, `lognormal:200,1.0`, `bimodal:50,2000,0.2`.

    uniform:LOW-HIGH           every length from LOW to HIGH with equal probability
    lognormal:MEDIAN,SIGMA     like the lengths of real requests: many short requests, a long tail
    bimodal:SHORT,LONG,SHARE   LONG with probability SHARE, else SHORT, each varied by up to a tenth

`PROMPT/OUTPUT` gives a distribution of prompts and one of outputs; a single distribution serves for both. Lengths are
integers of at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.errors import ArgumentError

__all__ = ["Distribution", "Lengths"]

_FORMS = {
    "uniform": "uniform:LOW-HIGH",
    "lognormal": "lognormal:MEDIAN,SIGMA",
    "bimodal": "bimodal:SHORT,LONG,SHARE",
}


@dataclass(frozen=True)
class Distribution:
    """A distribution. values: the numbers behind its name, in the order of its form."""

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        kind, _, rest = text.partition(":")
        if kind not in _FORMS:
            raise ArgumentError(f"expected {', '.join(_FORMS.values())}, got {text!r} - in `lengths`")
        try:
            values = tuple(float(part) for part in rest.split("-" if kind == "uniform" else ","))
        except ValueError:
            values = ()
        if not _is_valid(kind, values):
            raise ArgumentError(
                f"expected {_FORMS[kind]} with lengths of at least 1 in rising order, SIGMA >= 0 and SHARE of 0 to 1, "
                f"got {text!r} - in `lengths`"
            )
        return cls(kind, values)

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count]."""
        if self.kind == "uniform":
            low, high = self.values
            return generator.integers(int(low), int(high) + 1, count)
        if self.kind == "lognormal":
            median, sigma = self.values
            drawn = generator.lognormal(np.log(median), sigma, count)
        else:
            short, long, share = self.values
            drawn = np.where(generator.random(count) < share, long, short) * generator.uniform(
                0.9, 1.1, count
            )
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _is_valid(kind: str, values: tuple[float, ...]) -> bool:
    if not all(np.isfinite(values)):
        return False
    if kind == "uniform":
        return len(values) == 2 and 1 <= values[0] <= values[1] and all(v.is_integer() for v in values)
    if kind == "lognormal":
        return len(values) == 2 and values[0] >= 1 and 0 <= values[1] <= 10
    return len(values) == 3 and 1 <= values[0] <= values[1] and 0 <= values[2] <= 1


@dataclass(frozen=True)
class Lengths:
    """The distributions of prompts and outputs, and the text they were parsed from."""

    prompt: Distribution
    output: Distribution
    text: str

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """*raises:* ArgumentError, which names the known forms."""
        prompt, _, output = text.partition("/")
        return cls(Distribution.parse(prompt), Distribution.parse(output or prompt), text)
