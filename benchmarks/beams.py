"""Beam search: speed against transformers, the cost of a reorder, and the memory that sharing saves. JSON lines.

    python benchmarks/beams.py [--quick] [--only speed|reorder|saved] [--dtype bfloat16] [--turns 3] [--prompt N]

speed     4 prompts of 128 and of 512 tokens, 4 beams each, 64 new tokens, on random weights in the shape of Qwen3-0.6B
          (see engine.py): tokens of answers per second from the first call to the last answer, of `LLM.generate` and of
          `model.generate(num_beams=4)` with its DynamicCache. They take turns; medians.
reorder   median milliseconds of `reorder_cache` with 4 rows of 1 024 and of 4 096 tokens in that shape, of DynamicCache
          and of QuireCache on each of its storages: random orders, a token after each. moved_bytes: those that a
          reorder writes, their mean; not of `virtual`, which maps most of them.
saved     the embedded model on held-out files of Python's library: 8 prompts a length, beam search with 2, 4 and 6
          beams and parallel sampling of 2, 4 and 6 at temperature 1. Lengths of prompts and answers are the means of
          the traces of the PagedAttention paper (19 and 58 of Alpaca, 161 and 338 of ShareGPT), and 512 and 128. The
          paper's metric: the blocks of 16 tokens that sharing saves, over the blocks without sharing, of all steps.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import make_model, prompts_of
from machine import emit, emit_machine
from transformers import DynamicCache, PreTrainedModel

from quire import LLM, SamplingParams
from quire.hf import QuireCache

WIDTH, BATCH = 4, 4
LENGTHS = {"alpaca": (19, 58), "sharegpt": (161, 338), "long": (512, 128)}
NUM_PROMPTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, one turn, about half a minute")
    parser.add_argument("--only", choices=("speed", "reorder", "saved"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", action="append", type=int, help="tokens of the prompts of `speed`")
    arguments = parser.parse_args()
    turns = 1 if arguments.quick else arguments.turns
    emit_machine()
    if arguments.only in (None, "speed", "reorder"):
        model = make_model(quick=arguments.quick, dtype=arguments.dtype)
        emit("beams", case="setup", torch_threads=torch.get_num_threads(), dtype=arguments.dtype)
        if arguments.only != "reorder":
            for length in arguments.prompt or ((32,) if arguments.quick else (128, 512)):
                speed(model, length, 16 if arguments.quick else 64, turns)
        if arguments.only != "speed":
            for length in (64,) if arguments.quick else (1024, 4096):
                reorder(model, length, 8 if arguments.quick else 16, turns)
    if arguments.only in (None, "saved"):
        saved(quick=arguments.quick)


def answer(model: Any, prompts: list[list[int]], new: int) -> None:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=WIDTH,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )


def speed(model: PreTrainedModel, length: int, new: int, turns: int) -> None:
    params = SamplingParams(beam_width=WIDTH, max_tokens=new, ignore_eos=True)
    rates: dict[str, list[float]] = {"quire": [], "generate": []}
    with LLM((model, None), kv_memory="2GiB") as llm:
        llm.generate(prompts_of(1, 16, 99), params)
        for turn in range(turns):
            prompts = prompts_of(BATCH, length, turn)
            ways: dict[str, Callable[[], Any]] = {
                "quire": lambda prompts=prompts: llm.generate(prompts, params),
                "generate": lambda prompts=prompts: answer(model, prompts, new),
            }
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                rates[name].append(BATCH * new / (time.perf_counter() - start))
    medians = {name: statistics.median(taken) for name, taken in rates.items()}
    emit(
        "beams",
        case="speed",
        batch=BATCH,
        beams=WIDTH,
        prompt=length,
        new=new,
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in medians.items()},
        times=round(medians["quire"] / medians["generate"], 2),
        turns={name: [round(rate, 1) for rate in taken] for name, taken in rates.items()},
    )


def reorder(model: PreTrainedModel, length: int, new: int, turns: int) -> None:
    """Orders as a search makes them: all rows descend from one, and then a few steps back from another."""
    rng = np.random.default_rng(0)
    orders = [torch.zeros(WIDTH, dtype=torch.int64)]
    orders += [torch.from_numpy(np.sort(rng.integers(0, WIDTH, WIDTH))) for _ in range(new)]
    times: dict[str, list[float]] = {}
    moved: dict[str, list[int]] = {}
    for _ in range(turns):
        caches: dict[str, Any] = {"dynamic": DynamicCache(config=model.config)}
        for storage in ("virtual", "growing", "contiguous"):
            caches[storage] = QuireCache(
                model.config, storage=storage, kv_memory="8GiB", max_length=length + new + 1
            )
        for name, cache in caches.items():
            _store(model, cache, length)
            counted: list[int] = []  # of each reorder
            if name in ("growing", "contiguous"):
                _count_moved(cache, counted)
            for number, order in enumerate(orders):
                counted.append(0)
                start = time.perf_counter()
                cache.reorder_cache(order)
                if number:  # the first one copies the prompt's rows, once
                    times.setdefault(name, []).append(time.perf_counter() - start)
                if name == "dynamic":
                    counted[-1] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
                _store(model, cache, 1)
            cache.reset()
            moved.setdefault(name, []).extend(counted[1:])
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        emit(
            "beams",
            case="reorder",
            cache=name,
            prompt=length,
            beams=WIDTH,
            reorder_ms=round(1e3 * median, 2),
            moved_bytes=None if name == "virtual" else round(statistics.mean(moved[name])),
            times=round(medians["dynamic"] / median, 1),
        )


def _count_moved(cache: QuireCache, counted: list[int]) -> None:
    """Sets the last entry of `counted` to the bytes that a reorder of the cache writes."""
    reorder = cache.memory.reorder

    def counting(needs: Any, order: Any, equal_until: Any) -> None:
        counted[-1] = sum(
            (need.stop - max(need.first, equal_until[row])) * need.rows.token_bytes
            for need in needs
            for row, source in enumerate(order)
            if row != source
        )
        reorder(needs, order, equal_until)

    cache.memory.reorder = counting  # type: ignore[method-assign]


def _store(model: PreTrainedModel, cache: Any, num_tokens: int) -> None:
    """Random keys and values of `num_tokens` tokens in each layer."""
    config = model.config
    shape = (WIDTH, config.num_key_value_heads, num_tokens, config.head_dim)
    new = torch.randn(shape, dtype=model.dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(new, new, layer)


def saved(*, quick: bool) -> None:
    with LLM(storage="paged", block_size=16, kv_memory="512MiB", max_num_seqs=64) as llm:
        text = llm.tokenizer("\n".join(_held_out()))["input_ids"]
        counts = [0, 0]  # entries of tables, and different blocks among them
        reserve = llm.cache.reserve_unchecked

        def counted(*step: Any) -> Any:
            plan = reserve(*step)
            if plan is not None:
                table = plan.block_tables
                held = table[table >= 0]
                counts[0] += len(held)
                counts[1] += len(np.unique(held))
            return plan

        llm.cache.reserve_unchecked = counted  # type: ignore[method-assign]
        for name, (length, new) in list(LENGTHS.items())[:1] if quick else list(LENGTHS.items()):
            at = np.linspace(0, len(text) - length, NUM_PROMPTS).astype(int).tolist()
            prompts = [text[first : first + length] for first in at]
            for width in (2, 4, 6):
                ways = {
                    "beam": SamplingParams(beam_width=width, max_tokens=new, ignore_eos=True),
                    "parallel": SamplingParams(
                        n=width, temperature=1.0, seed=0, max_tokens=new, ignore_eos=True
                    ),
                }
                for way, params in ways.items():
                    counts[:] = [0, 0]
                    for prompt in prompts:  # one at a time: only a request's own sequences share
                        llm.trim()
                        llm.generate([prompt], params)
                    emit(
                        "beams",
                        case="saved",
                        lengths=name,
                        prompt=length,
                        new=new,
                        way=way,
                        width=width,
                        saved_percent=round(100 * (1 - counts[1] / counts[0]), 1),
                    )


def _held_out() -> list[str]:
    """The held-out files that the embedded model was not trained on."""
    corpus = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "embedded_corpus.py"))
    return list(corpus["read_corpus"]()[1].values())


if __name__ == "__main__":
    main()
