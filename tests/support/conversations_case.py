"""Helpers of the tests of conversations and of snapshots."""

from __future__ import annotations

from typing import Any

import pytest
from support.architectures import randomize, tiny

from quire import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=2)
START = [(7 * i) % 120 + 5 for i in range(53)]
TURNS = [[(11 * i + j) % 90 + 5 for j in range(9)] for i in range(4)]


def windowed(backend: str, **options: Any) -> LLM:
    """A model of which every second layer sees 8 tokens."""
    model = tiny("gemma2")
    randomize(model)
    defaults: dict[str, Any] = {
        "kv_memory": "2MiB",
        "max_batch_tokens": 64,
        "max_num_seqs": 8,
        "block_size": 4,
    }
    return LLM((model, None), backend=backend, **{**defaults, **options})


class Answer:
    """Tokens and logprobs; equal bit for bit, or, of the back end that leaves products to torch, but for rounding."""

    def __init__(self, tokens: list[int], logprobs: Any, backend: str) -> None:
        self.tokens, self.logprobs, self.is_exact = tokens, logprobs, backend == "native"

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        if self.is_exact:
            return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)
        assert len(self.logprobs) == len(other.logprobs)
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
        return self.tokens == other.tokens

    def __repr__(self) -> str:
        return f"{self.tokens}, {self.logprobs}"

    __hash__ = None  # type: ignore[assignment]

    def since(self, start: int) -> Answer:
        return Answer(self.tokens[start:], self.logprobs[start:], "native" if self.is_exact else "python")


def answer(llm: LLM, output: Any) -> Answer:
    return Answer(output.outputs[0].token_ids, output.outputs[0].logprobs, llm.cache.backend)


def alone(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY) -> Answer:
    """What the model says to these tokens when nothing is cached."""
    return answer(llm, llm.generate([tokens], params)[0])
