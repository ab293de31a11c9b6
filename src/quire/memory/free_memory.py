"""How much memory this process can still take; reads limits and /proc only.

Free memory is the minimum of the kernel's MemAvailable, the rest of each control group of the process (v1 and v2, every
level), the rest of its own limits (`ulimit -v`, `ulimit -d`) and, under vm.overcommit_memory=2, the rest of the commit
limit. Without /proc it is the minimum of the kernel's free pages and the process's limits, of which nothing counts as
used.

The kernel counts a mapped file as available. A file that every step reads is not (`count_as_taken`): a budget subtracts
`taken_bytes` (`HostMemory.free_bytes`).
"""

from __future__ import annotations

import os
import resource
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "count_as_taken",
    "count_moved",
    "free_address_bytes",
    "free_memory_bytes",
    "memory_rooms",
    "taken_bytes",
]

_PAGE_BYTES = resource.getpagesize()
_taken: dict[int, int] = {}  # bytes of the mapped files that are read at every step, by their address


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still use: the machine's available memory, and the rest of each limit."""
    free = min(_mem_available(root), free_address_bytes(root))
    for limit_bytes, used_bytes, files in _control_groups(root):
        free = min(free, max(0, limit_bytes - max(0, used_bytes - files["inactive"])))
    return free


def taken_bytes() -> int:
    """Bytes of mapped files within `free_memory_bytes` that count as taken."""
    return sum([*_taken.values()])


def count_as_taken(pages: np.ndarray) -> None:
    """Count the bytes of a mapped file as taken for as long as `pages` exists."""
    address = pages.ctypes.data
    _taken[address] = pages.size
    weakref.finalize(pages, _taken.pop, address, None).atexit = False


def count_moved(pages: np.ndarray, num_bytes: int) -> None:
    """`num_bytes` of `pages` are now in this process's own memory, which the system counts itself."""
    address = pages.ctypes.data
    if address in _taken:
        _taken[address] = max(0, _taken[address] - num_bytes)


def memory_rooms(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(total, available) bytes of the machine's memory and of each control group of this process.

    The page cache is available, as in MemAvailable: a group that has read many files is not short. A machine whose
    /proc/meminfo lacks the fields adds no entry.
    """
    found: list[tuple[int, int]] = []
    said = _meminfo(root)
    if "MemTotal" in said and "MemAvailable" in said:
        found.append((said["MemTotal"], said["MemAvailable"]))
    for limit_bytes, used_bytes, files in _control_groups(root):
        found.append((limit_bytes, max(0, limit_bytes - max(0, used_bytes - sum(files.values())))))
    return found


def free_address_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may still map under its own limits; 2**63 - 1 without limits."""
    try:
        pages = [int(word) for word in (root / "proc/self/statm").read_text().split()]
    except OSError:
        pages = [0] * 7
    free = 2**63 - 1
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        limit_bytes = resource.getrlimit(kind)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            free = min(free, max(0, limit_bytes - used * _PAGE_BYTES))
    return free


def _meminfo(root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _mem_available(root: Path) -> int:
    said = _meminfo(root)
    free = said.get("MemAvailable")
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES
    if _read_int(root / "proc/sys/vm/overcommit_memory") == 2:  # mappings count, used or not
        free = min(free, max(0, said.get("CommitLimit", free) - said.get("Committed_AS", 0)))
    return free


def _control_groups(root: Path) -> list[tuple[int, int, dict[str, int]]]:
    """(limit, used, files) in bytes of every memory control group of this process, ancestors included.

    files: the part of `used` that is page cache, "active" and "inactive"; the kernel gives it up under pressure.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int, dict[str, int]]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            stat_of = "total_{}_file"
        elif controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            stat_of = "{}_file"
        else:
            continue
        # In a container the path may name a group that is not mounted here; the container's group is the mount's root.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            limit, used = _read_int(group / names[0]), _read_int(group / names[1])
            if limit is not None and used is not None:
                found.append((limit, used, _files(group / "memory.stat", stat_of)))
    return found


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _files(path: Path, name_of: str) -> dict[str, int]:
    """Page cache by memory.stat. name_of: pattern of an entry's name; a missing entry counts as 0."""
    found = {"active": 0, "inactive": 0}
    names = {name_of.format(part): part for part in found}
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key in names:
                found[names[key]] = int(value)
    except (OSError, ValueError):
        pass
    return found
