"""Runs torch on one thread for a while: next to the kernels' own pool, and where its results must not depend on
threads.

Its OpenMP workers spin on the pool's processors for milliseconds after each operator that was large enough to wake
them, and waiting for them makes a small operator take milliseconds if another program has the second processor. The
count is the calling thread's, in OpenMP and in MKL, and no other thread's: `torch.set_num_threads` would also set the
initial count of each new thread of the host, permanently. It is the fallback if the calls of those two libraries are
not found.

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
    """Within it torch computes on `count` threads, including the calling one; afterwards as before."""
    num_threads = torch.get_num_threads()  # which also initialises the count of a new thread
    _set_num_threads(count)
    try:
        yield
    finally:
        _set_num_threads(num_threads)


def one_torch_thread() -> AbstractContextManager[None]:
    """Within it torch computes on the calling thread only; afterwards as before."""
    return torch_threads(1)


def _thread_count_setter() -> Callable[[int], None]:
    """The function that sets the calling thread's count, in the libraries that torch itself was linked with."""
    try:
        library = ctypes.PyDLL(torch._C.__file__)  # its symbols, and those of the libraries it is linked with
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

    def set_both(count: int) -> None:
        openmp(count)
        mkl(count)

    return set_both


_set_num_threads = _thread_count_setter()
