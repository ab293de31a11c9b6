"""What keeps the way to the first token short while much is imported and built.

The garbage collector is off: importing torch and a model's code makes some million objects that stay, and the collector
walks all of them again and again meanwhile, a fifth of the time of those imports. And torch's compiler is not imported
(`deferred_dynamo`). Both measured in docs/benchmarks.md, "Start and memory".
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from quire.deferred_dynamo import dynamo_deferred

__all__ = ["collector_paused", "short_start"]


@contextmanager
def short_start() -> Iterator[None]:
    """Both inside the block; afterwards as before. Blocks may nest."""
    with collector_paused(), dynamo_deferred():
        yield


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
