"""The speed of the recurrences of state layers, against the memory's rate and transformers. JSON lines.

    python benchmarks/recurrence.py [--quick] [--threads N] [--repetitions 9]

Decode: one token of each of many sequences, more bytes of state than the last cache holds. The figure is the bytes of
the states, counted once, over the time, and that as a share of torch's `state.mul_` of the same memory in the same
rounds: each reads and writes the states once. RG-LRU and short convolutions have states no larger than their inputs:
their share says little.

Prefill: tokens a second of one delta-rule layer in the shape of Qwen3-Next's (16 heads of keys, 32 of values, 128
wide), without its products, against transformers' own fallback by chunks (`torch_chunk_gated_delta_rule`).

The cases of a table run in turn, again and again; medians, and the best, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from machine import emit, emit_machine

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.devices import device_of
from quire.recurrence import (
    CausalConvolution,
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    recurrence_step,
)
from quire.step import RecurrenceStep
from quire.torch_threads import torch_threads

PAUSE_SECONDS = 0.02  # the way before may have left threads that spin for a while
HEADS, KEY_HEADS, WIDTH = 32, 16, 128  # of a delta-rule layer
CHANNELS = 4096  # of Mamba and the others
DTYPE = torch.bfloat16

Case = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller states and fewer repetitions, for CI")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    repetitions = 3 if arguments.quick else arguments.repetitions
    torch.manual_seed(0)
    emit_machine()
    _native.set_num_threads(arguments.threads)
    with torch_threads(arguments.threads):
        decode(64 << 20 if arguments.quick else 512 << 20, arguments.threads, repetitions)
        prefill(256 if arguments.quick else 2048, arguments.threads, repetitions)


def decode(num_bytes: int, threads: int, repetitions: int) -> None:
    """A token of each sequence; the states of all take `num_bytes`."""
    for name, (shape, make) in layers().items():
        batch = max(1, num_bytes // (4 * shape.numel()))
        state = torch.randn(batch, *shape)
        run = make(state, recurrence_step(range(batch + 1), torch.randperm(batch)))
        # By one, so that the states do not change; torch multiplies anyway.
        taken = measure({"scale": lambda state=state: state.mul_(1.0), "step": run}, repetitions)
        rates = {key: (state.nbytes / median, state.nbytes / least) for key, (median, least) in taken.items()}
        emit(
            "recurrence",
            case=f"decode {name}",
            isa=_native.isa(),
            threads=threads,
            batch=batch,
            state_mib=round(state.nbytes / 2**20),
            gb_per_s=round(rates["step"][0] / 1e9, 2),
            scale_gb_per_s=round(rates["scale"][0] / 1e9, 2),
            share=round(rates["step"][0] / rates["scale"][0], 2),
            best_share=round(rates["step"][1] / rates["scale"][1], 2),
        )


def layers() -> dict[str, tuple[torch.Size, Callable[[torch.Tensor, RecurrenceStep], Case]]]:
    """By name the shape of a state, and the function that makes a call from a state and a step."""
    kernels = device_of("native").recurrence

    def delta(state: torch.Tensor, step: RecurrenceStep, wide: bool) -> Case:
        heads = HEADS if wide else KEY_HEADS
        q, k, v, g, beta = delta_rows(step.num_rows, heads)
        if wide:  # a decay for each channel, and as many heads of keys
            g = g[:, :, None].expand(-1, -1, WIDTH).contiguous()
        out = torch.empty_like(v)
        return lambda: kernels.compute(
            DeltaRule(state, q, k, v, g, beta, scale=WIDTH**-0.5, normalize=True), step, out=out
        )

    def linear(state: torch.Tensor, step: RecurrenceStep) -> Case:
        q, k, v, _, _ = delta_rows(step.num_rows, HEADS)
        g = -torch.rand(HEADS)
        return lambda: kernels.compute(LinearAttention(state, q, k, v, g), step)

    def mamba1(state: torch.Tensor, step: RecurrenceStep) -> Case:
        x, dt = random(step.num_rows, CHANNELS), torch.rand(step.num_rows, CHANNELS) * 0.1
        a, d = -torch.rand(CHANNELS, 16) * 16, torch.ones(CHANNELS)
        b, c = random(step.num_rows, 16), random(step.num_rows, 16)
        return lambda: kernels.compute(Mamba1Scan(state, x, dt, a, b, c, d), step)

    def mamba2(state: torch.Tensor, step: RecurrenceStep) -> Case:
        heads = CHANNELS // 64
        x, dt = random(step.num_rows, heads, 64), torch.rand(step.num_rows, heads) * 0.1
        a, d = -torch.rand(heads) * 16, torch.ones(heads)
        b, c = random(step.num_rows, 1, 128), random(step.num_rows, 1, 128)
        return lambda: kernels.compute(Mamba2Scan(state, x, dt, a, b, c, d), step)

    def rg_lru(state: torch.Tensor, step: RecurrenceStep) -> Case:
        x, log_a = random(step.num_rows, CHANNELS), -torch.rand(step.num_rows, CHANNELS)
        return lambda: kernels.compute(RealGatedUnit(state, x, log_a), step)

    def convolution(state: torch.Tensor, step: RecurrenceStep) -> Case:
        x, weight = random(step.num_rows, CHANNELS), torch.randn(CHANNELS, 4)
        return lambda: kernels.compute(CausalConvolution(state, x, weight, None, silu=True), step)

    return {
        "delta rule": (torch.Size([HEADS, WIDTH, WIDTH]), lambda state, step: delta(state, step, False)),
        "KDA": (torch.Size([HEADS, WIDTH, WIDTH]), lambda state, step: delta(state, step, True)),
        "Mamba 2": (torch.Size([CHANNELS // 64, 64, 128]), mamba2),
        "Mamba 1": (torch.Size([CHANNELS, 16]), mamba1),
        "linear attention": (torch.Size([HEADS, WIDTH, WIDTH]), linear),
        "RG-LRU": (torch.Size([CHANNELS]), rg_lru),
        "short convolution": (torch.Size([3, CHANNELS]), convolution),
    }


def prefill(num_tokens: int, threads: int, repetitions: int) -> None:
    """One prompt through a delta-rule layer."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule
    q, k, v, g, beta = delta_rows(num_tokens, KEY_HEADS)
    state, step = torch.zeros(1, HEADS, WIDTH, WIDTH), recurrence_step([0, num_tokens], [0])
    q_of_each, k_of_each = (one.repeat_interleave(HEADS // KEY_HEADS, dim=1)[None] for one in (q, k))

    def ours() -> torch.Tensor:
        state.zero_()
        return device_of("native").recurrence.compute(
            DeltaRule(state, q, k, v, g, beta, scale=WIDTH**-0.5, normalize=True), step
        )

    def theirs() -> torch.Tensor:
        # The heads of keys repeated beforehand: transformers before 5.24 asks for it.
        return chunked(
            q_of_each, k_of_each, v[None], g=g[None], beta=beta[None], use_qk_l2norm_in_kernel=True
        )[0]

    torch.testing.assert_close(ours()[None], theirs(), rtol=2e-2, atol=2e-2)
    taken = measure({"ours": ours, "transformers, by chunks": theirs}, repetitions)
    for name, (median, least) in taken.items():
        emit(
            "recurrence",
            case=f"prefill delta rule, {name}",
            isa=_native.isa(),
            threads=threads,
            tokens=num_tokens,
            tokens_per_s=round(num_tokens / median),
            best_tokens_per_s=round(num_tokens / least),
            ns_per_token_and_head=round(median * threads / num_tokens / HEADS * 1e9),
        )


def delta_rows(num_rows: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    q, k = random(num_rows, key_heads, WIDTH), random(num_rows, key_heads, WIDTH)
    v = random(num_rows, HEADS, WIDTH)
    return q, k, v, -torch.rand(num_rows, HEADS) * 0.1, torch.rand(num_rows, HEADS)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPE)


def measure(cases: dict[str, Case], repetitions: int) -> dict[str, tuple[float, float]]:
    """Median and least seconds of each case, the cases run in turn; a first turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repetitions + 1):
        for name, case in cases.items():
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            case()
            if turn > 0:
                taken[name].append(time.perf_counter() - start)
    return {name: (statistics.median(values), min(values)) for name, values in taken.items()}


if __name__ == "__main__":
    main()
