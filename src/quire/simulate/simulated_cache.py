"""`SimulatedCache`: `quire.Cache` and the sessions' registry over the blocks of a trace, without a model.

A block of the trace is a block of one token here, its identity the token. The prompt has one more token that is never
found and never stored, as the last token of a prompt is always computed. A prompt larger than the pool keeps the
beginning that fits. Answers are not stored: a trace does not say which content they have.

The registry gets the calls that an engine makes, with the trace's times: a request waits, starts and ends, and tools
begin where an answer ended in calls.

Invariant: the same requests at the same times find the same blocks.

Cost: that of `Cache.open`, `reserve`, `commit` and `close` on a prompt's blocks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from quire.cache.cache import Cache
from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import NORMAL
from quire.errors import ArgumentError
from quire.scheduler.request_options import RequestOptions
from quire.sessions.session_registry import SessionRegistry
from quire.simulate.workload import TraceRequest
from quire.spec import KVSpec

__all__ = ["SIMULATED_POLICIES", "SimulatedCache"]

SIMULATED_POLICIES = ("lru", "frequency", "sessions")
_COMPUTED = (1 << 31) - 1  # the token that is always computed
_SPEC = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)


class SimulatedCache:
    """policy: "lru" or "frequency", the eviction of `quire.Cache`; "sessions": "frequency", and what an engine does for
    sessions. reports_blocks: keeps `block_ids`."""

    def __init__(
        self,
        num_blocks: int,
        policy: str = "frequency",
        *,
        backend: str = "native",
        reports_blocks: bool = False,
    ) -> None:
        if policy not in SIMULATED_POLICIES:
            raise ArgumentError(f"expected {', '.join(SIMULATED_POLICIES)}, got {policy!r} - in `policy`")
        eviction = "frequency" if policy == "sessions" else policy
        self.num_blocks = num_blocks
        self.cache = Cache(_SPEC, num_blocks=num_blocks, block_size=1, backend=backend, eviction=eviction)
        if reports_blocks:
            self.cache.record_events(True)
        self._id_of_node: dict[int, int] = {}
        self._now = 0.0
        self._sessions: SessionRegistry | None = None
        self._tools: list[tuple[float, str]] = []  # begin times of tools, and their sessions
        self._num_requests = 0
        if policy == "sessions":
            self.cache.pins.use_clock(lambda: self._now)
            self._sessions = SessionRegistry(self.cache, lambda: None)

    def match(self, request: TraceRequest) -> int:
        """Blocks of the prompt that a request would find. Changes nothing."""
        return self.cache.match(_prompt(request)).num_tokens

    def serve(self, request: TraceRequest, now: float) -> int:
        """Runs a request: the blocks that it finds; the others are stored. now: seconds, never less than before."""
        prompt, waiting = _prompt(request), None
        if self._sessions is not None:
            self._begin_tools(now)
            self._now = now
            if request.session is not None:
                waiting = _registered(self._num_requests, request.session, prompt)
                self._sessions.expire()
                self._sessions.queue(waiting)  # type: ignore[arg-type]
        self._num_requests += 1
        sequence = self.cache.open(prompt)
        num_found = sequence.num_cached_tokens
        if self._sessions is not None and waiting is not None:
            self._sessions.start(waiting)  # type: ignore[arg-type]
        num_kept = min(len(request.content_ids), self.num_blocks)
        if num_found < num_kept:
            if self.cache.reserve([sequence], [num_kept - num_found]) is None:
                raise RuntimeError(f"expected room for {num_kept} blocks in a pool of {self.num_blocks}")
            self.cache.commit(sequence, num_kept)
        self.cache.close(sequence)
        if self._sessions is not None and waiting is not None:
            self._sessions.end(waiting)  # type: ignore[arg-type]
            if request.has_calls and request.session is not None:
                heapq.heappush(self._tools, (request.arrival_s + request.answer_s, request.session))
        return num_found

    def block_ids(self) -> list[int]:
        """The blocks in the pool. Needs `reports_blocks`. Cost: O(changes since the last call), and a list."""
        for event in self.cache.take_events():
            if event.tokens is not None:
                self._id_of_node[event.node_id] = int(event.tokens[0])
            elif event.kind == "removed":
                del self._id_of_node[event.node_id]
        return list(self._id_of_node.values())

    def check(self) -> None:
        """*raises:* InvariantError."""
        self.cache.check()
        if self._sessions is not None:
            self._sessions.check()

    def _begin_tools(self, now: float) -> None:
        assert self._sessions is not None
        while self._tools and self._tools[0][0] <= now:
            self._now, name = heapq.heappop(self._tools)
            if (session := self._sessions.find(None, name)) is not None:
                self._sessions.begin_tools(session)


def _prompt(request: TraceRequest) -> np.ndarray:
    return np.array([*request.content_ids, _COMPUTED], np.int32)


@dataclass
class _Path:
    """The part of a request's sequence that the registry reads."""

    tokens: np.ndarray
    key: tuple[int, int, int] = (0, 0, 0)

    def token_ids(self) -> np.ndarray:
        return self.tokens


@dataclass
class _RegisteredRequest:
    """The part of a request that the registry reads."""

    request_id: str
    prompt_token_ids: np.ndarray
    options: RequestOptions
    key: ResolvedKey
    sequences: list[_Path]
    tenant: str | None = None
    cache_priority: int = NORMAL


def _registered(number: int, session: str, prompt: np.ndarray) -> _RegisteredRequest:
    options = RequestOptions.of(session=session)
    return _RegisteredRequest(str(number), prompt, options, ResolvedKey(b"", None, 0), [_Path(prompt[:-1])])
