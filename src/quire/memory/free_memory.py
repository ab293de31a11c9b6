"""How much memory is free to this process. Reading of /proc only.

It is what the kernel says is available (MemAvailable), lowered to what the process's control groups (v1 and v2, every
level) still allow.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import CapacityError

__all__ = ["free_memory_bytes"]


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still use: the machine's available memory, and each control group's rest."""
    free = _mem_available(root)
    for limit_bytes, used_bytes in _control_groups(root):
        free = min(free, max(0, limit_bytes - used_bytes))
    return free


def _mem_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise CapacityError("expected /proc/meminfo with MemAvailable, got none; give kv_memory as a size")


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every memory control group this process is in, the ancestors' too.

    Page cache counts as used by the kernel but is given up under pressure: the inactive part is not counted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            inactive = "total_inactive_file"
        elif controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            inactive = "inactive_file"
        else:
            continue
        # In a container the path may name a group that is not mounted here; its own is then the mount's root.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            limit, used = _read_int(group / names[0]), _read_int(group / names[1])
            if limit is not None and used is not None:
                found.append((limit, max(0, used - _inactive_file(group / "memory.stat", inactive))))
    return found


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _inactive_file(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
