"""`quire chat`: a conversation in the terminal that shows how much of each turn came from the cache."""

from __future__ import annotations

import sys

from quire.cli import options
from quire.errors import CapacityError, PromptError

__all__ = ["chat"]


def chat(
    model: options.Model = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    kv_memory: options.KVMemory = "auto",
    storage: options.Storage = "paged",
    reservation: options.Reservation = "max",
    growth: options.Growth = "spread",
    piece_size: options.PieceSize = "64KiB",
    block_size: options.BlockSize = 16,
    dtype: options.DType = "auto",
    max_model_len: options.MaxModelLen = None,
    seed: options.Seed = 0,
    backend: options.Backend = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    packed_weights: options.PackedWeights = None,
    host_cache: options.HostCache = None,
    disk_cache: options.DiskCache = None,
    disk_cache_size: options.DiskCacheSize = None,
    remote_cache: options.RemoteCache = None,
    cache_write: options.CacheWrite = "eviction",
    preemption: options.Preemption = "auto",
    park_memory: options.ParkMemory = "auto",
) -> None:
    """Talks with a model. An empty line is skipped; /reset starts anew; /exit or Ctrl-D leaves."""
    from quire.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine_options = options.EngineOptions(
        model, kv_memory, storage, reservation, growth, piece_size, block_size, dtype, max_model_len, seed, backend,
        revision, trust_remote_code, packed_weights,
        host_cache=host_cache, disk_cache=disk_cache, disk_cache_size=disk_cache_size, remote_cache=remote_cache,
        cache_write=cache_write, preemption=preemption, park_memory=park_memory,
    )  # fmt: skip
    with engine_options.build() as llm:
        print(f"quire: {llm.capacity}. /reset starts anew, /exit leaves.", file=sys.stderr)
        messages: list[dict[str, str]] = []
        while True:
            try:
                line = input("> ") if sys.stdin.isatty() else input()
            except EOFError:
                return
            if not line.strip():
                continue
            if line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                messages = []
                continue
            turn = [*messages, {"role": "user", "content": line}]
            try:
                stream = llm.stream(turn, params)
            except (PromptError, CapacityError) as error:
                print(f"quire: {error} (/reset starts anew)", file=sys.stderr)
                continue
            answer = ""
            try:
                for delta in stream:
                    answer += delta
                    print(delta, end="", flush=True)
            except KeyboardInterrupt:
                stream.close()  # ends this answer; the conversation goes on with what was said so far
            print()
            if stream.result is not None:
                cached, prompt = stream.result.num_cached_tokens, len(stream.result.prompt_token_ids)
                print(f"  [{cached} of {prompt} prompt tokens from the cache]", file=sys.stderr)
            messages = [*turn, {"role": "assistant", "content": answer}]
