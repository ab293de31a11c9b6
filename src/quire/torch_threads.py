"""torch on one thread for a while: beside the kernels' own pool, and wherever its answer must not depend on threads.

Its OpenMP workers spin on the processors that the pool works on, for milliseconds after each operator that was large
enough to wake them, and waiting for them makes a small operator take milliseconds where another program has the second
processor.
The count is the calling thread's, in OpenMP and in MKL, and no other thread's: `torch.set_num_threads` would also set
what each new thread of the host begins with, and keeps. Only where those two libraries' calls are not found it has to
do.
Cost: two calls into them, about 1 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

__all__ = ["one_torch_thread", "torch_threads"]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it torch computes on `count` threads, the calling one included; afterwards as before."""
    num_threads = torch.get_num_threads()  # which also gives a new thread its own count, if it has none yet
    _set_num_threads(count)
    try:
        yield
    finally:
        _set_num_threads(num_threads)


def one_torch_thread() -> AbstractContextManager[None]:
    """Within it torch computes on the calling thread alone; afterwards as before."""
    return torch_threads(1)


def _of_this_thread() -> Callable[[int], None]:
    """What sets the count of the calling thread alone, in the libraries that torch itself was linked with."""
    try:
        library = ctypes.PyDLL(torch._C.__file__)  # its symbols, and those of all that it was linked with
        openmp, mkl = library.omp_set_num_threads, None
        if torch.backends.mkl.is_available():
            mkl = library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return torch.set_num_threads
    openmp.restype = None
    openmp.argtypes = [ctypes.c_int]
    if mkl is None:
        return openmp
    mkl.argtypes = [ctypes.c_int]

    def both(count: int) -> None:
        openmp(count)
        mkl(count)

    return both


_set_num_threads = _of_this_thread()
