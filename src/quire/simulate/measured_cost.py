"""`measured_cost`: the cost line of a model on this machine, from two prompt lengths and two numbers of sequences.

    token_s     the difference of two prompts' times, over that of their tokens
    context_s   the difference of a decode step behind either, over that of their tokens
    decode_s    the difference of a decode step of several sequences and of one, for each further one, less its context
    fixed_s     a decode step of one sequence, less its decode and context

Each time is the least of three: other programs of the machine only add to it.

Cost: nine answers of 17 tokens and nine of one. The prompts have 64 and 512 tokens, or half of what the model holds.
Three answers of each length are of eight prompts at once, or of as many as memory holds.
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
_NUM_SEQUENCES = 8


def measured_cost(llm: LLM) -> CostLine:
    """The line of an idle engine. *raises:* ArgumentError: it holds fewer than 128 tokens of a request."""
    num_held = min(llm.max_model_len, llm.cache.num_blocks * llm.cache.block_size)
    short, long = _NUM_TOKENS[0], min(_NUM_TOKENS[1], num_held // 2)
    if long <= short:
        raise ArgumentError(
            f"expected a model and memory for {2 * short + 2} tokens of a request, got {num_held}; give --cost"
        )
    prefill_s, step_s = zip(*(_times(llm, length) for length in (short, long)), strict=True)
    token_s = max(0.0, prefill_s[1] - prefill_s[0]) / (long - short)
    context_s = max(0.0, step_s[1] - step_s[0]) / (long - short)
    num_rooms = llm.cache.num_blocks // llm.cache.num_blocks_for(short + 1 + _NUM_STEPS)
    num_sequences = min(_NUM_SEQUENCES, llm.max_num_seqs, num_rooms)
    if num_sequences < 2:
        return CostLine(max(0.0, step_s[0] - token_s - context_s * short), token_s, context_s)
    _, several_s = _times(llm, short, num_sequences)
    decode_s = max(0.0, (several_s - step_s[0]) / (num_sequences - 1) - context_s * short)
    return CostLine(max(0.0, step_s[0] - decode_s - context_s * short), token_s, context_s, decode_s)


def _times(llm: LLM, num_tokens: int, num_prompts: int = 1) -> tuple[float, float]:
    """Seconds of prompts of so many tokens, none cached, and of a decode step behind them."""
    generator = np.random.default_rng()  # no seed: an engine may be measured twice
    first: list[float] = []
    all_tokens: list[float] = []
    for _ in range(_NUM_TIMES):
        for seconds, num_new in ((first, 1), (all_tokens, 1 + _NUM_STEPS)):
            prompts = generator.integers(0, llm.vocab_size, (num_prompts, num_tokens)).tolist()
            began = time.perf_counter()
            params = SamplingParams(max_tokens=num_new, temperature=0, beam_width=1, ignore_eos=True)
            llm.generate(prompts, params)
            seconds.append(time.perf_counter() - began)
    return min(first), max(0.0, min(all_tokens) - min(first)) / _NUM_STEPS
