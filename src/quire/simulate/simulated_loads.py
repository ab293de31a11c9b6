"""`SimulatedLoads`: loads from a `SimulatedStore` for a real scheduler, in the place of `offload.tier_load.TierLoads`.

A search is answered at once. A load takes the store's cost line, by the simulated clock; the sequence is LOADING
meanwhile, and others run. It loads if that takes less time than the tokens' computation.

Invariant: `changed.wait` moves the clock, to the end of a load or to `wait_limit_s`; no thread, no real time.

Cost: a search and a load O(blocks of the prompt).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from quire.cache.protocol import CacheSequence
from quire.offload.tier_load import LoadedSpan
from quire.scheduler.request import RequestSequence
from quire.simulate.cost_line import CostLine
from quire.simulate.meter import SimulatedClock
from quire.simulate.simulated_store import SimulatedStore
from quire.step import StepPlan

__all__ = ["SimulatedLoads"]

_TIER = "store"


class SimulatedLoads:
    """cost: of a step of `step_tokens` tokens. content_ids: the blocks of a request, by its id. commit: of the cache,
    for tokens that arrived. wait_limit_s: the time up to which the clock may move."""

    def __init__(
        self,
        store: SimulatedStore,
        cost: CostLine,
        clock: SimulatedClock,
        *,
        block_tokens: int,
        step_tokens: int,
        content_ids: Callable[[str], tuple[int, ...]],
        commit: Callable[[CacheSequence, int], None],
    ) -> None:
        self._store, self._clock = store, clock
        self._token_s = cost.prompt_token_s(step_tokens)
        self._block_tokens = block_tokens
        self._content_ids, self._commit = content_ids, commit
        self._loads: set[_Load] = set()
        self.loaded_tokens: Counter[str] = Counter()
        self.wait_limit_s = math.inf
        self.changed = self

    # -- the calls of `TierLoads` for the scheduler -------------------------------------------------------

    def search(self, sequence: RequestSequence, *, is_wanted: bool = False) -> None:
        ids = self._content_ids(sequence.request.request_id)
        sequence.search = _Search(ids, bool(ids) and ids[0] in self._store)  # type: ignore[assignment]

    def num_worth_loading(
        self, sequence: RequestSequence, num_in_memory: int, *, is_wanted: bool = False
    ) -> int:
        first = num_in_memory // self._block_tokens
        search: _Search = sequence.search  # type: ignore[assignment]
        num_blocks = self._store.count(search.content_ids, first)
        most = len(sequence.request.prompt_token_ids) - 1  # the last token is always computed
        stop = min(most, (first + num_blocks) * self._block_tokens)
        num_tokens = stop - num_in_memory
        if num_tokens <= 0 or self._store.cost.seconds(num_tokens, 0) >= num_tokens * self._token_s:
            return num_in_memory
        return stop

    def begin(
        self, sequence: RequestSequence, cache_sequence: CacheSequence, plan: StepPlan, num_tokens: int
    ) -> None:
        found = cache_sequence.num_computed_tokens
        seconds = self._store.cost.seconds(num_tokens - found, 0)
        load = _Load(self._clock, found, num_tokens, self._clock() + seconds)
        self._loads.add(load)
        sequence.load = load  # type: ignore[assignment]

    def finish(self, sequence: RequestSequence) -> list[LoadedSpan]:
        load: _Load = sequence.load  # type: ignore[assignment]
        self._loads.remove(load)
        sequence.load = sequence.search = None
        if not load.done:  # preempted
            sequence.num_computed = load.start
            return []
        self._commit(sequence.cache_sequence, load.stop)
        self.loaded_tokens[_TIER] += load.stop - load.start
        sequence.num_computed = load.stop
        return [LoadedSpan(load.start, load.stop, _TIER)]

    # -- `changed`, which an engine without any other work waits for ---------------------------------------

    def clear(self) -> None: ...

    def set(self) -> None: ...

    def wait(self, seconds: float) -> None:
        if ends := [load.ended_s for load in self._loads if not load.done]:
            self._clock.wait_until(min(self.wait_limit_s, *ends))


@dataclass(eq=False)
class _Search:
    """The fields of a search that the scheduler reads. stored: whether the store has the prompt's first block."""

    content_ids: tuple[int, ...]
    stored: bool
    is_seen: bool = True
    done: bool = True


@dataclass(eq=False)
class _Load:
    """Tokens start to stop, there at `ended_s`."""

    clock: SimulatedClock
    start: int
    stop: int
    ended_s: float

    @property
    def done(self) -> bool:
        return self.clock() >= self.ended_s
