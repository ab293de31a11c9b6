"""How many examples a long run draws, or tokens it reads: a quarter in CI, the same ones every time; all of them in
`scripts/soak laws` and `fuzz`, which draw new ones and set QUIRE_FULL_SIZE."""

from __future__ import annotations

import os


def at_length(num_examples: int) -> int:
    """Of so many at full size."""
    return num_examples if "QUIRE_FULL_SIZE" in os.environ else -(-num_examples // 4)
