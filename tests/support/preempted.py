"""Runs requests so that some are preempted while they decode, for any model."""

from __future__ import annotations

from typing import Any

from quire import LLM, SamplingParams
from quire.scheduler.request import RequestOutput

__all__ = ["generate_preempted"]

_DECODES_BEFORE = 3
_SHARE_LEFT = 0.8  # of the memory in use then: the longest request has room


def generate_preempted(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """As `llm.generate`; after a few decode steps of all the cache is left a part of what they hold, for good."""
    engine, found, num_steps = llm.engine, {}, 0
    ids = [engine.submit(prompt, params) for prompt in prompts]
    num_prefills = -(-sum(len(prompt) for prompt in prompts) // engine.scheduler.max_batch_tokens)
    cache: Any = llm._opened.cache
    has_kv, is_short = llm.spec.stores_kv, False
    while engine.has_work:
        if not is_short and num_steps >= num_prefills * has_kv + _DECODES_BEFORE:
            states = llm._opened.storage.states
            num_states = 0 if states is None else cache.num_state_slots_needed
            is_short = has_kv or num_states > 2
            if is_short:
                num_states -= not has_kv  # of states alone there is one too few
                state_bytes = 0 if states is None else num_states * states.bytes_per_slot
                llm.resize(int(llm.stats()["kv_reserved_bytes"] * _SHARE_LEFT) + state_bytes)
        for output in engine.step():
            found[output.request_id] = output
        num_steps += 1
    assert llm.stats()["num_preemptions"] > 0
    return [found[request] for request in ids]
