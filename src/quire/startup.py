"""What keeps the way to the first token short: Python's garbage collector off while much is imported and built.

Importing torch and a model's code makes some million objects that stay; the collector walks all of them again and
again meanwhile, a fifth of the time of those imports (docs/benchmarks.md, "Start and memory").
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic garbage collection inside the block; afterwards as before. Blocks may nest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
