"""The gain from reading shared tokens once for all sequences of a decode step. JSON lines.

    python benchmarks/shared_prefix.py [--quick] [--threads N] [--dtype bfloat16]

Each case is one decode step of sequences over a prefix, as attention over
  private     copies of the prefix, one for each sequence
  one by one  shared blocks that are read for each sequence (sharing switched off)
  shared      the same blocks, read once for all
with the same bits in the last two. Cases: 32 sequences over 4 096 tokens and 64 of their own; samples; trees;
two sequences over a few tokens, with little to gain. And the cost of the search in a step that shares nothing.
Random K and V, 16 query heads, 8 KV heads of 128, blocks of 16. The sides of a case run in turn; medians, and medians
of the turns' ratios. `read_gb_s`: the memory's read bandwidth at the time, on which `times_private` depends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from machine import emit, emit_machine

from quire import _native
from quire.attention import AttentionOptions, attention_batch
from quire.devices.cpu import native_attention
from quire.memory import KVView, PagedStorage
from quire.spec import KVSpec
from quire.step import AttentionBatch

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
OPTIONS = AttentionOptions(scale=HEAD_DIM**-0.5)

# Levels of a tree, root first: (children of each node, tokens). The last level's nodes are the sequences.
CASES = {
    "32 sequences, 4096 shared": [(1, 4096), (32, 64)],
    "32 sequences, 1000 shared": [(1, 1000), (32, 56)],
    "8 samples of 2000": [(1, 2000), (8, 100)],
    "16 samples of 2000": [(1, 2000), (16, 100)],
    "32 samples of 2000": [(1, 2000), (32, 100)],
    "tree: system prompt, 4 documents, 8 questions each": [(1, 1024), (4, 2048), (8, 64)],
    "tree: 5 levels, 2 branches each": [(1, 800), (2, 800), (2, 800), (2, 800), (2, 64)],
    "2 sequences, 4096 shared": [(1, 4096), (2, 64)],
    "2 sequences, 32 shared": [(1, 32), (2, 64)],
    "2 sequences, 64 shared, 2000 of their own": [(1, 64), (2, 2000)],
    "32 sequences, 32 shared, 500 of their own": [(1, 32), (32, 500)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case and the last, fewer repetitions")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    _native.set_num_threads(arguments.threads)
    repetitions = 5 if arguments.quick else 15
    emit_machine()
    names = list(CASES)[:1] if arguments.quick else list(CASES)
    for name in names:
        decode(name, CASES[name], getattr(torch, arguments.dtype), arguments.threads, repetitions)
    for num_sequences, context in ((256, 100), (256, 1024), (32, 600)):
        looking(num_sequences, context, getattr(torch, arguments.dtype), arguments.threads, repetitions)


def tables_of(levels: list[tuple[int, int]], num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Shared and private block tables of a tree's sequences, and the length of each."""
    free = torch.randperm(num_blocks, dtype=torch.int32)
    paths: list[list[int]] = [[]]
    length = 0
    for children, tokens in levels:
        length += tokens
        # A block that ends beyond the tokens of a node belongs to a child: copied when that writes in it.
        blocks = (length + (BLOCK_SIZE - 1 if (children, tokens) == levels[-1] else 0)) // BLOCK_SIZE
        grown = []
        for path in paths:
            for _ in range(children):
                grown.append(path + free[: blocks - len(path)].tolist())
                free = free[blocks - len(path) :]
        paths = grown
    shared = torch.tensor(paths, dtype=torch.int32)
    return shared, torch.randperm(num_blocks, dtype=torch.int32)[: shared.numel()].view(shared.shape), length


def make_view(num_blocks: int, dtype: torch.dtype) -> KVView:
    spec = KVSpec.uniform(
        num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=str(dtype).removeprefix("torch.")
    )
    view = PagedStorage(spec, num_blocks, BLOCK_SIZE).view(0)
    several = torch.arange(num_blocks) % 61  # as good as all different, and filled sooner
    for pool in (view.k, view.v):
        pool.copy_(torch.randn(61, *pool.shape[1:]).to(dtype)[several])
    return view


