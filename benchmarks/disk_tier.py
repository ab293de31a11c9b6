"""The disk tier against the system calls that it consists of. JSON lines.

    python benchmarks/disk_tier.py [--quick] [--dir DIR] [--only opening] [--repetitions 5]

  1. opening a folder with many segments, its files in the page cache and dropped from it, against an empty one;
  2. `contains` over that many segments;
  3. loading 1 MiB values, cached and not, against pread of the same bytes into its own memory;
  4. storing 1 MiB values, by one thread and by eight at once, with room and evicting, against pwrite and fdatasync.
The two sides of a comparison take turns; medians, and the median of the pairwise ratios. --dir: on a real disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from machine import emit, emit_machine

from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.tier import SegmentInfo

MEBIBYTE = 1 << 20
ROOT = bytes(32)


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    """Never of an index that is open: closing its file would let go of SQLite's locks."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(call: Callable[..., object], *given: object) -> float:
    start = time.perf_counter()
    call(*given)
    return time.perf_counter() - start


def in_threads(num_threads: int, items: Sequence[int], call: Callable[[int], object]) -> None:
    threads = [
        threading.Thread(target=lambda mine: [call(item) for item in mine], args=(items[i::num_threads],))
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def keys_of(count: int, seed: int = 0) -> list[bytes]:
    return [row.tobytes() for row in np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)]


def chained(keys: list[bytes], length: int = 16, tokens: bytes = bytes(512)) -> list[SegmentInfo]:
    """Each key behind the one before it, in chains of `length`: segments of 128 tokens."""
    return [
        SegmentInfo(ROOT, keys[i - 1] if i % length else ROOT, 128 * (i % length), tokens)
        for i in range(len(keys))
    ]


