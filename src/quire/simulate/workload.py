"""Workloads: requests with arrival times and lengths, from a trace file or synthetic.

A workload holds lengths and identities, no text: `token_ids` generates ids of the right length, equal where the trace
has equal contents. The same seed gives the same workload.

`quire.simulate.trace_files` reads traces.

Cost: O(prompt tokens) for the ids of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.errors import ArgumentError
from quire.simulate.lengths import Lengths

__all__ = ["MOONCAKE_BLOCK_TOKENS", "TraceRequest", "Workload", "synthetic"]

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """A request.

    content_ids: the identity of each block of the prompt since its start, if known; the workload has the size of a
    block. session: the name of its session. answer_s: seconds until its answer ended. has_calls: the answer ended in
    tool calls.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    content_ids: tuple[int, ...] = ()
    session: str | None = None
    answer_s: float = 0.0
    has_calls: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. name: their origin in words. block_tokens: of a block of content."""

    name: str
    requests: tuple[TraceRequest, ...]
    seed: int = 0
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def limited(self, max_model_len: int, num_requests: int | None = None) -> Workload:
        """The first `num_requests` requests that fit in `max_model_len` tokens.

        *raises:* ArgumentError if none fits.
        """
        fitting = [request for request in self.requests if request.num_tokens <= max_model_len]
        if not fitting:
            shortest = min(request.num_tokens for request in self.requests)
            raise ArgumentError(
                f"expected requests of at most {max_model_len} tokens, prompt and output, in {self.name}; the shortest "
                f"has {shortest}; raise the maximum length"
            )
        return replace(self, requests=tuple(fitting[:num_requests]))

    def token_ids(self, index: int, vocab_size: int) -> np.ndarray:
        """int32 [num_prompt_tokens]: ids of request `index`'s prompt, below `vocab_size`."""
        request = self.requests[index]
        if not request.content_ids:
            return _ids([self.seed, 0, index], request.num_prompt_tokens, vocab_size)
        blocks = [_ids([self.seed, 1, i], self.block_tokens, vocab_size) for i in request.content_ids]
        if (num_more := request.num_prompt_tokens - self.block_tokens * len(blocks)) > 0:  # less than a block
            blocks.append(_ids([self.seed, 0, index], num_more, vocab_size))
        return np.concatenate(blocks)[: request.num_prompt_tokens]


def _ids(seed: list[int], count: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int32)


def synthetic(lengths: Lengths, num_requests: int, seed: int = 0) -> Workload:
    """Requests that all arrive at the start, with lengths drawn from `lengths`."""
    generator = np.random.default_rng(seed)
    prompts = lengths.prompt.draw(generator, num_requests)
    outputs = lengths.output.draw(generator, num_requests)
    requests = [TraceRequest(0.0, p, o) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True)]
    return Workload(f"lengths {lengths.text}, seed {seed}", tuple(requests), seed)
