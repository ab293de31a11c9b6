"""torch on one thread for a while: beside the kernels' own pool, and wherever its answer must not depend on threads.

Its OpenMP workers spin on the processors that the pool works on, and waiting for them makes a small operator take
milliseconds where another program has the second processor.
Cost: two calls into torch, about 1 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_torch_thread"]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Within it torch computes on the calling thread alone; afterwards as before."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
