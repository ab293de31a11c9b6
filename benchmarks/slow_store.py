"""Time to the first token with a shared store that answers late, against no store at all. JSON lines.

    python benchmarks/slow_store.py [--quick] [--delays 0 0.01 0.1 0.5] [--requests 40] [--tokens 512] [--shared 0.5]

Random weights in the shape of Qwen3-0.6B (`benchmarks/engine.py`); --quick takes a small model. Each request has a
prompt of its own; `--shared` of them were asked of an earlier engine, whose values are in the store. Both engines get
the same prompts, one after the other and in turns; an engine forgets memory's content after each, so that each hit
comes from the store. Printed for each delay: seconds of all requests with and without the store, their ratio, and the
store's counts: segments loaded, requests that it was not asked for, prompts that were computed although it had them.
The store keeps its values in this process; each of its calls sleeps for the delay. The answers are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from engine import make_model, prompts_of
from machine import emit, emit_machine

from quire import LLM, SamplingParams
from quire.tiers.by_url import register
from quire.tiers.host import HostTier

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class DelayedTier(HostTier):
    """Host memory behind a delay. It outlives its engines."""

    name = "remote"

    def __init__(self) -> None:
        super().__init__(4 << 30)
        self.delay_s = 0.0

    def contains(self, keys: Any) -> list[bool]:
        time.sleep(self.delay_s)
        return super().contains(keys)

    def load(self, key: bytes) -> memoryview | None:
        time.sleep(self.delay_s)
        return super().load(key)

    def load_many(self, keys: Sequence[bytes]) -> list[memoryview]:
        time.sleep(self.delay_s)
        values: list[memoryview] = []
        for key in keys:
            value = super().load(key)
            if value is None:
                break
            values.append(value)
        return values

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, 6 requests, one delay")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.01, 0.1, 0.5])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shared", type=float, default=0.5)
    arguments = parser.parse_args()
    emit_machine()
    dtype = "float32" if arguments.quick else "bfloat16"
    models = [make_model(quick=arguments.quick, dtype=dtype) for _ in range(2)]
    count = 6 if arguments.quick else arguments.requests
    for delay_s in [0.1] if arguments.quick else arguments.delays:
        one_delay(models, prompts_of(count, arguments.tokens, seed=1), delay_s, arguments.shared)


def one_delay(models: list[Any], prompts: list[list[int]], delay_s: float, shared: float) -> None:
    tier = DelayedTier()
    made = register_once(tier)
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": len(prompts[0]) + 64,
        "kv_memory": "512MiB",
    }
    num_shared = round(shared * len(prompts))
    with LLM((models[0], None), remote_cache=made, **options) as earlier:
        for prompt in prompts[:num_shared]:
            earlier.generate([prompt], ONE)
        earlier.flush()
    tier.delay_s = delay_s
    spent, tokens = {"store": 0.0, "none": 0.0}, {"store": list[int](), "none": list[int]()}
    with (
        LLM((models[0], None), remote_cache=made, **options) as with_store,
        LLM((models[1], None), **options) as without,
    ):
        engines = {"store": with_store, "none": without}
        for llm in engines.values():
            llm.generate([[1, 2, 3]], ONE)  # warm up
        for number in range(len(prompts)):
            # Shared and other prompts in turns.
            prompt = prompts[number // 2 if number % 2 == 0 else -1 - number // 2]
            for name in ("store", "none") if number % 4 < 2 else ("none", "store"):
                began = time.perf_counter()
                [output] = engines[name].generate([prompt], ONE)
                spent[name] += time.perf_counter() - began
                tokens[name] += output.outputs[0].token_ids
                cache: Any = engines[name].cache
                cache.reset()
        counts = with_store.stats()["tiers"]["remote"]
    assert tokens["store"] == tokens["none"], "the answers differ"
    emit(
        "slow_store",
        case="slow store",
        delay_s=delay_s,
        requests=len(prompts),
        shared=num_shared,
        tokens=len(prompts[0]),
        with_store_s=spent["store"],
        without_s=spent["none"],
        ratio=spent["store"] / spent["none"],
        segments_loaded=counts["hits"],
        not_asked=counts["not_asked"],
        not_loaded=counts["not_loaded"],
    )


def register_once(tier: DelayedTier) -> str:
    """The URL of a tier."""
    scheme = f"delayed{id(tier)}"
    register(scheme, lambda url: tier)
    return f"{scheme}://"


if __name__ == "__main__":
    main()
