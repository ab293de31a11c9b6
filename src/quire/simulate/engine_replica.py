"""`EngineReplica`: the engine's step loop with real scheduler and cache, and a cost line in place of a model.

The scheduler decides which prompts and decodes are in a step, as for a model: chunks, admission, preemption, waits for
a prefix that another request computes. A step's seconds follow from its new tokens, its decodes and the tokens of
context that it reads. A block of the trace is a block of the cache, of as many tokens; the tokens are those of
`Workload.token_ids`. Answers are tokens that no prompt has; they hold memory, and stay cached until they are evicted.

Prompts without a first token are the queue, as for the door of a cluster.

Invariants
    N1  the same requests at the same times give the same steps.
    N2  the store has a prompt's blocks from the end of the step that computed them on, for every replica.

Cost: some 0.1 ms a step, and O(tokens) a prompt.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from quire.cache.cache import Cache
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.errors import CapacityError
from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import ServedModel
from quire.simulate.cost_line import CostLine
from quire.simulate.meter import SimulatedClock, SimulatedRunner
from quire.simulate.replica import ServedRequest
from quire.simulate.simulated_loads import SimulatedLoads
from quire.simulate.simulated_store import SimulatedStore
from quire.simulate.workload import TraceRequest, Workload
from quire.spec import KVSpec
from quire.step import Batch

__all__ = ["EngineReplica"]

_VOCAB_SIZE = 2**31 - 2
_SPEC = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)


@dataclass
class _Submitted:
    """A request of the engine. work_s: to compute what memory lacked."""

    request: TraceRequest
    submitted_s: float
    work_s: float
    is_computed: bool = False


class EngineReplica:
    """policy: of `SIMULATED_POLICIES`. limits: of a step; None: an engine's defaults. vocab_size: of the tokens that
    stand for the trace's blocks."""

    def __init__(
        self,
        name: str,
        workload: Workload,
        num_blocks: int,
        cost: CostLine,
        *,
        policy: str = "frequency",
        limits: StepLimits | None = None,
        store: SimulatedStore | None = None,
        vocab_size: int = _VOCAB_SIZE,
    ) -> None:
        self.name, self.store = name, store
        self.num_computed_tokens = 0
        self._workload, self._vocab_size = workload, vocab_size
        self._has_sessions = policy == "sessions"
        limits = limits or StepLimits()
        self._token_s = cost.prompt_token_s(limits.max_batch_tokens)
        self.clock = SimulatedClock()
        self.cache = Cache(
            _SPEC,
            num_blocks=num_blocks,
            block_size=workload.block_tokens,
            eviction="frequency" if self._has_sessions else policy,
        )
        self.cache.record_events(True)
        self._runner = _NotingRunner(None, cost, self.clock)
        self._loads = None
        if store is not None:
            self._loads = SimulatedLoads(
                store,
                cost,
                self.clock,
                block_tokens=workload.block_tokens,
                step_tokens=limits.max_batch_tokens,
                content_ids=lambda request_id: workload.requests[int(request_id)].content_ids,
                commit=self.cache.commit,
            )
        max_model_len = max(request.num_tokens for request in workload.requests)
        self.engine = Engine(
            EngineParts(self._runner, self.cache, loads=self._loads),  # type: ignore[arg-type]
            ServedModel(vocab_size, max_model_len),
            limits=limits,
            clock=self.clock,
        )
        self._open: dict[int, _Submitted] = {}
        self._served: list[tuple[int, ServedRequest | None]] = []
        self._id_of_tokens: dict[bytes, int] = {}
        self._id_of_node: dict[int, int] = {}
        self._to_store: deque[tuple[float, tuple[int, ...]]] = deque()  # when they were computed

    def queue_s(self, now: float) -> float:
        """Seconds of the prompts without a first token."""
        return sum(one.work_s for one in self._open.values() if not one.is_computed)

    def match(self, request: TraceRequest) -> int:
        """Blocks of the prompt that its memory has. Changes nothing."""
        present = set(self.block_ids())
        return next(
            (at for at, block_id in enumerate(request.content_ids) if block_id not in present),
            len(request.content_ids),
        )

    def block_ids(self) -> list[int]:
        """The trace's blocks in its memory; those of answers are left out. Cost: O(changes since the last call), and a
        list."""
        for event in self.cache.take_events():
            if event.tokens is not None:
                block_id = self._id_of_tokens.get(_digest(event.tokens))
                if block_id is not None:
                    self._id_of_node[event.node_id] = block_id
            elif event.kind == "removed":
                self._id_of_node.pop(event.node_id, None)
        return list(self._id_of_node.values())

    def advance(self, until_s: float) -> None:
        """Runs steps until the time or the end of the work; a step that begins before the time ends behind it."""
        if self._loads is not None:
            self._loads.wait_limit_s = until_s
        while self.engine.has_work and self.clock() < until_s:
            for output in self.engine.step():
                self._end(output)
            for request_id in self._runner.pop_computed():
                number = int(request_id)
                if number in self._open:
                    self._open[number].is_computed = True
                self._to_store.append((self.clock(), self._workload.requests[number].content_ids))
        while self._to_store and self._to_store[0][0] <= until_s:
            _, ids = self._to_store.popleft()
            if self.store is not None:
                self.store.put(ids)

    def submit(self, number: int, request: TraceRequest) -> None:
        """Queues request `number` of the workload, which arrives now. Requests come in order of arrival."""
        self.clock.wait_until(request.arrival_s)
        tokens = self._workload.token_ids(number, self._vocab_size)
        size = self._workload.block_tokens
        for at, block_id in enumerate(request.content_ids):
            if (at + 1) * size <= len(tokens):
                self._id_of_tokens[_digest(tokens[at * size : (at + 1) * size])] = block_id
        params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0, ignore_eos=True)
        session = request.session if self._has_sessions else None
        try:
            self.engine.submit(tokens, RequestOptions(params, request_id=str(number), session=session))
        except CapacityError:
            self._served.append((number, None))
            return
        num_new = max(1, request.num_prompt_tokens - self.match(request) * size)
        self._open[number] = _Submitted(request, self.clock(), num_new * self._token_s)

    def pop_served(self) -> list[tuple[int, ServedRequest | None]]:
        """The requests that ended since the last call, by number; None: it can never hold the request."""
        served, self._served = self._served, []
        return served

    def check(self) -> None:
        """*raises:* InvariantError."""
        self.cache.check()

    def _end(self, output: RequestOutput) -> None:
        number = int(output.request_id)
        submitted = self._open.pop(number)
        if output.error is not None:
            self._served.append((number, None))
            return
        self._served.append((number, self._served_request(submitted, output)))
        request = submitted.request
        if self._has_sessions and request.has_calls and request.session is not None:
            session = self.engine.sessions.find(None, request.session)
            if session is not None:
                self.engine.sessions.begin_tools(session)

    def _served_request(self, submitted: _Submitted, output: RequestOutput) -> ServedRequest:
        request, size, times = submitted.request, self._workload.block_tokens, output.timings
        num_loaded = sum(output.num_tier_tokens.values())
        num_found = output.num_cached_tokens - num_loaded
        num_computed = request.num_prompt_tokens - output.num_cached_tokens
        self.num_computed_tokens += num_computed
        queued_s, first_s, total_s = times.queued_s, times.time_to_first_token_s, times.total_s
        assert queued_s is not None
        assert first_s is not None
        assert total_s is not None
        num_more = request.num_output_tokens - 1
        return ServedRequest(
            self.name,
            num_found // size,
            -(-num_loaded // size),
            num_found,
            num_loaded,
            num_computed,
            first_s - queued_s,
            submitted.submitted_s + first_s - request.arrival_s,
            (total_s - first_s) / num_more if num_more else None,
        )


class _NotingRunner(SimulatedRunner):
    """Notes the requests that a step brings to their first token."""

    def __init__(self, storage: None, cost: CostLine, clock: SimulatedClock) -> None:
        super().__init__(storage, cost, clock)
        self._computed: list[str] = []

    def run(self, step: Batch[Any], /) -> torch.Tensor:
        self._computed += [one.request.request_id for one in step.sampled if not one.output_ids]
        return super().run(step)

    def pop_computed(self) -> list[str]:
        computed, self._computed = self._computed, []
        return computed


def _digest(tokens: Any) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
