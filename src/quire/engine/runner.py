"""`Runner`: prepares the storage for a `Batch`, makes the `ForwardStep` and runs the model.

Not a scheduler: the batch contains every decision. It checks nothing: the cache's plan is correct, and the kernels'
bindings check their arguments.
Cost: one attention batch per table of the storage and step, and the model's forward.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from quire.engine.launch_ahead import LaunchAhead
from quire.engine.profile import Profile
from quire.errors import CapacityError
from quire.memory.storage import Storage
from quire.step import AttentionBatch, Batch, ForwardStep, RecurrenceStep, StepRefusedError

__all__ = ["Runner"]


class Runner:
    """Runs steps of one prepared model over one storage.

    prepared: a `quire.model.prepare.PreparedModel`; the runner attaches it to `storage`.
    num_threads: of the attention kernels; torch's number if None. profile: the engine's. launch_ahead: takes and
    launches steps of decodes ahead; then `most_likely` of it reads the logits.
    """

    def __init__(
        self,
        prepared: Any,
        storage: Storage,
        *,
        num_threads: int | None = None,
        profile: Profile | None = None,
        launch_ahead: LaunchAhead | None = None,
    ) -> None:
        self._prepared = prepared
        self._storage = storage
        self._num_threads = num_threads
        self._profile = profile
        self._launch_ahead = launch_ahead
        self.prepare_seconds = 0.0  # total time of the preparation of the storage
        # Tokens per entry of each table, in the storage's present views. Without attention layers the only table is
        # unused, and its blocks are the cache's.
        self._table_tokens = [getattr(storage, "block_size", 1)] * storage.num_tables
        self._generation = -1
        prepared.attach(storage)
        if profile is not None:
            prepared.time_calls(profile.record)

    def run(self, batch: Batch[Any], /) -> torch.Tensor:
        """Computes the batch's tokens; [len(batch.logit_rows), vocab] in the model's dtype. *changes:* the storage.

        *raises:* StepRefusedError: the storage has no memory for the step; nothing was written.
        """
        plan, storage = batch.plan, self._storage
        began = time.perf_counter()
        if plan.states is not None and storage.states is not None:
            storage.states.apply(plan.states.operations)  # also if the step is refused
        if len(batch.closed_ids):
            storage.forget(batch.closed_ids)
        try:
            tables = storage.prepare(plan, batch.sequence_ids)
        except CapacityError as error:
            raise StepRefusedError from error
        if self._generation != storage.generation:
            self._generation = storage.generation
            for group in storage.spec.groups:
                for layer in group.layers:
                    self._table_tokens[storage.table_of(layer)] = storage.view(layer).block_size
        self.prepare_seconds += time.perf_counter() - began
        positions = torch.from_numpy(batch.positions)
        states: RecurrenceStep | None = None
        if plan.states is not None:
            starts, slots = plan.query_start.tolist(), plan.states.slots.tolist()
            states = RecurrenceStep(starts, slots, sorted(plan.states.checkpoints), positions)
        query_start = torch.from_numpy(plan.query_start)
        context_lengths = torch.from_numpy(plan.context_lengths)
        num_threads = self._num_threads or torch.get_num_threads()
        batches: list[AttentionBatch] = []
        slot_mappings: list[torch.Tensor] = []
        for (entries, slot_mapping), block_size in zip(tables, self._table_tokens, strict=True):
            block_tables = torch.from_numpy(entries)
            batches.append(
                AttentionBatch(
                    query_start,
                    context_lengths,
                    block_tables,
                    block_size,
                    num_threads,
                    len(batch.sequence_ids),
                    len(batch.positions),
                )
            )
            slot_mappings.append(torch.from_numpy(slot_mapping))
        step = ForwardStep(
            input_ids=torch.from_numpy(batch.input_ids),
            position_ids=positions,
            batches=tuple(batches),
            slot_mappings=tuple(slot_mappings),
            logits_rows=torch.from_numpy(batch.logit_rows),
            states=states,
        )
        if self._profile is not None:
            self._profile.lap("plan")
        if self._launch_ahead is not None:
            return self._launch_ahead.run(batch, step)
        return self._prepared.forward(step)
