"""`measured_cost`: the cost line of a model on this machine, from two prompt lengths.

    token_s     the difference of two prompts' times, over that of their tokens
    context_s   the difference of a decode step behind either, over that of their tokens
    fixed_s     a decode step, less the two

Each time is the least of three: other programs of the machine only add to it.

Cost: six answers of 17 tokens and six of one, of prompts of 64 and 512 tokens, or the half of what the model holds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.simulate.cost_line import CostLine

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = ["measured_cost"]

_NUM_TOKENS = (64, 512)
_NUM_STEPS = 16
_NUM_TIMES = 3


def measured_cost(llm: LLM) -> CostLine:
    """The line of an idle engine. *raises:* ArgumentError: it holds fewer than 128 tokens of a request."""
    short, long = _NUM_TOKENS[0], min(_NUM_TOKENS[1], llm.max_model_len // 2)
    if long <= short:
        raise ArgumentError(
            f"expected a model that holds {2 * short + 2} tokens, got {llm.max_model_len}; give --cost"
        )
    prefill_s, step_s = zip(*(_times(llm, length) for length in (short, long)), strict=True)
    token_s = max(0.0, prefill_s[1] - prefill_s[0]) / (long - short)
    context_s = max(0.0, step_s[1] - step_s[0]) / (long - short)
    return CostLine(max(0.0, step_s[0] - token_s - context_s * short), token_s, context_s)


def _times(llm: LLM, num_tokens: int) -> tuple[float, float]:
    """Seconds of a prompt of so many tokens, none cached, and of a decode step behind it."""
    generator = np.random.default_rng(num_tokens)
    first: list[float] = []
    all_tokens: list[float] = []
    for _ in range(_NUM_TIMES):
        for seconds, num_new in ((first, 1), (all_tokens, 1 + _NUM_STEPS)):
            prompt = generator.integers(0, llm.vocab_size, num_tokens).tolist()
            began = time.perf_counter()
            llm.generate(
                [prompt], SamplingParams(max_tokens=num_new, temperature=0, beam_width=1, ignore_eos=True)
            )
            seconds.append(time.perf_counter() - began)
    return min(first), max(0.0, min(all_tokens) - min(first)) / _NUM_STEPS
