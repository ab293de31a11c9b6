"""`quire chat`: a conversation in the terminal that shows how much of each turn came from the cache."""

from __future__ import annotations

import sys
from typing import Any

from quire.cli import options
from quire.config import EngineConfig
from quire.errors import CapacityError, PromptError

__all__ = ["chat"]


@options.engine_flags(without=("profile",))
def chat(
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    **engine: Any,
) -> None:
    """Talks with a model. An empty line is skipped; /reset starts anew; /exit or Ctrl-D leaves."""
    from quire.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    config = EngineConfig(**engine)

    from quire.engine.llm import LLM  # here, so that --help and bad options do not wait for torch

    with LLM(config=config) as llm:
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
