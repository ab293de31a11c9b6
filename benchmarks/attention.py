"""Speed of attention over paged keys and values, against the memory's rate, the product's rate and torch. JSON lines.

    python benchmarks/attention.py [--quick] [--threads N] [--dtype bfloat16] [--no-pin] [--no-variants]

Decode: a batch with one query row per sequence; its figure is the bytes of K and V a step must read over the time it
takes, and that as a share of the read bandwidth measured in the same rounds. A figure is of one pass over many calls,
each over its own blocks (256 MiB at least), like the layers of a model, so that all bytes come from memory. Tables:
contexts and batches with blocks of 16, on one thread and on all; block sizes; torch. "contiguous" is one
block of 512 after the other, in order; elsewhere block ids are shuffled over the whole pool.

Prefill: one sequence of 2 048 tokens; its figure is the rate of Q K^T and P V over the triangle, and that as a share of
the fastest packed product of 2 048 rows, ours or oneDNN's, in the same rounds.

Both again for every instruction set that runs here, each in its own process and against its own product.

The cases of a table run in turn, again and again, so that other load on the machine affects all alike; medians,
and the best, which says more on a busy machine. Results are compared with torch's first. Inputs: random, 16 query
heads, 8 KV heads of 128. A native thread keeps to one processor: on a busy machine the system
at times puts both on one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from machine import emit, emit_machine
from torch.nn.functional import scaled_dot_product_attention

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.attention import AttentionOptions, attention_batch
from quire.devices import device_of
from quire.devices.cpu.packed_weights import NativeWeight, OneDnnWeight
from quire.devices.cpu.packed_weights import onednn_serves as onednn_serves
from quire.memory import KVView, PagedStorage
from quire.spec import KVSpec
from quire.step import AttentionBatch

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
OPTIONS = AttentionOptions(scale=HEAD_DIM**-0.5)
PASS_BYTES = 256 << 20  # that a pass of decode reads at least
CONTIGUOUS = 512
PREFILL = 2048
PROCESSORS = sorted(os.sched_getaffinity(0))
PRODUCT = (3072, 1024)  # outputs and inputs of the packed product that a prefill is compared with

Case = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions, for CI")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--no-pin", action="store_true", help="threads run where the system puts them")
    parser.add_argument("--no-variants", action="store_true", help="only the instruction set in use")
    parser.add_argument("--brief", action="store_true", help="one case of each kind, as each variant runs it")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(arguments)
    if not arguments.brief:
        emit_machine()
        bench.contexts()
        bench.block_sizes()
        bench.against_torch()
    bench.prefill()
    if arguments.brief:
        bench.one_decode()
    elif not arguments.no_variants:
        os.sched_setaffinity(0, PROCESSORS)
        for isa in _native.supported_isas():
            if isa != _native.isa() and not isa.startswith("emulated"):
                subprocess.run(
                    [sys.executable, __file__, "--brief", *sys.argv[1:]],
                    env={**os.environ, "QUIRE_ISA": isa},
                    check=True,
                )


class Bench:
    """The tables of one run: each method measures one and prints it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.attention = device_of("native")
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        self.threads: int = arguments.threads
        self.quick: bool = arguments.quick or arguments.brief
        self.pin = not arguments.no_pin
        self.repetitions = 5 if self.quick else 9
        self.token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * self.dtype.itemsize

    def contexts(self) -> None:
        """Batches and contexts, blocks of 16; on one thread and on all."""
        sizes = [(1, 2048), (8, 2048)]
        if not self.quick:
            sizes = [(b, c) for b in (1, 8, 64) for c in (2048, 8192, 32768) if b * c <= 1 << 19]
        pool = Pool(self.dtype, 16, max(batch * context for batch, context in sizes))
        for threads in sorted({1, self.threads}):
            start_workers(threads, pin=self.pin)
            cases = {
                (("batch", batch), ("context", context)): self.decode_case(pool, batch, context, threads)
                for batch, context in sizes
            }
            self.report_decode({(("block_size", 16), *key): case for key, case in cases.items()}, threads)

    def block_sizes(self) -> None:
        """Block sizes on all threads, 8 sequences of 8 192 tokens."""
        start_workers(self.threads, pin=self.pin)
        batch, context = (8, 2048) if self.quick else (8, 8192)
        cases: dict[tuple, tuple[Case, int]] = {}
        for block_size in (1, 16, 256, CONTIGUOUS):
            pool = Pool(self.dtype, block_size, max(batch * context, PASS_BYTES // self.token_bytes))
            size = ("block_size", block_size if block_size != CONTIGUOUS else "contiguous")
            cases[size, ("batch", batch), ("context", context)] = self.decode_case(
                pool, batch, context, self.threads
            )
        self.report_decode(cases, self.threads)

    def one_decode(self) -> None:
        start_workers(self.threads, pin=self.pin)
        pool = Pool(self.dtype, 16, PASS_BYTES // self.token_bytes)
        self.report_decode(
            {(("block_size", 16),): self.decode_case(pool, 8, 2048, self.threads)}, self.threads
        )

    def against_torch(self) -> None:
        """Torch's attention of the same sizes. Run separately: its threads spin for a while after each call."""
        torch.set_num_threads(self.threads)
        batch, context = (8, 2048) if self.quick else (8, 8192)
        query, k, v = self.decode_inputs(batch, context)
        view, tables = paged(k, v, 16)
        index = tables.long()

        def gathered() -> torch.Tensor:
            # A paged cache without its own kernel does this in every layer of every step.
            return torch_decode(
                query, *(pool[index].transpose(1, 2).flatten(2, 3) for pool in (view.k, view.v))
            )

        cases: dict[str, Case] = {
            "torch: SDPA on contiguous tensors": timed(lambda: torch_decode(query, k, v)),
            "torch: gather blocks of 16, then SDPA": timed(gathered),
        }
        for name, (median, least) in measure(cases, 3 if self.quick else 5).items():
            num_bytes = batch * context * self.token_bytes
            emit(
                "attention",
                case=f"decode {name}",
                **self.setting(self.threads),
                batch=batch,
                context=context,
                gb_per_s=round(num_bytes / median / 1e9, 2),
                best_gb_per_s=round(num_bytes / least / 1e9, 2),
            )
        torch.set_num_threads(1)

    def prefill(self) -> None:
        query = torch.randn(PREFILL, NUM_Q_HEADS, HEAD_DIM).to(self.dtype)
        k, v = (torch.randn(1, NUM_KV_HEADS, PREFILL, HEAD_DIM).to(self.dtype) for _ in range(2))
        heads = query.transpose(0, 1)[None].contiguous()
        k_repeated, v_repeated = (
            tensor.repeat_interleave(NUM_Q_HEADS // NUM_KV_HEADS, dim=1) for tensor in (k, v)
        )
        view, tables = paged(k, v, 16)
        out = torch.empty_like(query)
        want = scaled_dot_product_attention(heads, k_repeated, v_repeated, is_causal=True)[0].transpose(0, 1)
        weight = (torch.randn(PRODUCT) * PRODUCT[1] ** -0.5).to(self.dtype)
        x = torch.randn(PREFILL, PRODUCT[1]).to(self.dtype)
        # Q K^T and P V over the lower triangle.
        flops = 2 * 2 * NUM_Q_HEADS * HEAD_DIM * PREFILL * (PREFILL + 1) / 2
        product_flops = 2 * PREFILL * PRODUCT[0] * PRODUCT[1]

        for threads in sorted({1, self.threads}):
            start_workers(threads, pin=self.pin)
            plan = attention_batch([0, PREFILL], [PREFILL], tables, 16, threads)

            def run(plan: AttentionBatch = plan) -> torch.Tensor:
                return self.attention.run(view, query, plan, OPTIONS, out=out)

            torch.testing.assert_close(run(), want, rtol=2e-2, atol=2e-2)
            packed = NativeWeight(weight)
            cases: dict[str, Case] = {
                "prefill": timed(run),
                "product": timed(lambda packed=packed: packed.multiply(x, None)),
            }
            seconds = measure(cases, self.repetitions)
            # Torch's threads apart from ours, which would have to share the processors with them.
            torch.set_num_threads(threads)
            of_torch: dict[str, Case] = {
                # K and V repeated beforehand, which costs torch nothing here: its fastest form.
                "prefill, torch SDPA": timed(
                    lambda: scaled_dot_product_attention(heads, k_repeated, v_repeated, is_causal=True)
                )
            }
            if onednn_serves(self.dtype):
                onednn = OneDnnWeight(weight)
                of_torch["product, oneDNN"] = timed(lambda onednn=onednn: onednn.multiply(x, None))
            seconds |= measure(of_torch, self.repetitions)
            torch.set_num_threads(1)

            rates = {
                name: (product_flops if name.startswith("product") else flops) / median / 1e9
                for name, (median, _) in seconds.items()
            }
            fastest = max(rate for name, rate in rates.items() if name.startswith("product"))
            for name, rate in rates.items():
                emit(
                    "attention",
                    case=name,
                    **self.setting(threads),
                    tokens=PREFILL,
                    ms=round(seconds[name][0] * 1e3, 2),
                    gflop_per_s=round(rate, 1),
                    share_of_fastest_product=round(rate / fastest, 3),
                    share_of_our_product=round(rate / rates["product"], 3),
                )

    def decode_case(self, pool: Pool, batch: int, context: int, threads: int) -> tuple[Case, int]:
        """A pass of decode steps over the pool's sequences, and the bytes it reads."""
        query = torch.randn(batch, NUM_Q_HEADS, HEAD_DIM).to(self.dtype)
        out = torch.empty_like(query)
        width = context // pool.block_size
        calls = max(
            1, min(PASS_BYTES // (batch * context * self.token_bytes), len(pool.ids) // (batch * width))
        )
        tables = pool.ids[: calls * batch * width].view(calls, batch, width)
        plans = [
            attention_batch(range(batch + 1), [context] * batch, table, pool.block_size, threads)
            for table in tables
        ]
        # The pool's tokens repeat a piece; torch gets the same pool.
        k, v = (
            tokens[tables[0][:1].long()].transpose(1, 2).flatten(2, 3)
            for tokens in (pool.view.k, pool.view.v)
        )
        got = self.attention.run(pool.view, query, plans[0], OPTIONS)
        torch.testing.assert_close(got[:1], torch_decode(query[:1], k, v), rtol=2e-2, atol=2e-2)

        def run() -> None:
            for plan in plans:
                self.attention.run(pool.view, query, plan, OPTIONS, out=out)

        return timed(run), calls * batch * context * self.token_bytes

    def report_decode(self, cases: dict[tuple, tuple[Case, int]], threads: int) -> None:
        rates: list[float] = []

        def read() -> float:
            rates.append(_native.read_bandwidth(PASS_BYTES, 1))
            return 0.0

        timings = measure({(): read} | {key: case for key, (case, _) in cases.items()}, self.repetitions)
        bandwidth = statistics.median(rates)
        for key, (_, num_bytes) in cases.items():
            median, least = timings[key]
            emit(
                "attention",
                case="decode",
                **self.setting(threads),
                **dict(key),
                gb_per_s=round(num_bytes / median / 1e9, 2),
                best_gb_per_s=round(num_bytes / least / 1e9, 2),
                read_gb_per_s=round(bandwidth / 1e9, 1),
                share_of_read_bandwidth=round(num_bytes / median / bandwidth, 3),
            )

    def decode_inputs(self, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query = torch.randn(batch, NUM_Q_HEADS, HEAD_DIM).to(self.dtype)
        k, v = (torch.randn(batch, NUM_KV_HEADS, context, HEAD_DIM).to(self.dtype) for _ in range(2))
        return query, k, v

    def setting(self, threads: int) -> dict[str, object]:
        return {"isa": _native.isa(), "dtype": str(self.dtype).removeprefix("torch."), "threads": threads}


class Pool:
    """Blocks of random keys and values (a random piece again and again), and their ids in the order of use."""

    def __init__(self, dtype: torch.dtype, block_size: int, num_tokens: int) -> None:
        num_blocks = num_tokens // block_size
        spec = KVSpec.uniform(
            num_layers=1,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=str(dtype).removeprefix("torch."),
        )
        self.block_size = block_size
        self.view: KVView = PagedStorage(spec, num_blocks, block_size).view(0)
        for tokens in (self.view.k, self.view.v):
            piece = torch.randn(max(1, 4099 // block_size), *tokens.shape[1:]).to(dtype)
            for part in tokens.split(len(piece)):
                part.copy_(piece[: len(part)])
        ids = torch.arange(num_blocks) if block_size == CONTIGUOUS else torch.randperm(num_blocks)
        self.ids = ids.int()


def torch_decode(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # The query heads of a KV head as rows of one product: several times as fast as enable_gqa.
    rows = query.view(len(query), NUM_KV_HEADS, -1, HEAD_DIM)
    return scaled_dot_product_attention(rows, k, v).view(query.shape)


def paged(k: torch.Tensor, v: torch.Tensor, block_size: int) -> tuple[KVView, torch.Tensor]:
    """The tokens of k and v, [batch, heads, context, dim] each, in shuffled blocks; and the tables to them."""
    batch, _, context, _ = k.shape
    width = context // block_size
    pool = Pool(k.dtype, block_size, batch * context)
    tables = pool.ids.view(batch, width)
    for blocks, tokens in ((pool.view.k, k), (pool.view.v, v)):
        blocks[tables.long()] = tokens.unflatten(2, (width, block_size)).transpose(1, 2)
    return pool.view, tables


def start_workers(num_threads: int, *, pin: bool) -> None:
    """The native thread pool, each thread on its own processor if asked for."""
    os.sched_setaffinity(0, PROCESSORS)
    _native.set_num_threads(1)
    others = set(os.listdir("/proc/self/task"))
    _native.set_num_threads(num_threads)
    if pin:
        workers = sorted(int(task) for task in set(os.listdir("/proc/self/task")) - others)
        for task, processor in zip([0, *workers], PROCESSORS, strict=False):
            os.sched_setaffinity(task, {processor})


def timed(call: Callable[[], object]) -> Case:
    """The call as a case: it answers how many seconds it took."""

    def case() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return case


def measure(cases: dict, repetitions: int) -> dict:
    """Median and least seconds of each case, the cases run in turn; a first turn warms up."""
    taken: dict = {name: [] for name in cases}
    for turn in range(repetitions + 1):
        for name, case in cases.items():
            seconds = case()
            if turn > 0:
                taken[name].append(seconds)
    return {name: (statistics.median(values), min(values)) for name, values in taken.items()}


if __name__ == "__main__":
    main()
