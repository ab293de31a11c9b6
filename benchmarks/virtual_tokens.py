"""Tokens a second of the storages, decoding side by side in one process. JSON lines.

    python benchmarks/virtual_tokens.py [--quick] [--rounds 5] [--sequences 4] [--context 1024] [--attention]

One engine for each storage on the same random weights (8 layers in the shape of Qwen3-0.6B's, bfloat16, a vocabulary of
1000), mapped from one file: the place of an engine's weights matters as much as its storage. A round lets each
decode 48 steps after prompts of `--context` tokens, one step of each in turn; rates are medians over the rounds,
ratios to `contiguous` are medians of each round's ratio. Steps in which virtual maps a block are among them.

With `--attention` attention alone, of all 8 layers in turn: over the storages, and over rows laid out as `virtual` has
them, [token, head, dim], in plain memory of huge pages and of pages of 4 KiB. It shows the cost of the layout, and
of the pages.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import emit, emit_machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire import LLM, Cache, SamplingParams
from quire.attention import AttentionOptions, attention_batch
from quire.baselines.contiguous import ContiguousStorage
from quire.devices import device_of
from quire.memory import KVView, PagedStorage, VirtualStorage
from quire.spec import KVSpec
from quire.step import AttentionBatch

STORAGES: dict[str, dict[str, Any]] = {
    "contiguous": {"storage": "contiguous"},
    "virtual, pieces of 64 KiB": {"storage": "virtual"},
    "virtual, pieces of 2 MiB": {"storage": "virtual", "piece_size": "2MiB"},
    "paged": {"storage": "paged"},
}
STEPS = 48
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 8, 16, 8, 128
SPEC = KVSpec.uniform(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def random_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=LAYERS,
        num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=40960,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).bfloat16().eval()


def start(llm: LLM, prompts: list[list[int]]) -> None:
    """Every prompt computed, and one token behind each."""
    params = SamplingParams(max_tokens=STEPS + 16, temperature=0, ignore_eos=True)
    for prompt in prompts:
        llm.engine.submit(prompt, params)
    while any(
        sequence.num_tokens <= len(sequence.request.prompt_token_ids) + 1
        for request in llm.engine.scheduler.requests.values()
        for sequence in request.sequences
    ):
        llm.engine.step()


def decode_seconds(llms: dict[str, LLM], prompts: list[list[int]]) -> dict[str, float]:
    """Of STEPS steps of each engine: one step of each in turn, so that a disturbance affects all."""
    for llm in llms.values():
        start(llm, prompts)
    seconds, order = dict.fromkeys(llms, 0.0), list(llms)
    for _ in range(STEPS):
        for name in order:
            began = time.perf_counter()
            llms[name].engine.step()
            seconds[name] += time.perf_counter() - began
        order.append(order.pop(0))
    for llm in llms.values():
        llm.engine.abort_all()
    return seconds


def token_major(num_rows: int, row_tokens: int, advice: int) -> list[KVView]:
    """Rows laid out as `virtual` has them, of every layer, in private memory with this advice about its pages."""
    row_bytes = row_tokens * KV_HEADS * HEAD_DIM * 2
    memory = mmap.mmap(-1, 2 * LAYERS * num_rows * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    tensors = torch.frombuffer(memory, dtype=torch.bfloat16).fill_(0.5)
    rows = tensors.view(LAYERS, 2, num_rows, row_tokens, KV_HEADS, HEAD_DIM).transpose(3, 4)
    return [KVView(k, v, row_tokens) for k, v in rows]


def attention_alone(num_sequences: int, context: int, rounds: int) -> None:
    row_tokens = -(-(context + 256) // 1024) * 1024  # whole pieces of 2 MiB
    num_tokens = num_sequences * row_tokens
    every_row = torch.arange(num_sequences, dtype=torch.int32)[:, None]
    views: dict[str, tuple[list[KVView], torch.Tensor, Any]] = {}  # with tables, and objects that must stay

    contiguous = ContiguousStorage(SPEC, num_tokens, row_tokens)
    contiguous.fill(0.5)
    paged = PagedStorage(SPEC, num_tokens // 16, 16)
    paged.fill(0.5)
    views["contiguous"] = ([contiguous.view(i) for i in range(LAYERS)], every_row * row_tokens, contiguous)
    tables = torch.arange(num_tokens // 16, dtype=torch.int32).view(num_sequences, -1)
    views["paged"] = ([paged.view(i) for i in range(LAYERS)], tables, paged)
    for name, advice in (("huge pages", mmap.MADV_HUGEPAGE), ("4 KiB pages", mmap.MADV_NOHUGEPAGE)):
        views[f"token-major, {name}"] = (token_major(num_sequences, row_tokens, advice), every_row, None)
    for piece in (64 << 10, 2 << 20):
        block_size = piece // (KV_HEADS * HEAD_DIM * 2)
        storage = VirtualStorage(
            SPEC, num_tokens // block_size, block_size, max_model_len=row_tokens, max_num_seqs=num_sequences
        )
        storage.fill(0.5)
        cache = Cache(SPEC, num_blocks=storage.num_blocks, block_size=block_size, prefix_caching=False)
        sequences = [cache.open([0] * context) for _ in range(num_sequences)]
        plan = cache.reserve(sequences, [context] * num_sequences)
        assert plan is not None
        ((block_tables, _),) = storage.prepare(plan, np.array([sequence.id for sequence in sequences]))
        layers = [storage.view(i) for i in range(LAYERS)]
        views[f"virtual, pieces of {piece >> 10} KiB"] = (
            layers,
            torch.from_numpy(block_tables),
            storage,
        )

    attention, query = device_of("native"), torch.randn(num_sequences, Q_HEADS, HEAD_DIM).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in views}
    calls: dict[str, Callable[[], None]] = {}
    for name, (layers, tables, _) in views.items():
        plan = attention_batch(
            range(num_sequences + 1), [context] * num_sequences, tables, layers[0].block_size, threads
        )

        def call(layers: list[KVView] = layers, plan: AttentionBatch = plan) -> None:
            for view in layers:
                attention.run(view, query, plan, AttentionOptions(scale=HEAD_DIM**-0.5))

        calls[name] = call
        call()
    for _ in range(rounds):
        for name, attend in calls.items():
            start = time.perf_counter()
            attend()
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        ratios = [one / base for one, base in zip(times, seconds["contiguous"], strict=True)]
        emit(
            benchmark="virtual_tokens", attention=name, threads=threads, sequences=num_sequences, context=context,
            rounds=rounds, ms=round(statistics.median(times) * 1e3, 2),
            time_to_contiguous=round(statistics.median(ratios), 3),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, short contexts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--attention", action="store_true", help="attention alone, without a model")
    options = parser.parse_args()
    rounds, context = (1, 64) if options.quick else (options.rounds, options.context)
    emit_machine()
    if options.attention:
        return attention_alone(options.sequences, context, rounds)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 1000, context).tolist() for _ in range(options.sequences)]
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)
        llms = {
            name: LLM(
                folder,
                **options_of,
                kv_memory="1GiB",
                max_model_len=context + 256,
                max_num_seqs=options.sequences,
                packed_weights=folder,
            )
            for name, options_of in STORAGES.items()
        }
        compare(llms, prompts, rounds)


def compare(llms: dict[str, LLM], prompts: list[list[int]], rounds: int) -> None:
    decode_seconds(llms, prompts)  # memory is taken, caches are warm
    turns = [decode_seconds(llms, prompts) for _ in range(rounds)]
    num_tokens = len(prompts) * STEPS
    for name in llms:
        ratios = [turn["contiguous"] / turn[name] for turn in turns]
        emit(
            benchmark="virtual_tokens", storage=name, sequences=len(prompts), context=len(prompts[0]), rounds=rounds,
            tokens_per_second=round(statistics.median(num_tokens / turn[name] for turn in turns), 1),
            to_contiguous=round(statistics.median(ratios), 3), to_contiguous_least=round(min(ratios), 3),
        )  # fmt: skip
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