def decode(
    name: str, levels: list[tuple[int, int]], dtype: torch.dtype, num_threads: int, repetitions: int
) -> None:
    num_sequences = 1
    for children, _ in levels:
        num_sequences *= children
    num_blocks = num_sequences * (sum(tokens for _, tokens in levels) // BLOCK_SIZE + len(levels))
    view = make_view(num_blocks, dtype)
    shared, private, length = tables_of(levels, num_blocks)
    query = torch.randn(num_sequences, NUM_Q_HEADS, HEAD_DIM).to(dtype)

    def plan(tables: torch.Tensor) -> AttentionBatch:
        return attention_batch(
            range(num_sequences + 1), [length] * num_sequences, tables, BLOCK_SIZE, num_threads
        )

    plans = {
        "private": plan(private),
        "one by one": native_attention.unshared(plan(shared)),
        "shared": plan(shared),
    }
    outputs = {side: native_attention.run(view, query, plan, OPTIONS) for side, plan in plans.items()}
    if not torch.equal(outputs["shared"], outputs["one by one"]):
        raise RuntimeError(f"{name}: sharing changes bits")
    seconds = measure(
        {
            side: lambda plan=plan: native_attention.run(view, query, plan, OPTIONS)
            for side, plan in plans.items()
        },
        repetitions,
    )
    traffic = native_attention.traffic(view, NUM_Q_HEADS, plans["shared"], OPTIONS)
    emit(
        "shared_prefix",
        case=name,
        sequences=num_sequences,
        context=length,
        dtype=str(dtype).removeprefix("torch."),
        threads=num_threads,
        private_ms=milliseconds(seconds["private"]),
        one_by_one_ms=milliseconds(seconds["one by one"]),
        shared_ms=milliseconds(seconds["shared"]),
        times_private=ratio(seconds["private"], seconds["shared"]),
        times_one_by_one=ratio(seconds["one by one"], seconds["shared"]),
        mb_read=round(traffic.kv_bytes / 1e6, 2),
        mb_read_one_by_one=round(traffic.unshared_kv_bytes / 1e6, 2),
        shared_runs=traffic.num_shared_runs,
        read_gb_s=round(_native.read_bandwidth(1 << 28, 3) / 1e9, 1),
    )


def looking(num_sequences: int, context: int, dtype: torch.dtype, num_threads: int, repetitions: int) -> None:
    """A step of one layer where nothing is shared: batches that are new, with and without looking."""
    num_blocks = num_sequences * -(-context // BLOCK_SIZE)
    view = make_view(num_blocks, dtype)
    tables = torch.randperm(num_blocks, dtype=torch.int32).view(num_sequences, -1)
    query = torch.randn(num_sequences, NUM_Q_HEADS, HEAD_DIM).to(dtype)
    out = torch.empty_like(query)
    lengths = [context] * num_sequences
    kept = attention_batch(range(num_sequences + 1), lengths, tables, BLOCK_SIZE, num_threads)

    def looks(turn: int) -> float:
        """Seconds to find out that nothing is shared, beyond the cost of any new batch."""
        taken = {}
        for sharing in (True, False) if turn % 2 else (False, True):
            made = attention_batch(kept.query_start, lengths, tables, BLOCK_SIZE, num_threads)
            made = made if sharing else native_attention.unshared(made)
            start = time.perf_counter()
            native_attention.traffic(view, NUM_Q_HEADS, made, OPTIONS)
            taken[sharing] = time.perf_counter() - start
        return taken[True] - taken[False]

    found = [looks(turn) for turn in range(10 * repetitions)]
    step = measure({"step": lambda: native_attention.run(view, query, kept, OPTIONS, out=out)}, repetitions)[
        "step"
    ]
    emit(
        "shared_prefix",
        case="nothing shared",
        sequences=num_sequences,
        context=context,
        threads=num_threads,
        looking_us=round(statistics.median(found) * 1e6, 1),
        layer_us=round(statistics.median(step) * 1e6, 1),
        share_of_one_layer=round(statistics.median(found) / statistics.median(step), 5),
    )


def measure(cases: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each case, the cases run in turn."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, call in cases.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return taken


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def ratio(slow: list[float], fast: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 2)


if __name__ == "__main__":
    main()
