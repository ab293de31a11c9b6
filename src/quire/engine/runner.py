"""From a scheduled step to logits: copies blocks, builds the step's plans, runs the model.

Not a scheduler: every decision is in the step. Copies are done before anything is written (copy-on-write).
Cost: one attention plan per group and step, and the model's forward.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.attention import AttentionPlan
from quire.engine.profile import NoProfile, Profile
from quire.engine.scheduled_step import ScheduledStep
from quire.memory.paged import PagedStorage
from quire.model.step import ForwardStep

__all__ = ["Runner"]


class Runner:
    """Runs steps of one prepared model over one storage.

    prepared: a `quire.model.prepare.PreparedModel`; the runner attaches it to `storage`.
    num_threads: of the attention kernels; torch's number if None. profile: the engine's.
    """

    def __init__(
        self,
        prepared: Any,
        storage: PagedStorage,
        *,
        num_threads: int | None = None,
        profile: Profile | None = None,
    ) -> None:
        self._prepared = prepared
        self._storage = storage
        self._num_threads = num_threads
        self._profile = profile or NoProfile()
        prepared.attach(storage)
        if profile is not None:
            prepared.watch(profile.record)

    def run(self, step: ScheduledStep) -> torch.Tensor:
        """Computes the step's tokens; [len(step.logit_rows), vocab] in the model's dtype. *changes:* the storage."""
        plans: list[AttentionPlan] = []
        slot_mappings: list[torch.Tensor] = []
        for index in range(step.plan.num_groups):
            group = step.plan.group(index)
            if len(group.copies):
                self._storage.copy(group.copies, index)
            plans.append(
                AttentionPlan.build(
                    group.query_start,
                    group.context_lengths,
                    group.block_tables,
                    self._storage.block_size,
                    self._num_threads,
                )
            )
            slot_mappings.append(torch.from_numpy(group.slot_mapping))
        forward_step = ForwardStep(
            input_ids=torch.from_numpy(step.input_ids),
            position_ids=torch.from_numpy(step.positions),
            plans=tuple(plans),
            slot_mappings=tuple(slot_mappings),
            logits_rows=torch.from_numpy(step.logit_rows),
        )
        self._profile.lap("plan")
        return self._prepared.forward(forward_step)
