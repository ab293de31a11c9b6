"""Costs and savings of virtual memory: /proc/self/smaps, opening and growing a sequence, sharing, calls. JSON lines.

    python benchmarks/virtual_memory.py [--quick] [--repetitions 5]

smaps     a dense buffer, an empty range, a heap and a range mapped onto it: virtual, resident, dirty, PSS (KiB), and
          the memory that the heap's file takes (st_blocks).
sequence  a sequence of at most 40 960 tokens in the shape of Qwen3-4B (36 layers, 8 KV heads of 128, bfloat16) on
          `VirtualStorage`: memory committed when it is open, with 100 tokens, and grown beyond 4 096.
growing   the same growth by replacing buffers: torch copies 4 096 tokens of 72 buffers into larger ones.
calls     microseconds of taking memory, mapping, unmapping and giving back one piece, by size.
fork      8 192 tokens (and half a piece) in the shape of Qwen3-0.6B, pieces of 2 MiB, mapped a second time.
window    8 layers with a window of 1 024 tokens (4 KV heads of 256, bfloat16), in rows and in rings: a prompt of
          130 560 tokens in chunks of 2 048, then 512 one by one; addresses for 64 sequences, memory of one.
idle      the share of the memory that goes back when all sequences have ended: st_blocks, and PSS of the process.
All but smaps are medians. Nothing is computed; two threads do not help.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import emit, emit_machine

from quire import Cache
from quire.memory import VirtualStorage
from quire.memory.placement import AddressRange, Change, MemfdBackend, PlacementHeap
from quire.memory.virtual.page_sizes import virtual_block_size
from quire.spec import KVSpec, LayerSpec, Span

MIB = 1 << 20
QWEN3_4B = KVSpec.uniform(num_layers=36, num_kv_heads=8, head_dim=128)
MAX_MODEL_LEN = 40960
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
_FIELDS = {
    "Rss": "resident_kib",
    "Pss": "pss_kib",
    "Shared_Dirty": "dirty_kib",
    "Private_Dirty": "dirty_kib",
}


def smaps(start: int, stop: int) -> dict[str, int]:
    """The sums over the mappings that touch [start, stop); their virtual sizes are cut to it."""
    sums: dict[str, int] = dict.fromkeys(
        ("virtual_kib", "resident_kib", "dirty_kib", "pss_kib", "mappings"), 0
    )
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := _HEAD.match(line):
            low, high = max(start, int(head[1], 16)), min(stop, int(head[2], 16))
            inside = low < high
            if inside:
                sums["mappings"] += 1
                sums["virtual_kib"] += (high - low) >> 10
        elif inside and (name := line.split(":")[0]) in _FIELDS:
            sums[_FIELDS[name]] += int(line.split()[1])
    return sums


def process_pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("smaps_rollup has no Pss")


def timed_us(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e6


def run_smaps(num_bytes: int) -> None:
    piece = 64 << 10
    count = num_bytes // piece
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTDUMP)  # or the kernel shows it as one with its neighbours
    dense = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    emit_smaps("dense buffer", dense.data_ptr(), num_bytes)
    del dense
    heap = PlacementHeap([piece], max_blocks=count, blocks_per_heap=count)
    empty = heap.reserve((1 << 40) // piece)
    emit_smaps("empty range", empty.address, empty.num_bytes, heap)
    mapped, again = heap.reserve(count), heap.reserve(count)
    block_ids = heap.allocate(count)
    heap.map([(mapped, np.arange(count), block_ids)])
    mapped.tensor(0, torch.uint8).fill_(1)
    emit_smaps("range mapped onto a heap", mapped.address, num_bytes, heap)
    heap.map([(again, np.arange(count), block_ids)])
    emit_smaps("the same, mapped at a second range too", mapped.address, num_bytes, heap)
    heap.unmap(mapped, np.arange(count))
    heap.unmap(again, np.arange(count))
    emit_smaps("the range unmapped, its blocks still held", mapped.address, num_bytes, heap)
    heap.free(block_ids)
    heap.trim()
    emit_smaps("the blocks given back", mapped.address, num_bytes, heap)
    heap.close()


def emit_smaps(what: str, address: int, num_bytes: int, heap: PlacementHeap | None = None) -> None:
    file_kib = {} if heap is None else {"heap_file_kib": heap.committed_bytes >> 10}
    found = smaps(address, address + num_bytes)
    emit(benchmark="virtual_memory", part="smaps", what=what, **found, **file_kib)


def storage_of(kv_memory: int, max_num_seqs: int) -> VirtualStorage:
    block_size = virtual_block_size(QWEN3_4B)
    num_blocks = kv_memory // QWEN3_4B.bytes_for(block_size)
    return VirtualStorage(
        QWEN3_4B, num_blocks, block_size, max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs
    )


def run_sequence(repetitions: int, step_tokens: int) -> None:
    worst = QWEN3_4B.bytes_for(MAX_MODEL_LEN)
    opened, hundred, grown, ready, regrown, committed = [], [], [], [], [], (0, 0, 0)
    for _ in range(repetitions):
        storage = storage_of(worst, max_num_seqs=8)
        cache = Cache(QWEN3_4B, num_blocks=storage.num_blocks, block_size=storage.block_size)
        tokens = np.arange(step_tokens + 1, dtype=np.int32)

        def step(sequence: Any, count: int, cache: Cache = cache, storage: VirtualStorage = storage) -> float:
            plan = cache.reserve([sequence], [count])
            assert plan is not None
            time_us = timed_us(lambda: storage.prepare(plan, np.array([sequence.id])))
            cache.commit(sequence, sequence.num_computed_tokens + count)
            return time_us

        before = storage.bytes_committed
        start = time.perf_counter()
        sequence = cache.open(tokens)
        opened.append((time.perf_counter() - start) * 1e6)
        at_open = storage.bytes_committed
        hundred.append(step(sequence, 100))
        at_hundred = storage.bytes_committed
        step(sequence, step_tokens - 100)
        at_full = storage.bytes_committed
        grown.append(step(sequence, 1))  # the first token beyond: one block, 72 pieces, from an empty heap
        committed = (at_open - before, at_hundred, storage.bytes_committed - at_full)
        cache.close(sequence)
        storage.forget(np.array([sequence.id]))
        cache.reset()
        # Memory that the heap has already: the same blocks for another sequence, in its own row.
        other = cache.open(tokens + 7)
        storage._map.unmap_parked()
        ready.append(step(other, 100))
        step(other, step_tokens - 100)
        regrown.append(step(other, 1))
        storage.close()
    emit(
        benchmark="virtual_memory", part="sequence", worst_bytes=worst, max_model_len=MAX_MODEL_LEN,
        piece_bytes=65536, block_size=32, open_us=statistics.median(opened), open_committed_bytes=committed[0],
        tokens_100_committed_bytes=committed[1], tokens_100_us=statistics.median(hundred),
        tokens_100_ready_us=statistics.median(ready), grown_from_tokens=step_tokens,
        grow_us=statistics.median(grown), grow_ready_us=statistics.median(regrown), grow_committed_bytes=committed[2],
    )  # fmt: skip


def run_growing(repetitions: int, step_tokens: int) -> None:
    times, copied = [], 0
    for _ in range(repetitions):
        old = [torch.ones(step_tokens, 8, 128, dtype=torch.bfloat16) for _ in range(72)]
        start = time.perf_counter()
        new = []
        for buffer in old:
            larger = torch.empty(2 * step_tokens, 8, 128, dtype=torch.bfloat16)
            larger[:step_tokens].copy_(buffer)
            new.append(larger)
        times.append((time.perf_counter() - start) * 1e6)
        copied = sum(buffer.nbytes for buffer in old)
        del old, new
    emit(
        benchmark="virtual_memory", part="growing", what="72 buffers replaced, torch copies", step_tokens=step_tokens,
        copied_bytes=copied, peak_extra_bytes=2 * copied, grow_us=statistics.median(times),
    )  # fmt: skip


def run_calls(count: int) -> None:
    for piece, name in ((4 << 10, "4KiB"), (64 << 10, "64KiB"), (256 << 10, "256KiB"), (2 * MIB, "2MiB")):
        n = min(count, 256 * MIB // piece)
        figures: dict[str, float] = {}
        for call, times in call_times(piece, n).items():
            figures[f"{call}_us"] = round(statistics.median(times), 1)
            figures[f"{call}_p99_us"] = round(sorted(times)[int(0.99 * len(times))], 1)
        emit(benchmark="virtual_memory", part="calls", piece=name, calls=n, **figures)


def call_times(piece: int, n: int) -> dict[str, list[float]]:
    """Of n pieces, no two of them neighbours, each call one after another."""
    backend = MemfdBackend()
    memory = backend.make_heap(2 * n * piece)
    base = backend.reserve(2 * n * piece, piece)

    def commit(at: int) -> None:
        if piece != backend.huge_bytes or not backend.commit_huge(memory, at):
            backend.commit(memory, at, piece)

    calls: dict[str, Callable[[int], None]] = {
        "commit": commit,
        "map": lambda at: backend.map(base + at, piece, memory, at, populate=True),
        "unmap": lambda at: backend.unmap(base + at, piece),
        "map_again": lambda at: backend.map(base + at, piece, memory, at, populate=True),
        "unmap_again": lambda at: backend.unmap(base + at, piece),
        "give_back": lambda at: backend.give_back(memory, at, piece),
    }
    times = {
        name: [timed_us(partial(call, at)) for at in range(0, 2 * n * piece, 2 * piece)]
        for name, call in calls.items()
    }
    backend.release(base, 2 * n * piece)
    backend.drop_heap(memory)
    return times


def run_fork(repetitions: int, num_layers: int) -> None:
    piece, tokens = 2 * MIB, 8192 + 512
    layer_buffers = 2 * num_layers
    blocks_needed = -(-tokens // 1024)
    heap = PlacementHeap([piece] * layer_buffers, max_blocks=2 * blocks_needed)
    parent = heap.reserve(40)
    block_ids = heap.allocate(blocks_needed)
    heap.map([(parent, np.arange(blocks_needed), block_ids)])
    shared, copied = [], []

    def copy_last(child: AddressRange) -> None:
        last = heap.allocate(1)
        heap.copy(int(block_ids[-1]), int(last[0]), [piece // 2] * layer_buffers)
        heap.map([(child, [blocks_needed - 1], last)])
        heap.free(last)

    for _ in range(repetitions):
        child = heap.reserve(40)
        whole: list[Change] = [(child, np.arange(blocks_needed - 1), block_ids[:-1])]
        shared.append(timed_us(partial(heap.map, whole)))
        copied.append(timed_us(partial(copy_last, child)))
        heap.release(child)
    emit(
        benchmark="virtual_memory", part="fork", tokens=tokens, layers=num_layers, piece_bytes=piece,
        share_us=statistics.median(shared), copy_us=statistics.median(copied), copied_bytes=layer_buffers * piece // 2,
    )  # fmt: skip
    heap.close()


def run_window(chunk: int) -> None:
    spec = KVSpec((LayerSpec(Span("window", 1024), 4, 256, 256),) * 8, "bfloat16")
    for what, step_tokens in (("rows", None), ("rings", chunk)):
        storage = VirtualStorage(
            spec, 1000, 32, max_model_len=131072, max_num_seqs=64, step_tokens=step_tokens
        )
        cache = Cache(spec, num_blocks=1000, block_size=32, prefix_caching=False)
        sequence = cache.open(np.arange(131072, dtype=np.int32))
        (places,) = storage._places
        peak, times = 0, []
        steps = [chunk] * ((131072 - 512) // chunk)
        for count in [*steps, 131072 - 512 - sum(steps), *[1] * 512]:
            if not count:
                continue
            plan = cache.reserve([sequence], [count])
            assert plan is not None
            time_us = timed_us(partial(storage.prepare, plan, np.array([sequence.id])))
            cache.commit(sequence, sequence.num_computed_tokens + count)
            peak = max(peak, storage.bytes_committed)
            if count == 1 and sequence.num_computed_tokens % 32 == 1:
                times.append(time_us)
        found = smaps(places.range.address, places.range.address + places.range.num_bytes)
        emit(
            benchmark="virtual_memory", part="window", what=what, reserved_bytes=storage.bytes_reserved,
            committed_bytes=peak, blocks_led_to=len(np.unique(places.range.entries)) - 1,
            counted_mappings=storage.num_mappings, new_block_us=statistics.median(times), **found,
        )  # fmt: skip
        storage.close()


def run_idle(num_sequences: int) -> None:
    storage = storage_of(2 << 30, max_num_seqs=num_sequences)
    cache = Cache(QWEN3_4B, num_blocks=storage.num_blocks, block_size=storage.block_size)
    gc.collect()
    idle_pss = process_pss_bytes()
    sequences = [cache.open(np.arange(1000) + 1000 * i) for i in range(num_sequences)]
    plan = cache.reserve(sequences, [1000] * num_sequences)
    assert plan is not None
    ids = np.array([sequence.id for sequence in sequences])
    storage.prepare(plan, ids)
    busy_pss, busy_file = process_pss_bytes(), storage.bytes_committed
    for sequence in sequences:
        cache.close(sequence)
    storage.forget(ids)
    time_us = timed_us(lambda: storage.give_back(np.arange(storage.num_blocks)))
    after_pss = process_pss_bytes()
    emit(
        benchmark="virtual_memory", part="idle", sequences=num_sequences, tokens=1000, busy_file_bytes=busy_file,
        after_file_bytes=storage.bytes_committed, returned_share_file=1 - storage.bytes_committed / busy_file,
        returned_share_pss=(busy_pss - after_pss) / (busy_pss - idle_pss), give_back_us=time_us,
    )  # fmt: skip
    storage.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, small sizes")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    quick = options.quick
    emit_machine()
    run_smaps((16 if quick else 256) * MIB)
    run_sequence(1 if quick else options.repetitions, 512 if quick else 4096)
    run_growing(1 if quick else options.repetitions, 512 if quick else 4096)
    run_calls(16 if quick else 512)
    run_fork(1 if quick else options.repetitions, 2 if quick else 28)
    run_window(2048)
    run_idle(1 if quick else 8)


if __name__ == "__main__":
    main()
