"""From a scheduled step to logits: has the storage prepared, builds the step's plans, runs the model.

Not a scheduler: every decision is in the step.
Cost: one attention plan per table of the storage and step, and the model's forward.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from quire.attention import AttentionPlan
from quire.cache.state_plan import StatePlan
from quire.engine.profile import NoProfile, Profile
from quire.errors import CapacityError
from quire.memory.storage import Storage
from quire.model.state.step import StateStep
from quire.model.step import ForwardStep
from quire.recurrence import RecurrenceStep
from quire.scheduler.step import ScheduledStep, StepRefusedError

__all__ = ["Runner"]


class Runner:
    """Runs steps of one prepared model over one storage.

    prepared: a `quire.model.prepare.PreparedModel`; the runner attaches it to `storage`.
    num_threads: of the attention kernels; torch's number if None. profile: the engine's.
    """

    def __init__(
        self,
        prepared: Any,
        storage: Storage,
        *,
        num_threads: int | None = None,
        profile: Profile | None = None,
    ) -> None:
        self._prepared = prepared
        self._storage = storage
        self._num_threads = num_threads
        self._states: Any = getattr(storage, "states", None)
        self._profile = profile or NoProfile()
        self.prepare_seconds = 0.0  # spent in having the storage prepared so far
        # What an entry of each table stands for: constant, as a view's shape but for the number of its blocks.
        # Where no layer attends, the one table leads nowhere, and blocks are the cache's.
        self._table_tokens = [getattr(storage, "block_size", 1)] * storage.num_tables
        for group in storage.spec.groups:
            for layer in group.layers:
                self._table_tokens[storage.table_of(layer)] = storage.view(layer).block_size
        prepared.attach(storage)
        if profile is not None:
            prepared.time_calls(profile.record)

    def run(self, step: ScheduledStep) -> torch.Tensor:
        """Computes the step's tokens; [len(step.logit_rows), vocab] in the model's dtype. *changes:* the storage.

        *raises:* StepRefusedError: the storage has no memory for it; nothing was written.
        """
        plans: list[AttentionPlan] = []
        slot_mappings: list[torch.Tensor] = []
        began = time.perf_counter()
        states: StatePlan | None = getattr(step.plan, "states", None)
        if states is not None:
            self._states.apply(states.operations)  # whatever becomes of the step
        self._storage.forget(step.closed_ids)
        try:
            placements = self._storage.prepare(step.plan, step.sequence_ids)
        except CapacityError as error:
            raise StepRefusedError from error
        self.prepare_seconds += time.perf_counter() - began
        for table, placement in enumerate(placements):
            plans.append(
                AttentionPlan.build(
                    step.plan.query_start,
                    step.plan.context_lengths,
                    placement.block_tables,
                    self._table_tokens[table],
                    self._num_threads,
                )
            )
            slot_mappings.append(torch.from_numpy(placement.slot_mapping))
        forward_step = ForwardStep(
            input_ids=torch.from_numpy(step.input_ids),
            position_ids=torch.from_numpy(step.positions),
            plans=tuple(plans),
            slot_mappings=tuple(slot_mappings),
            logits_rows=torch.from_numpy(step.logit_rows),
            states=None if states is None else _state_step(step, states),
        )
        self._profile.lap("plan")
        return self._prepared.forward(forward_step)


def _state_step(step: ScheduledStep, states: StatePlan) -> StateStep:
    recurrence = RecurrenceStep(step.plan.query_start.tolist(), states.slots.tolist(), states.checkpoints)
    return StateStep(recurrence, torch.from_numpy(step.positions))
