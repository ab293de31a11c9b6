"""torch on one thread for a while: beside the kernels' own pool, and wherever its answer must not depend on threads.

Its OpenMP workers spin on the processors that the pool works on, for milliseconds after each operator that was large
enough to wake them, and waiting for them makes a small operator take milliseconds where another program has the second
processor.
Cost: two calls into torch, about 1 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

__all__ = ["one_torch_thread", "torch_threads"]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it torch computes on `count` threads, the calling one included; afterwards as before."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def one_torch_thread() -> AbstractContextManager[None]:
    """Within it torch computes on the calling thread alone; afterwards as before."""
    return torch_threads(1)
