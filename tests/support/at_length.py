"""The number of examples, or tokens, of a long run: a quarter, the same in every run. QUIRE_EXAMPLES=short: a sixteenth
(`.ci/run`). QUIRE_EXAMPLES=full: all of them (`scripts/soak laws` and `fuzz`, which draw new ones)."""

from __future__ import annotations

import os

_ONE_IN = {"full": 1, "": 4, "short": 16}


def at_length(num_examples: int) -> int:
    """Of so many at full size."""
    return -(-num_examples // _ONE_IN[os.environ.get("QUIRE_EXAMPLES", "")])
