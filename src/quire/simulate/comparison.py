"""Compares storages: each runs the same workload with the same memory, one after another.

With a model the real engine runs; without a model (`simulate`) the real scheduler, cache and storage, and a clock that
moves along a cost line. A storage refuses a request that it can never hold, and does not count it as done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.errors import CapacityError
from quire.sampling.params import SamplingParams
from quire.scheduler.request_validator import ServedModel
from quire.simulate.compared_storage import ComparedStorage
from quire.simulate.cost_line import CostLine
from quire.simulate.meter import Clock, Figures, Meter, SimulatedClock, SimulatedRunner
from quire.simulate.workload import Workload
from quire.spec import KVSpec

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = ["Comparison", "Run", "run_model", "run_simulated"]

_VOCAB_SIZE = 2**31 - 2  # of synthetic ids without a model


@dataclass(frozen=True)
class Comparison:
    """The settings that all storages of a comparison share.

    options: further options of `EngineConfig`, `reservation` and `growth`; an option of a single storage applies to
    that storage only.
    """

    workload: Workload
    kv_memory: int
    max_model_len: int
    options: Mapping[str, Any] = field(default_factory=dict)
    at_once: bool = True  # False: each at its time of arrival

    def storage(self, text: str) -> ComparedStorage:
        """A storage with these settings, given as a name or a name with its option: "growing:together:256"."""
        options = {"kv_memory": self.kv_memory, "max_model_len": self.max_model_len, **self.options}
        return ComparedStorage.parse(text, options)


@dataclass(frozen=True)
class Run:
    """One storage's figures, and its memory over time: seconds and bytes (reserved, used) of each step.

    errors: of the requests that failed, in the order in which they ended.
    """

    figures: Figures
    errors: list[str]
    times: list[float]
    reserved: list[int]
    used: list[int]


def run_simulated(comparison: Comparison, storage: str, spec: KVSpec, cost: CostLine) -> Run:
    """Run the real scheduler, cache and `storage`, with `cost` in place of a model; tokens/s are by its clock."""
    compared = comparison.storage(storage)
    config, opened = compared.config, compared.open(spec, comparison.max_model_len)
    try:
        clock = SimulatedClock()
        runner = SimulatedRunner(opened.storage, cost, clock)
        engine = Engine(
            EngineParts(runner, opened.cache),
            ServedModel(_VOCAB_SIZE, comparison.max_model_len),
            limits=StepLimits(
                config.max_batch_tokens,
                config.max_num_seqs,
                long_prefill_tokens=config.long_prompt_limit,
            ),
            clock=clock,
        )
        meter = Meter(opened.cache, runner)
        totals = _drive(engine, comparison, meter, clock, _VOCAB_SIZE)
        return _run(meter, totals, totals.num_generated / clock() if clock() else None)
    finally:
        opened.storage.close()


def run_model(comparison: Comparison, storage: str, open_llm: Callable[[EngineConfig], LLM]) -> Run:
    """Run the real engine with a model."""
    with comparison.storage(storage).registered() as config, open_llm(config) as llm:
        meter = Meter(llm.cache, llm.runner)
        clock = Clock()
        totals = _drive(llm.engine, comparison, meter, clock, llm.vocab_size)
        return _run(meter, totals, totals.num_generated / clock())


@dataclass
class _Totals:
    num_done: int = 0
    num_generated: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    errors: list[str] = field(default_factory=list)


def _drive(engine: Engine, comparison: Comparison, meter: Meter, clock: Clock, vocab_size: int) -> _Totals:
    """Submit the workload's requests as they arrive, and step until all have ended."""
    workload = comparison.workload
    waiting = deque(range(len(workload.requests)))
    totals = _Totals()
    while waiting or engine.has_work:
        while waiting and (comparison.at_once or workload.requests[waiting[0]].arrival_s <= clock()):
            index = waiting.popleft()
            params = SamplingParams(
                max_tokens=workload.requests[index].num_output_tokens,
                temperature=0,
                beam_width=1,
                ignore_eos=True,
            )
            try:
                engine.submit(workload.token_ids(index, vocab_size), params)
            except CapacityError as error:  # it can never fit into this storage
                totals.errors.append(str(error))
        if not engine.has_work:
            if waiting:
                clock.wait_until(workload.requests[waiting[0]].arrival_s)
            continue
        before = engine.scheduler.num_preemptions
        outputs = engine.step()
        totals.num_preemptions += engine.scheduler.num_preemptions - before
        num_ended = 0
        for output in outputs:
            num_ended += 1
            if output.error is None:
                totals.num_done += 1
                totals.num_generated += sum(len(completion.token_ids) for completion in output.outputs)
                totals.num_cached += output.num_cached_tokens
            else:
                totals.errors.append(str(output.error))
        meter.step(len(engine.scheduler.running) + num_ended, clock())
    return totals


def _run(meter: Meter, totals: _Totals, tokens_per_second: float | None) -> Run:
    figures = meter.figures(
        num_cached_tokens=totals.num_cached,
        preemptions=totals.num_preemptions,
        requests_done=totals.num_done,
        tokens_per_second=tokens_per_second,
    )
    reserved, used = ([getattr(use, name) for use in meter.uses] for name in ("reserved", "used"))
    return Run(figures, totals.errors, meter.times, reserved, used)
