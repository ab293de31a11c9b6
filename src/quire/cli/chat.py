"""`quire chat`: a conversation in the terminal that shows how much of each turn came from the cache."""

from __future__ import annotations

import sys

from quire.cli import options
from quire.errors import PromptError

__all__ = ["chat"]


def chat(
    model: options.Model = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    kv_memory: options.KVMemory = "auto",
    block_size: options.BlockSize = 16,
    dtype: options.DType = "auto",
    max_model_len: options.MaxModelLen = None,
    seed: options.Seed = 0,
    backend: options.Backend = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Talks with a model. An empty line is skipped; /reset starts anew; /exit or Ctrl-D leaves."""
    from quire.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine_options = options.EngineOptions(
        model, kv_memory, block_size, dtype, max_model_len, seed, backend, revision, trust_remote_code
    )
    with engine_options.build() as llm:
        print(f"{llm.capacity}. /reset starts anew, /exit leaves.", file=sys.stderr)
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
            messages.append({"role": "user", "content": line})
            stream = llm.stream(messages, params)
            answer = ""
            try:
                for delta in stream:
                    answer += delta
                    print(delta, end="", flush=True)
            except KeyboardInterrupt:
                stream.close()  # aborts the request; the conversation goes on with what was said so far
            except PromptError as error:
                print(f"quire: {error} (/reset starts anew)", file=sys.stderr)
                messages.pop()
                continue
            print()
            result = stream.result
            if result is not None:
                print(
                    f"  [{result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens from the cache]",
                    file=sys.stderr,
                )
            messages.append({"role": "assistant", "content": answer})