def opening(base: Path, count: int, repetitions: int) -> None:
    folder, empty = base / f"open-{count}", base / "empty"
    DiskTier(empty, 16 * MEBIBYTE).close()
    keys = keys_of(count)
    infos = chained(keys)
    value = [memoryview(b"x" * 1000)]  # opening reads none: their size does not matter
    tier = DiskTier(folder, 4 << 30)
    seconds = timed(in_threads, 64, range(count), lambda i: tier.store(keys[i], value, infos[i]))
    use = tier.usage()
    for asked in (16, 256):
        some = keys[:: max(1, count // asked)][:asked]
        times = sorted(timed(tier.contains, some) for _ in range(200))
        emit(
            "disk_tier",
            case="contains",
            segments=count,
            keys=asked,
            median_us=round(times[100] * 1e6, 1),
            p99_us=round(times[197] * 1e6, 1),
        )
    whole_tree = timed(lambda: sum(1 for _ in tier.entries()))
    tier.close()
    taken: dict[str, list[float]] = {"cached": [], "dropped": [], "empty": []}
    for _ in range(repetitions):
        for how, times in taken.items():
            if how == "dropped":
                drop_from_page_cache(folder.iterdir())
            start = time.perf_counter()
            opened = DiskTier(empty if how == "empty" else folder, None)
            times.append(time.perf_counter() - start)
            opened.close()
    emit(
        "disk_tier",
        case="opening",
        segments=count,
        index_bytes=use.index,
        index_bytes_per_segment=round(use.index / count),
        stored_per_s=round(count / seconds),
        all_entries_s=round(whole_tree, 3),
        **{f"{how}_ms": round(statistics.median(times) * 1e3, 2) for how, times in taken.items()},
    )
    shutil.rmtree(folder)


def loading(base: Path, count: int, repetitions: int) -> None:
    folder = base / "load"
    keys = keys_of(count, 1)
    infos = chained(keys)
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, count * MEBIBYTE, np.uint8)
    tier = DiskTier(folder, 4 << 30)
    for i, key in enumerate(keys):
        tier.store(key, [data[i * MEBIBYTE : (i + 1) * MEBIBYTE].data], infos[i])
    (folder / "plain").write_bytes(data.data)
    descriptor = os.open(folder / "plain", os.O_RDONLY)

    def plain(i: int) -> None:
        os.preadv(descriptor, [np.empty(MEBIBYTE, np.uint8).data], i * MEBIBYTE)

    calls = {"plain": plain, "tier": lambda i: tier.load(keys[i])}
    for where in ("cached", "dropped"):
        for num_threads in (1, 2):
            seconds: dict[str, list[float]] = {"plain": [], "tier": []}
            for repetition in range(repetitions):
                for who in ("plain", "tier") if repetition % 2 else ("tier", "plain"):
                    if where == "dropped":
                        drop_from_page_cache([folder / "plain", *folder.glob("slab-*")])
                    order = np.random.default_rng(repetition).permutation(count).tolist()
                    seconds[who].append(timed(in_threads, num_threads, order, calls[who]))
            ratios = [a / b for a, b in zip(seconds["tier"], seconds["plain"], strict=True)]
            emit(
                "disk_tier",
                case="loading 1 MiB values",
                files=where,
                threads=num_threads,
                tier_gb_per_s=round(count * MEBIBYTE / 1e9 / statistics.median(seconds["tier"]), 2),
                pread_gb_per_s=round(count * MEBIBYTE / 1e9 / statistics.median(seconds["plain"]), 2),
                time_ratio_to_pread=round(statistics.median(ratios), 3),
            )
    os.close(descriptor)
    tier.close()
    shutil.rmtree(folder)


def storing(base: Path, count: int, repetitions: int) -> None:
    for case, cap in (("with room", 4 * count * MEBIBYTE), ("evicting", (count // 2 + 24) * MEBIBYTE)):
        for num_threads in (1, 8):
            runs = [
                storing_once(
                    base, count, cap, num_threads, before=count if case == "evicting" else 0, seed=seed
                )
                for seed in range(repetitions)
            ]
            tier, plain = (statistics.median(run[which] for run in runs) for which in (0, 1))
            emit(
                "disk_tier",
                case="storing 1 MiB values durably",
                folder=case,
                threads=num_threads,
                tier_mb_per_s=round(count * MEBIBYTE / 1e6 / tier),
                pwrite_fdatasync_mb_per_s=round(count * MEBIBYTE / 1e6 / plain),
                time_ratio=round(statistics.median(run[0] / run[1] for run in runs), 2),
            )


def storing_once(
    base: Path, count: int, cap: int, num_threads: int, *, before: int, seed: int
) -> tuple[float, float]:
    """Seconds of the tier, which holds the last of `before` values at first, and of plain writes and syncs."""
    data = np.random.default_rng(seed).integers(0, 256, MEBIBYTE, np.uint8).data
    keys = keys_of(count + before, seed)
    infos = chained(keys)
    tier = DiskTier(base / "store", cap)
    for i in range(count, count + before):
        tier.store(keys[i], [data], infos[i])
    descriptor = os.open(base / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, count * MEBIBYTE)

    def plain(i: int) -> None:
        os.pwrite(descriptor, data, i * MEBIBYTE)
        os.fdatasync(descriptor)

    def store(i: int) -> None:
        assert tier.store(keys[i], [data], infos[i])

    taken = {}
    for who, call in [("tier", store), ("plain", plain)][:: 1 if seed % 2 else -1]:
        taken[who] = timed(in_threads, num_threads, range(count), call)
    tier.close()
    os.close(descriptor)
    os.unlink(base / "plain")
    shutil.rmtree(base / "store")
    return taken["tier"], taken["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--dir", default="/var/tmp", help="where the folders are made")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--only", choices=["opening", "loading", "storing"], help="one part")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (2 if arguments.quick else 5)
    emit_machine()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as base:
        for count in [1_000] if arguments.quick else [10_000, 100_000]:
            if arguments.only in (None, "opening"):
                opening(Path(base), count, repetitions)
        if arguments.only in (None, "loading"):
            loading(Path(base), 32 if arguments.quick else 256, repetitions)
        if arguments.only in (None, "storing"):
            storing(Path(base), 16 if arguments.quick else 128, repetitions)


if __name__ == "__main__":
    main()
