"""Pages of a checkpoint's files that a loaded model still maps, given back once a weight has been packed.

transformers maps safetensors files and hands out tensors that lie in the mapping. Packing reads such a weight once;
without this its pages would stay in the process beside the packed copy until the last tensor of the file is gone
(the norms' never are), twice the model. Given back they stay in the kernel's page cache and belong to nobody.
Only for a model that `load` has read itself: nobody else holds its tensors, and nothing was written to them.

Cost: one look at /proc/self/maps, and a system call per weight.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from pathlib import Path

import torch

__all__ = ["MappedWeights"]


class MappedWeights:
    """The safetensors files mapped into this process now; none where the kernel does not tell (not Linux)."""

    def __init__(self) -> None:
        self._regions = _mapped_files(".safetensors")
        self._starts = [start for start, _ in self._regions]

    def release(self, weight: torch.Tensor) -> None:
        """Gives the pages wholly inside `weight` back if they lie in one of the files; its bytes can still be read."""
        start = weight.data_ptr()
        stop = start + weight.numel() * weight.element_size()
        region = bisect.bisect_right(self._starts, start) - 1
        if region < 0 or stop > self._regions[region][1] or not weight.is_contiguous():
            return
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            # A failure leaves the pages where they are: more memory, nothing wrong.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


_libc = ctypes.CDLL(None, use_errno=True)


def _mapped_files(suffix: str) -> list[tuple[int, int]]:
    """(start, stop) of every mapping of a file named *suffix, by address."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    regions = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(suffix):
            start, _, stop = fields[0].partition("-")
            regions.append((int(start, 16), int(stop, 16)))
    return regions
