"""Formats of keys and values against 16 bits, in one run: decode attention, and requests that do not fit at once. JSON
lines.

    python benchmarks/kv_formats.py [--quick] [--repetitions 9] [--only attention|tight]

Attention: one query row for each sequence, 16 query heads, 8 KV heads of 128, shuffled blocks of 16, queries in
bfloat16. A figure is of one pass over many calls, each over its own blocks, like the layers of a model. Formats
take turns; medians. `of_bf16`: how many times as fast as with K and V in bfloat16; `gb_s`: bytes of codes and scales
read a second, and `read_gb_s` the read bandwidth in the same rounds.

Tight: 32 requests of 512 + 128 tokens in 256 MiB of KV, a random model of Qwen3-0.6B's shape (473 M parameters):
seconds until the last token, and how many tokens the same memory holds. Formats take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from attention import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, OPTIONS, measure, start_workers, timed
from engine import make_model, prompts_of
from machine import emit, emit_machine

from quire import LLM, SamplingParams, _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.attention import attention_batch
from quire.devices import device_of
from quire.memory import PagedStorage
from quire.spec import KVSpec
from quire.spec.kv_dtype import with_kv_dtype

FORMATS = ["auto", "int8", "k8v4", "int4"]
SIZES = [(1, 512), (8, 512), (32, 640), (8, 2048), (8, 8192)]  # sequences and tokens of each
BLOCK = 16
POOL_TOKENS = 1 << 17  # of a pool at least: 512 MiB in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and a small model: under 30 s")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--only", choices=["attention", "tight"])
    arguments = parser.parse_args()
    emit_machine()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if arguments.only != "tight":
        attention(arguments.repetitions or (3 if arguments.quick else 9), quick=arguments.quick)
    if arguments.only != "attention":
        tight(arguments.repetitions or (1 if arguments.quick else 3), quick=arguments.quick)


class Pool:
    """Random keys and values in one format, and the ids of their blocks in the order of use."""

    def __init__(self, kv_dtype: str, num_tokens: int) -> None:
        plain = KVSpec.uniform(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16")
        spec = with_kv_dtype(plain, kv_dtype)
        num_blocks = num_tokens // BLOCK
        self.storage = PagedStorage(spec, num_blocks, BLOCK)
        self.view = self.storage.view(0)
        self.token_bytes = spec.bytes_per_token
        k, v = (torch.randn(4096, NUM_KV_HEADS, HEAD_DIM).to(torch.bfloat16) for _ in range(2))
        for first in range(0, num_tokens, len(k)):
            device_of("native").write(self.view, k, v, torch.arange(first, first + len(k)))
        self.ids = torch.randperm(num_blocks).int()

    def passes(self, batch: int, context: int) -> tuple[Any, int]:
        """The calls that read the whole pool, and the bytes they read."""
        query = torch.randn(batch, NUM_Q_HEADS, HEAD_DIM).to(torch.bfloat16)
        out, width = torch.empty_like(query), context // BLOCK
        calls = len(self.ids) // (batch * width)
        threads = _native.num_threads()
        plans = [
            attention_batch(range(batch + 1), [context] * batch, table, BLOCK, threads)
            for table in self.ids[: calls * batch * width].view(calls, batch, width)
        ]

        def run() -> None:
            for plan in plans:
                device_of("native").run(self.view, query, plan, OPTIONS, out=out)

        return timed(run), calls * batch * context * self.token_bytes


def attention(repetitions: int, *, quick: bool) -> None:
    sizes = [(8, 512)] if quick else SIZES
    pools = {name: Pool(name, POOL_TOKENS // (16 if quick else 1)) for name in FORMATS}
    start_workers(_native.num_threads(), pin=True)
    for batch, context in sizes:
        rates: list[float] = []

        def read(rates: list[float] = rates) -> float:
            rates.append(_native.read_bandwidth(1 << 28, 1))
            return 0.0

        cases = {name: pool.passes(batch, context) for name, pool in pools.items()}
        seconds = measure({"": read} | {name: case for name, (case, _) in cases.items()}, repetitions)
        for name, (_, num_bytes) in cases.items():
            emit(
                "kv_formats",
                case="decode attention",
                isa=_native.isa(),
                kv_dtype=name,
                batch=batch,
                context=context,
                gb_s=round(num_bytes / seconds[name][0] / 1e9, 1),
                read_gb_s=round(statistics.median(rates) / 1e9, 1),
                of_bf16=round(seconds["auto"][0] / seconds[name][0], 2),
                bytes_of_bf16=round(pools["auto"].token_bytes / pools[name].token_bytes, 2),
            )


def tight(repetitions: int, *, quick: bool) -> None:
    batch, length, new = (8, 96, 32) if quick else (32, 512, 128)
    memory = "2MiB" if quick else "256MiB"
    model = make_model(quick=quick, dtype="bfloat16")
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    taken: dict[str, list[float]] = {name: [] for name in FORMATS}
    holds: dict[str, int] = {}
    for repetition in range(repetitions):
        for name in FORMATS:
            with LLM(
                (model, None),
                kv_memory=memory,
                kv_dtype=name,
                max_model_len=length + new,
                prefix_caching=False,
            ) as llm:
                llm.generate(prompts_of(2, 16, repetition), SamplingParams(max_tokens=2, ignore_eos=True))
                holds[name] = llm.cache.num_blocks * llm.cache.block_size
                start = time.perf_counter()
                llm.generate(prompts_of(batch, length, repetition), params)
                taken[name].append(time.perf_counter() - start)
    for name, seconds in taken.items():
        pairs = zip(taken["auto"], seconds, strict=True)
        emit(
            "kv_formats",
            case=f"{batch} x ({length} + {new}) in {memory}",
            kv_dtype=name,
            seconds=round(statistics.median(seconds), 2),
            of_bf16=round(statistics.median(a / b for a, b in pairs), 2),
            tokens=holds[name],
        )


if __name__ == "__main__":
    main()
