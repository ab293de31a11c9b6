"""The spare room of a buffer of one layer that a larger one replaces when it is full.

Each of 64 successive layers has its own period, so the layers outgrow their buffers in different steps, and few old and
new buffers exist at the same time.
"""

from __future__ import annotations

__all__ = ["spare_tokens"]


def spare_tokens(layer: int) -> int:
    """Tokens for which the buffer of `layer` has more room than it needs when it is taken."""
    return 128 + layer % 64
