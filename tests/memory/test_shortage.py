"""Shortage of memory of the machine and its control groups: its beginning and its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.memory.free_memory import memory_rooms
from quire.memory.shortage import MemoryShortage


def machine(root: Path, total_kib: int, available_kib: int, cgroup: str, files: dict[str, object]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total_kib} kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_the_machine_has_rooms_and_each_of_its_groups(tmp_path: Path) -> None:
    files = {
        "a/memory.max": 500_000,
        "a/memory.current": 450_000,
        "a/memory.stat": "anon 1\ninactive_file 30000\nactive_file 40000",
        "a/b/memory.max": "max",
        "a/b/memory.current": 1,
    }
    root = machine(tmp_path, 4096, 2048, "0::/a/b\n", files)
    assert memory_rooms(root) == [(4096 << 10, 2048 << 10), (500_000, 120_000)]


def test_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "memory/c/memory.limit_in_bytes": 400_000,
        "memory/c/memory.usage_in_bytes": 100_000,
        "memory/c/memory.stat": "inactive_file 1\ntotal_inactive_file 5000\ntotal_active_file 1000",
    }
    root = machine(tmp_path, 4096, 2048, "4:cpu,memory:/c\n0::/\n", files)
    assert memory_rooms(root) == [(4096 << 10, 2048 << 10), (400_000, 306_000)]


def test_where_nothing_is_known_nothing_is_short(tmp_path: Path) -> None:
    assert memory_rooms(tmp_path) == []
    assert MemoryShortage(lambda: []).missing_bytes() == 0


@pytest.mark.parametrize(("group", "is_short"), [("4G", False), (None, False), (1000, True)])
def test_a_container_is_short_where_its_group_is(tmp_path: Path, group: int | None, is_short: bool) -> None:
    files: dict[str, object] = {"memory.max": "max" if group is None else group, "memory.current": 960}
    root = machine(tmp_path, 4096, 2048, "0::/../../of/the/host\n", files)
    shortage = MemoryShortage(lambda: memory_rooms(root))
    assert shortage.missing_bytes() == (60 if is_short else 0)
    if is_short:  # what its files take is not missing
        (root / "sys/fs/cgroup/memory.stat").write_text("active_file 100\n")
        assert shortage.missing_bytes() == 0


def test_a_shortage_begins_below_one_share_and_ends_at_another() -> None:
    available = 1000
    shortage = MemoryShortage(lambda: [(10_000, 9_000), (1000, available)])
    told = {}
    for available in (1000, 99, 60, 50, 49, 60, 99, 100, 60, 49):
        told.setdefault(available, []).append(shortage.missing_bytes())
    assert told == {1000: [0], 99: [0, 1], 60: [0, 40, 0], 50: [0], 49: [51, 51], 100: [0]}
