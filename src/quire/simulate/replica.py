"""`Replica`: what a trace's replay and its routing need of a simulated engine. `ServedRequest`: a request after it ran.

`SimulatedReplica` computes one prompt after another. `EngineReplica` runs the engine's step loop.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.simulate.simulated_store import SimulatedStore
from quire.simulate.workload import TraceRequest

__all__ = ["Replica", "ServedRequest"]


class ServedRequest(NamedTuple):
    """A request after it ran. num_found_blocks: in memory. num_loaded_blocks: from the store, behind those.
    num_found_tokens, num_loaded_tokens, num_computed_tokens: of the prompt; at least one is computed. prefill_s: of the
    loads and the prompt's steps. first_token_s: since its arrival. step_s: of a decode step; None if an `EngineReplica`
    ran none for it."""

    replica: str
    num_found_blocks: int
    num_loaded_blocks: int
    num_found_tokens: int
    num_loaded_tokens: int
    num_computed_tokens: int
    prefill_s: float
    first_token_s: float
    step_s: float | None


class Replica(Protocol):
    """name: unique among the replicas. store: that it shares with others, or None. num_computed_tokens: of prompts."""

    name: str
    store: SimulatedStore | None
    num_computed_tokens: int

    def queue_s(self, now: float) -> float:
        """Seconds of the prompts that it has and that are not computed."""
        ...

    def match(self, request: TraceRequest) -> int:
        """Blocks of the prompt that its memory has. Changes nothing."""
        ...

    def block_ids(self) -> list[int]:
        """The trace's blocks in its memory."""
        ...

    def advance(self, until_s: float) -> None:
        """Moves its clock to the time, at least; a step that begins before it ends behind it."""
        ...

    def submit(self, number: int, request: TraceRequest) -> None:
        """Queues request `number` of the workload, which arrives now. Requests come in order of arrival."""
        ...

    def pop_served(self) -> list[tuple[int, ServedRequest | None]]:
        """The requests that ended since the last call, by number; None: it can never hold the request."""
        ...
