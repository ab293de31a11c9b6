"""`SimulatedReplica`: a simulated cache, and a queue with the clock of a cost line.

The replica computes one prompt after another, in steps of `step_tokens` tokens, in order of arrival. Requests that
decode meanwhile are part of each step: a token and their context. A request that finds no prompt before it, but others
that decode, waits for half of a decode step. An answer's tokens come a step each, with those that decode when it
begins. Memory does not bound the number of requests at once.

Cost: that of `SimulatedCache.serve`, and O(requests that decode).
"""

from __future__ import annotations

import heapq

from quire.simulate.cost_line import CostLine
from quire.simulate.replica import ServedRequest
from quire.simulate.simulated_cache import SimulatedCache
from quire.simulate.simulated_store import SimulatedStore
from quire.simulate.workload import TraceRequest

__all__ = ["SimulatedReplica"]


class SimulatedReplica:
    """free_at_s: when the last prompt of its queue is computed. num_computed_tokens: of all prompts."""

    def __init__(
        self,
        name: str,
        cache: SimulatedCache,
        cost: CostLine,
        *,
        block_tokens: int,
        step_tokens: int = 2048,
        store: SimulatedStore | None = None,
    ) -> None:
        self.name, self.cache, self.cost, self.store = name, cache, cost, store
        self.block_tokens, self.step_tokens = block_tokens, step_tokens
        self.free_at_s = 0.0
        self.num_computed_tokens = 0
        self._decoding: list[tuple[float, int]] = []  # (end, tokens of context) of each that decodes
        self._served: list[tuple[int, ServedRequest | None]] = []

    def queue_s(self, now: float) -> float:
        """Seconds until its queue is computed."""
        return max(0.0, self.free_at_s - now)

    def match(self, request: TraceRequest) -> int:
        """Blocks of the prompt that its memory has. Changes nothing."""
        return self.cache.match(request)

    def block_ids(self) -> list[int]:
        """The trace's blocks in its memory."""
        return self.cache.block_ids()

    def advance(self, until_s: float) -> None: ...

    def submit(self, number: int, request: TraceRequest) -> None:
        self._served.append((number, self.serve(request)))

    def pop_served(self) -> list[tuple[int, ServedRequest | None]]:
        served, self._served = self._served, []
        return served

    def serve(self, request: TraceRequest) -> ServedRequest:
        """Runs a request that arrives now; requests come in order of arrival."""
        block_ids, num_tokens = request.content_ids, request.num_prompt_tokens
        num_found = self.cache.serve(request, request.arrival_s)
        num_cached_tokens = min(num_tokens - 1, num_found * self.block_tokens)
        start_s = max(self.free_at_s, request.arrival_s)
        while self._decoding and self._decoding[0][0] <= start_s:
            heapq.heappop(self._decoding)
        if self._decoding and start_s > self.free_at_s:
            start_s += self._decode_step_s() / 2
        num_loaded = num_loaded_tokens = 0
        prefill_s = self._prefill_s(num_cached_tokens, num_tokens)
        if self.store is not None:
            num_loaded = self.store.count(block_ids, num_found)
            num_ready_tokens = min(num_tokens - 1, (num_found + num_loaded) * self.block_tokens)
            num_loaded_tokens = num_ready_tokens - num_cached_tokens
            load_s = self.store.cost.seconds(num_loaded_tokens, 0)
            load_s += self._prefill_s(num_ready_tokens, num_tokens)
            if num_loaded_tokens and load_s < prefill_s:
                prefill_s = load_s
            else:
                num_loaded = num_loaded_tokens = 0
            self.store.put(block_ids)
        num_computed_tokens = num_tokens - num_cached_tokens - num_loaded_tokens
        self.num_computed_tokens += num_computed_tokens
        self.free_at_s = start_s + prefill_s
        step_s = self._decode_step_s(num_tokens)
        if request.num_output_tokens > 1:  # the prompt's last step gives the first
            end_s = self.free_at_s + (request.num_output_tokens - 1) * step_s
            heapq.heappush(self._decoding, (end_s, num_tokens))
        return ServedRequest(
            self.name,
            num_found,
            num_loaded,
            num_cached_tokens,
            num_loaded_tokens,
            num_computed_tokens,
            prefill_s,
            self.free_at_s - request.arrival_s,
            step_s,
        )

    def _decode_step_s(self, *more_contexts: int) -> float:
        """Seconds of a step of those that decode, and of more with these contexts."""
        contexts = [*(context for _, context in self._decoding), *more_contexts]
        return self.cost.seconds(len(contexts), sum(contexts), len(contexts))

    def _prefill_s(self, num_cached_tokens: int, num_tokens: int) -> float:
        """Seconds of the steps from the first token that is computed to the prompt's end."""
        seconds, done = 0.0, num_cached_tokens
        num_context = sum(context for _, context in self._decoding)
        while done < num_tokens:
            num_new = min(self.step_tokens, num_tokens - done)
            done += num_new
            num_decodes = len(self._decoding)
            seconds += self.cost.seconds(num_new + num_decodes, done + num_context, num_decodes)
        return seconds
