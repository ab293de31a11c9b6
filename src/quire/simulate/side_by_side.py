"""Runs the storages side by side, step by step; every added request goes to each of them.

As in `comparison.run_simulated`: the real scheduler, cache and storage, and a clock that moves along a cost line in
place of a model. The pool is small (`MEMORY_TOKENS` tokens), so that it visibly fills. All figures come from the real
cache, not from formulas.

Not thread-safe. Cost: a step some 0.3 ms a storage; `state` O(blocks + open sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.baselines.row_cache import RowCache
from quire.cache.block_map import CACHED, IN_FLIGHT
from quire.config import STORAGES, EngineConfig
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.errors import ArgumentError, CapacityError, QuireError
from quire.sampling.params import SamplingParams
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import ServedModel
from quire.simulate.compared_storage import ComparedStorage
from quire.simulate.cost_line import CostLine
from quire.simulate.meter import SimulatedClock, SimulatedRunner
from quire.spec import KVSpec, LayerSpec, Span

__all__ = ["MAX_MODEL_LEN", "MEMORY_TOKENS", "NUM_CELLS", "ComparedRequest", "SideBySide"]

MAX_MODEL_LEN = 512
MEMORY_TOKENS = 8 * MAX_MODEL_LEN
NUM_CELLS = 256  # of a storage's map: 16 tokens each
FREE_CELL, CACHED_CELL, IN_FLIGHT_CELL = -1, -2, -3  # owners of cells without a request

_MAX_NUM_SEQS = 64
_MAX_BATCH_TOKENS = 512
_VOCAB_SIZE = 1 << 20
# Two layers of one head of 32: 512 bytes a token, and pages of 4 KiB that hold 32 tokens of a layer's keys.
_SPEC = KVSpec(layers=(LayerSpec(Span(), 1, 32, 32),) * 2, dtype="float32")


@dataclass(frozen=True)
class ComparedRequest:
    """A request: tokens of its prompt and of its output, and the number of prompt tokens that all requests share."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_shared_tokens <= self.num_prompt_tokens or self.num_output_tokens < 1:
            raise ArgumentError(f"expected shared tokens within the prompt, and some output, got {self}")

    def tokens(self, number: int) -> NDArray[np.int32]:
        """Token ids; the ids behind the shared ones are unique to the request."""
        shared = np.arange(1, self.num_shared_tokens + 1, dtype=np.int32)
        own = np.random.default_rng(number).integers(
            1024, _VOCAB_SIZE, self.num_prompt_tokens - self.num_shared_tokens, dtype=np.int32
        )
        return np.concatenate([shared, own])


