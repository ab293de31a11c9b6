"""Blocks, sizes, and the memory that is free to this process with control groups counted."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from quire.cache.block_counts import num_blocks_for
from quire.engine.kv_capacity import kv_memory_bytes
from quire.errors import ArgumentError, CapacityError
from quire.memory.free_memory import free_memory_bytes
from quire.spec import KVSpec, LayerSpec, Span


def spec_of(*spans: Span) -> KVSpec:
    return KVSpec(tuple(LayerSpec(span, 1, 8, 8) for span in spans))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("span", [Span(), Span("window", 1), Span("window", 20), Span("chunked", 20)])
def test_blocks_are_what_a_walk_over_all_positions_needs(span: Span, block_size: int) -> None:
    for num_tokens in (1, 2, 16, 17, 90):
        # At position q the table holds the blocks from first_needed(q) to q.
        most = max(q // block_size - span.first_needed(q) // block_size + 1 for q in range(num_tokens))
        needed = num_blocks_for(spec_of(span), num_tokens, block_size)
        assert needed >= most
        assert num_blocks_for(spec_of(span), 10_000, block_size) >= needed
        if span.kind == "full":
            assert needed == most
        else:
            assert needed <= most + 1


@pytest.mark.parametrize(
    "text", ["12 bananas", "", "-1GiB", "0", 0, -5, "GiB", None, 1.5, "0.1b", True, "0%", "101%"]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ArgumentError, match="kv_memory"):
        kv_memory_bytes(text, most_useful_bytes=300, free_bytes=1000)


def test_a_budget_is_a_size_a_share_or_half_of_what_is_free() -> None:
    def budget(text: str | int) -> int:
        return kv_memory_bytes(text, most_useful_bytes=300, free_bytes=1000)

    assert budget("40%") == 400
    assert budget("auto") == 300
    assert kv_memory_bytes("auto", most_useful_bytes=900, free_bytes=1000) == 500
    assert budget(700) == 700
    with pytest.raises(CapacityError, match="free to this process"):
        budget("1GiB")


def machine(root: Path, available_kib: int, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory_bytes(machine(tmp_path, 2048, "0::/\n", {})) == 2048 * 1024


def test_the_tightest_group_v2_counts_the_ancestors_too(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "500000\n",
        "a/memory.current": "450000\n",
        "a/memory.stat": "anon 1\ninactive_file 30000\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "1\n",
    }
    assert free_memory_bytes(machine(tmp_path, 2048, "0::/a/b\n", files)) == 80_000


def test_group_v1(tmp_path: Path) -> None:
    files = {
        "memory/c/memory.limit_in_bytes": "400000\n",
        "memory/c/memory.usage_in_bytes": "100000\n",
        "memory/c/memory.stat": "total_inactive_file 5000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "100000\n",
    }
    cgroup = "9:name=systemd:/\n4:cpu,memory:/c\n0::/\n"
    assert free_memory_bytes(machine(tmp_path, 2048, cgroup, files)) == 305_000


def test_a_container_whose_group_path_is_not_mounted_uses_the_mounts_root(tmp_path: Path) -> None:
    files = {"memory.max": "1000\n", "memory.current": "400\n"}
    assert free_memory_bytes(machine(tmp_path, 2048, "0::/../../host/path\n", files)) == 600


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the process may have, by kind; what is not in it is unlimited."""
    set_to: dict[int, int] = {}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (set_to.get(kind, resource.RLIM_INFINITY), resource.RLIM_INFINITY)
    )
    return set_to


def test_the_processs_own_limits_count_less_what_is_mapped(tmp_path: Path, limits: dict[int, int]) -> None:
    root, page = machine(tmp_path, 1 << 20, "0::/\n", {}), resource.getpagesize()
    (root / "proc/self/statm").write_text("100 50 20 5 0 30 0\n")
    assert free_memory_bytes(root) == 1 << 30
    limits[resource.RLIMIT_AS] = 1000 * page
    assert free_memory_bytes(root) == 900 * page
    limits[resource.RLIMIT_DATA] = 500 * page
    assert free_memory_bytes(root) == 470 * page
    limits[resource.RLIMIT_AS] = 50 * page
    assert free_memory_bytes(root) == 0


def test_where_nothing_is_overcommitted_reservations_count(tmp_path: Path) -> None:
    root = machine(tmp_path, 2048, "0::/\n", {})
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.write("CommitLimit: 1500 kB\nCommitted_AS: 500 kB\n")
    (root / "proc/sys/vm").mkdir(parents=True)
    for mode, free_kib in ((0, 2048), (2, 1000)):
        (root / "proc/sys/vm/overcommit_memory").write_text(f"{mode}\n")
        assert free_memory_bytes(root) == free_kib * 1024


def test_without_proc_the_kernel_is_asked(tmp_path: Path, limits: dict[int, int]) -> None:
    assert 0 < free_memory_bytes(tmp_path) <= os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    limits[resource.RLIMIT_AS] = 4096
    assert free_memory_bytes(tmp_path) == 4096
