"""How fast attention over paged keys and values is, beside what memory allows and what torch does. JSON lines.

    python benchmarks/attention.py [--quick] [--threads N] [--dtype bfloat16]

Decode: a batch with one query row per sequence; its figure is the bytes of K and V a step must read over the time it
takes, also as a share of the read bandwidth measured in the same run. Prefill: one sequence of 2 048 tokens.
All cases of a table run in turn, again and again, so that what else happens on the machine hits them alike; the median
of each is printed, and the best, which says more on a busy machine. Every result is compared with torch's before it is
timed. Inputs: random, 16 query heads, 8 KV heads of 128; block ids shuffled over the whole pool ("contiguous": in
order, in blocks of 512).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from machine import emit, emit_machine
from torch.nn.functional import scaled_dot_product_attention

from quire.attention import AttentionOptions, AttentionPlan, backend
from quire.memory import Heap, KVView, PagedStorage
from quire.spec import KVSpec

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
OPTIONS = AttentionOptions(scale=HEAD_DIM**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer repetitions")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backend", default="native", choices=["native", "python"])
    parser.add_argument(
        "--pin", action="store_true", help="a processor to each native thread (busy machines)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.backend == "native":
        start_workers(arguments.threads, pin=arguments.pin)
    emit_machine()
    decode(
        arguments,
        batch=8,
        context=2048 if arguments.quick else 8192,
        repetitions=7 if arguments.quick else 15,
    )
    prefill(arguments, length=2048, repetitions=3 if arguments.quick else 9)


def start_workers(num_threads: int, *, pin: bool) -> None:
    """The native thread pool, each thread on a processor of its own where asked for."""
    from quire import _native

    torch.ones(1 << 22).sum()  # torch's threads exist now: those that come are ours
    others = set(os.listdir("/proc/self/task")) if pin else set()
    _native.set_num_threads(1)
    _native.set_num_threads(num_threads)
    if pin:
        workers = sorted(int(task) for task in set(os.listdir("/proc/self/task")) - others)
        for task, processor in zip([0, *workers], sorted(os.sched_getaffinity(0)), strict=False):
            os.sched_setaffinity(task, {processor})


def decode(arguments: argparse.Namespace, *, batch: int, context: int, repetitions: int) -> None:
    dtype = getattr(torch, arguments.dtype)
    attention = backend(arguments.backend)
    query = torch.randn(batch, NUM_Q_HEADS, HEAD_DIM).to(dtype)
    k = torch.randn(batch, NUM_KV_HEADS, context, HEAD_DIM).to(dtype)
    v = torch.randn(batch, NUM_KV_HEADS, context, HEAD_DIM).to(dtype)
    kv_bytes = k.nbytes + v.nbytes

    def torch_decode(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # The query heads of a KV head as rows of one product: several times as fast as enable_gqa.
        rows = query.view(batch, NUM_KV_HEADS, -1, HEAD_DIM)
        return scaled_dot_product_attention(rows, k, v).view(query.shape)

    want = torch_decode(k, v)
    cases: dict[str, Callable[[], float]] = {"read": read_once(kv_bytes)}
    for layout in ("packed", "split"):
        for block_size in (1, 16, 128, 512):
            view, tables = paged(k, v, block_size, layout, shuffled=block_size != 512)
            plan = AttentionPlan.build(
                range(batch + 1), [context] * batch, tables, block_size, arguments.threads
            )
            out = torch.empty_like(query)

            def run(view: KVView = view, plan: AttentionPlan = plan, out: torch.Tensor = out) -> torch.Tensor:
                return attention.run(view, query, plan, OPTIONS, out=out)

            torch.testing.assert_close(run(), want, rtol=2e-2, atol=2e-2)
            name = f"paged-{block_size}" if block_size != 512 else "contiguous"
            cases[f"{name} {layout}"] = timed(run)
            if block_size == 16 and layout == "packed":
                cases["torch: gather blocks of 16, then SDPA"] = timed(
                    gather_then(torch_decode, view, tables)
                )
    cases["torch: SDPA on contiguous tensors"] = timed(lambda: torch_decode(k, v))

    seconds = measure(cases, repetitions)
    for name, (median, least) in seconds.items():
        emit(
            "attention",
            case=f"decode {name}",
            batch=batch,
            context=context,
            dtype=arguments.dtype,
            threads=arguments.threads,
            ms=round(median * 1e3, 3),
            gb_per_s=round(kv_bytes / median / 1e9, 2),
            best_gb_per_s=round(kv_bytes / least / 1e9, 2),
            share_of_read_bandwidth=round(seconds["read"][0] / median, 3),
            best_share_of_read_bandwidth=round(seconds["read"][1] / least, 3),
            times_gather_then_sdpa=round(seconds["torch: gather blocks of 16, then SDPA"][0] / median, 2),
        )


def prefill(arguments: argparse.Namespace, *, length: int, repetitions: int) -> None:
    dtype = getattr(torch, arguments.dtype)
    attention = backend(arguments.backend)
    query = torch.randn(length, NUM_Q_HEADS, HEAD_DIM).to(dtype)
    k = torch.randn(1, NUM_KV_HEADS, length, HEAD_DIM).to(dtype)
    v = torch.randn(1, NUM_KV_HEADS, length, HEAD_DIM).to(dtype)
    heads = query.transpose(0, 1)[None].contiguous()
    group = NUM_Q_HEADS // NUM_KV_HEADS
    repeated = [tensor.repeat_interleave(group, dim=1) for tensor in (k, v)]

    def torch_prefill() -> torch.Tensor:
        # K and V repeated beforehand, which costs torch nothing here: its fastest form.
        return scaled_dot_product_attention(heads, *repeated, is_causal=True)

    view, tables = paged(k, v, 16, "packed", shuffled=True)
    plan = AttentionPlan.build([0, length], [length], tables, 16, arguments.threads)
    out = torch.empty_like(query)

    def run() -> torch.Tensor:
        return attention.run(view, query, plan, OPTIONS, out=out)

    torch.testing.assert_close(run(), torch_prefill()[0].transpose(0, 1), rtol=2e-2, atol=2e-2)
    seconds = measure(
        {"paged-16 packed": timed(run), "torch: SDPA on contiguous tensors": timed(torch_prefill)},
        repetitions,
    )
    # Q K^T and P V over the lower triangle.
    flops = 2 * 2 * NUM_Q_HEADS * HEAD_DIM * length * (length + 1) / 2
    for name, (median, least) in seconds.items():
        emit(
            "attention",
            case=f"prefill {name}",
            tokens=length,
            dtype=arguments.dtype,
            threads=arguments.threads,
            ms=round(median * 1e3, 2),
            gflop_per_s=round(flops / median / 1e9, 1),
            best_gflop_per_s=round(flops / least / 1e9, 1),
            times_sdpa=round(seconds["torch: SDPA on contiguous tensors"][0] / median, 2),
        )


def paged(
    k: torch.Tensor, v: torch.Tensor, block_size: int, layout: str, *, shuffled: bool
) -> tuple[KVView, torch.Tensor]:
    """The tokens of k and v, [batch, heads, context, dim] each, in blocks; and the tables that lead to them."""
    batch, num_heads, context, dim = k.shape
    width = context // block_size
    spec = KVSpec.uniform(
        num_layers=1, num_kv_heads=num_heads, head_dim=dim, dtype=str(k.dtype).removeprefix("torch.")
    )
    view = PagedStorage(spec, batch * width, block_size, layout=layout).view(0)
    ids = torch.randperm(batch * width) if shuffled else torch.arange(batch * width)
    tables = ids.view(batch, width)
    for pool, tokens in ((view.k, k), (view.v, v)):
        pool[tables] = tokens.unflatten(2, (width, block_size)).transpose(1, 2)
    return view, tables.int()


def gather_then(
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], view: KVView, tables: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """What a paged cache without a kernel of its own does in every layer of every step."""
    index = tables.long()
    return lambda: attend(*(pool[index].transpose(1, 2).flatten(2, 3) for pool in (view.k, view.v)))


def read_once(num_bytes: int) -> Callable[[], float]:
    """Seconds in which all threads read `num_bytes` in order, on huge pages: the fastest loop found in torch."""
    heap = Heap(num_bytes)
    heap.prefer_huge_pages(0, num_bytes)
    words = heap.tensor(torch.int64)
    words.fill_(1)
    return timed(words.max)


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """The call as a case: it answers how many seconds it took."""

    def case() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return case


def measure(cases: dict[str, Callable[[], float]], repetitions: int) -> dict[str, tuple[float, float]]:
    """Median and least seconds of each case, the cases run in turn."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, case in cases.items():
            taken[name].append(case())
    return {name: (statistics.median(values), min(values)) for name, values in taken.items()}


if __name__ == "__main__":
    main()