class _Side:
    """A storage with an engine of its own."""

    def __init__(self, name: str, block_size: int, reservation: str) -> None:
        config = EngineConfig(
            storage={"virtual": "virtual:4KiB"}.get(name, name),
            kv_memory=MEMORY_TOKENS * _SPEC.bytes_per_token,
            block_size=block_size,
            max_num_seqs=_MAX_NUM_SEQS,
        )
        opened = ComparedStorage(config, reservation).open(_SPEC, MAX_MODEL_LEN)
        self.name = name
        self.storage, self.cache = opened.storage, opened.cache
        self.clock = SimulatedClock()
        self.engine = Engine(
            EngineParts(SimulatedRunner(self.storage, CostLine(), self.clock), self.cache),
            ServedModel(_VOCAB_SIZE, MAX_MODEL_LEN),
            limits=StepLimits(_MAX_BATCH_TOKENS, _MAX_NUM_SEQS),
            clock=self.clock,
        )
        self.num_refused = self.num_done = 0
        self.num_running_sum = self.num_steps = 0

    def add(self, number: int, request: ComparedRequest) -> None:
        params = SamplingParams(
            max_tokens=request.num_output_tokens, temperature=0, beam_width=1, ignore_eos=True
        )
        try:
            self.engine.submit(request.tokens(number), RequestOptions(params, request_id=str(number)))
        except (CapacityError, ArgumentError):
            self.num_refused += 1  # it can never fit into this storage

    def step(self) -> None:
        if not self.engine.has_work:
            return
        for output in self.engine.step():
            self.num_done += output.error is None
        self.num_steps += 1
        self.num_running_sum += len(self.engine.scheduler.running)

    def finish(self, number: int) -> None:
        output = self.engine.abort(str(number))
        if output is not None:
            self.num_done += 1

    def state(self) -> dict[str, Any]:
        use, scheduler, stats = self.cache.memory_use(), self.engine.scheduler, self.engine.stats()
        owners, fills = self._cells()
        return {
            "name": self.name,
            "missing": None,
            "owners": owners.tolist(),
            "fills": fills.tolist(),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "done": self.num_done,
            "refused": self.num_refused,
            "preemptions": scheduler.num_preemptions,
            "running_mean": round(self.num_running_sum / self.num_steps, 1) if self.num_steps else 0.0,
            "reserved": use.reserved,
            "used": use.used,
            "cached": use.cached,
            "external": use.external,
            "total": use.total,
            "waste_share": round(use.waste_share, 4),
            "generated": stats["num_generated_tokens"],
            "prefix_tokens": stats["num_cached_tokens"],
            "seconds": round(self.clock.now, 3),
            "requests": [int(sequence.request.request_id) for sequence in scheduler.running],
        }

    def _cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each cell the request that has most of it, or FREE_CELL and the like, and the percentage computed."""
        owners, filled = self._owners_and_shares()
        cells = np.arange(NUM_CELLS)
        starts = cells * len(owners) // NUM_CELLS
        stops = np.maximum(starts + 1, (cells + 1) * len(owners) // NUM_CELLS)
        owner = np.empty(NUM_CELLS, np.int64)
        fill = np.empty(NUM_CELLS, np.int64)
        for cell, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            inside = owners[start:stop]
            names, counts = np.unique(inside, return_counts=True)
            owner[cell] = names[counts.argmax()]
            fill[cell] = round(100 * float(filled[start:stop].mean()))
        return owner, fill

    def _owners_and_shares(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The owner and the computed share of every block."""
        cache = self.cache
        requests = {s.cache_sequence.id: int(s.request.request_id) for s in self.engine.scheduler.running}
        block_ids = cache.block_map()
        owners = np.full(len(block_ids.states), FREE_CELL, np.int64)
        filled = np.zeros(len(block_ids.states))
        owners[block_ids.states == CACHED], filled[block_ids.states == CACHED] = CACHED_CELL, 1.0
        owners[block_ids.states == IN_FLIGHT] = IN_FLIGHT_CELL
        if isinstance(cache, RowCache):
            for sequence_id, start, count in cache.spans():
                if sequence_id in requests:
                    owners[start : start + count] = requests[sequence_id]
                    done = cache.computed_share(sequence_id) * count
                    filled[start : start + count] = np.clip(done - np.arange(count), 0, 1)
            return owners, filled
        for sequence in self.engine.scheduler.running:
            table = sequence.cache_sequence.block_table()
            number = requests[sequence.cache_sequence.id]
            # A shared block is shown with the first of its requests.
            owners[table] = np.where(owners[table] >= 0, owners[table], number)
            share = np.clip(sequence.num_computed / cache.block_size - np.arange(len(table)), 0, 1)
            filled[table] = np.maximum(filled[table], share)
        return owners, filled

    def close(self) -> None:
        self.engine.abort_all()
        self.storage.close()


class SideBySide:
    """All storages that this machine supports, each with the same memory and the same requests.

    block_size: of paged. reservation: of contiguous, "max", "pow2" or "exact".
    """

    def __init__(
        self, names: Sequence[str] = STORAGES, *, block_size: int = 16, reservation: str = "max"
    ) -> None:
        self.block_size, self.reservation = block_size, reservation
        self._sides: list[_Side] = []
        self._missing: dict[str, str] = {}
        self._names = tuple(names)
        self._num_requests = 0
        self.num_steps = 0
        for name in self._names:
            try:
                self._sides.append(_Side(name, block_size, reservation))
            except (
                QuireError
            ) as error:  # this machine does not support it: report it and continue with the others
                self._missing[name] = str(error)

    def add(self, request: ComparedRequest) -> int:
        """Submit the request to every storage. Returns its number."""
        number = self._num_requests
        self._num_requests += 1
        for side in self._sides:
            side.add(number, request)
        return number

    def finish(self, number: int) -> None:
        """End a request in every storage in which it still runs or waits."""
        for side in self._sides:
            side.finish(number)

    def finish_all(self) -> None:
        for side in self._sides:
            for name in list(side.engine.scheduler.requests):
                side.finish(int(name))

    @property
    def num_open(self) -> int:
        """Maximum number of open requests over the storages."""
        return max((len(side.engine.scheduler.requests) for side in self._sides), default=0)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.num_steps += 1
            for side in self._sides:
                side.step()

    def state(self) -> dict[str, Any]:
        """{"steps", "asked", "open", "block_size", "reservation", "storages": one entry each, with the reason in
        "missing" if the machine does not support it}"""
        states = {side.name: side.state() for side in self._sides}
        missing = {name: {"name": name, "missing": reason} for name, reason in self._missing.items()}
        return {
            "steps": self.num_steps,
            "asked": self._num_requests,
            "open": self.num_open,
            "block_size": self.block_size,
            "reservation": self.reservation,
            "storages": [(states | missing)[name] for name in self._names],
        }

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._sides = []
