"""Pages of a checkpoint's files that a loaded model still maps, released once a weight has been packed.

transformers maps safetensors files and hands out tensors that lie in the mapping. Packing reads such a weight once;
without this its pages would stay in the process next to the packed copy until the last tensor of the file is gone (the
norms' never are), twice the model. Released pages stay in the kernel's page cache and count for no process. Only for a
model that `load` has read itself: no one else has its tensors, and they were not written to.

The same mappings give the file and offset of a weight's bytes (`origins`), for `saved_weights`.

Cost: one look at /proc/self/maps, and a system call per weight; `origins` looks at /proc/self/smaps once.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from quire.load_progress import observer

__all__ = ["FileRange", "FileRanges", "MappedFiles", "weight_key"]

_SUFFIX = ".safetensors"


class FileRanges(Protocol):
    """The file ranges that the weights of a model come from: `MappedFiles`, or `load_gguf.GGUFRanges`."""

    def release(self, weight: torch.Tensor) -> None:
        """Called with a weight that is not read again."""
        ...

    def release_files(self, remaining: Iterable[torch.Tensor]) -> None:
        """Called with the model's remaining tensors."""
        ...

    def origins(self, weights: Sequence[torch.Tensor]) -> list[FileRange | None]:
        """The file range of each weight (dense in memory, in any order); None if that is not certain."""
        ...


def weight_key(weight: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Identifies a weight as long as it is alive."""
    return weight.data_ptr(), weight.shape, weight.stride()


class MappedFiles:
    """The files with this suffix that are mapped into this process now; none if the kernel does not tell (not
    Linux)."""

    def __init__(self, suffix: str = _SUFFIX) -> None:
        self._suffix = suffix
        self._observer = observer()  # other threads release weights too
        self._regions = _mapped_files(suffix)
        self._starts = [region.start for region in self._regions]

    def release(self, weight: torch.Tensor) -> None:
        """Called once with each weight that has been read: `release_pages`."""
        self._observer.add_read(weight.numel() * weight.element_size())
        self.release_pages(weight)

    def release_pages(self, weight: torch.Tensor) -> None:
        """Releases the pages wholly inside `weight` if they lie in one of the files; its bytes can still be read."""
        start = weight.data_ptr()
        stop = start + weight.numel() * weight.element_size()
        if self._region_of(weight) is None or not weight.is_contiguous():
            return
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            # A failure leaves the pages in memory: a cost, not an error.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)

    def release_files(self, remaining: Iterable[torch.Tensor]) -> None:
        """Releases all pages of the files that `remaining`, the model's remaining tensors, lie in.

        Experts that were stacked from a file's tensors leave those tensors' pages in the process, though they are not
        read again. The remaining tensors are read from the files at their next use. A file that was written to stays.
        """
        unwritten = _unwritten(self._suffix)
        used = {region for tensor in remaining if (region := self._region_of(tensor)) is not None}
        mapped = set(_mapped_files(self._suffix))
        for region in used & mapped:  # a tensor lies there, so the region stays mapped
            if region.start in unwritten:
                _libc.madvise(
                    ctypes.c_void_p(region.start),
                    ctypes.c_size_t(region.stop - region.start),
                    mmap.MADV_DONTNEED,
                )

    def origins(self, weights: Sequence[torch.Tensor]) -> list[FileRange | None]:
        """The file range of each weight (dense in memory, in any order); None if it is not certain: the weight is not
        in a mapping, was written to, or the file at the path is no longer the mapped one."""
        unwritten = _unwritten(self._suffix)
        stamps: dict[_Region, tuple[int, ...] | None] = {}
        ranges: list[FileRange | None] = []
        for weight in weights:
            region = self._region_of(weight)
            if region is None or region.start not in unwritten:
                ranges.append(None)
                continue
            if region not in stamps:
                stamps[region] = _stamp(region.path, region.inode)
            stamp = stamps[region]
            offset = region.offset + weight.data_ptr() - region.start
            ranges.append(None if stamp is None else FileRange(region.path, stamp, offset))
        return ranges

    def _region_of(self, weight: torch.Tensor) -> _Region | None:
        start = weight.data_ptr()
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0 or start + weight.numel() * weight.element_size() > self._regions[index].stop:
            return None
        return self._regions[index]


_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class FileRange:
    """Bytes of one version of a file: `stamp` changes when the file does."""

    path: str
    stamp: tuple[int, ...]  # size, mtime in ns, ctime in ns, inode
    offset: int  # of the bytes, from the beginning of the file
    reader_versions: str = (
        ""  # if the weight is computed from those bytes: the versions of the readers; else ""
    )


@dataclass(frozen=True)
class _Region:
    start: int
    stop: int
    offset: int
    path: str
    copies_on_write: bool  # or is read-only: writes to it do not reach the file
    inode: int


def _mapped_files(suffix: str) -> list[_Region]:
    """Every mapping of a file named *suffix, by address."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return [region for line in lines if (region := _region(line)) and region.path.endswith(suffix)]


def _region(line: str) -> _Region | None:
    """The region in a line of /proc/self/maps; None if the line names no file."""
    fields = line.split(maxsplit=5)
    if len(fields) != 6 or "-" not in fields[0]:
        return None
    start, _, stop = fields[0].partition("-")
    return _Region(
        int(start, 16),
        int(stop, 16),
        int(fields[2], 16),
        fields[5],
        fields[1].endswith("p") or "w" not in fields[1],
        int(fields[4]),
    )


def _unwritten(suffix: str) -> set[int]:
    """Start addresses of the mappings without a written page, which equal their files."""
    unwritten, start = set(), None
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Anonymous":
            if start is not None and value.split()[0] == "0":
                unwritten.add(start)
        elif line[0] in "0123456789abcdef" and (region := _region(line)) is not None:
            start = region.start if region.path.endswith(suffix) and region.copies_on_write else None
        elif line[0] in "0123456789abcdef":
            start = None
    return unwritten


def _stamp(path: str, inode: int) -> tuple[int, ...] | None:
    """The stamp of the file at `path`; None if its inode is another one by now."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if status.st_ino != inode:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
