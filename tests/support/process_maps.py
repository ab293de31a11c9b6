"""Reads this process's mappings from the operating system: /proc/self/maps and /proc/self/pagemap."""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ (\d+)")


@dataclass
class Mapping:
    """start, stop: addresses. permissions: as "rw-s". offset, inode: of the file."""

    start: int
    stop: int
    permissions: str
    offset: int
    inode: int


def mappings(start: int, stop: int) -> list[Mapping]:
    """Those of this process that lie in [start, stop), cut to it, in order."""
    found: list[Mapping] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = _HEAD.match(line)
        assert match is not None, line
        low, high = int(match[1], 16), int(match[2], 16)
        if low < stop and high > start:
            cut = max(low, start)
            offset = int(match[4], 16) + (cut - low)
            found.append(Mapping(cut, min(high, stop), match[3], offset, int(match[5])))
    return found


def num_entered(start: int, stop: int) -> int:
    """How many pages of [start, stop) have an entry in the page table: touching them takes no fault."""
    count = (stop - start) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(start // mmap.PAGESIZE * 8)
        return sum(entry >> 63 for entry in struct.unpack(f"<{count}Q", file.read(8 * count)))
