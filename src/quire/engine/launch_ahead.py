"""`LaunchAhead`: the step after a batch of decodes is launched before the host reads that batch's tokens.

The tokens of step n stay on the device. The rows of step n + 1 are the same sequences, one position further, in the
lookahead slots of step n's plan; so the device computes while the host reads step n, detokenizes and schedules. A row
of the next batch with the same token, position and slot has its logits already and is not computed again. Other rows of
the batch (a sequence that has joined, a prompt's chunk) run by themselves. Rows that no batch takes, of a sequence that
has ended or was preempted, are thrown away: at most one step.

Only for plain greedy requests (`Request.is_plain`), a paged storage, no state layers, and a device whose calls return
before it has computed (`Device.read_later`). The scheduler decides nothing else than without.

Invariants
    L1  a row launched ahead writes to its lookahead slot alone, which is its sequence's own or, once the sequence has
        ended, free. Work that gets this slot later is launched later, on the device's one stream. So nothing is undone.
    L2  a row is taken by the same sequence, token, position and slot, over the same views. Its cached tokens are those
        that it has read: a block that another one with the same content replaces meanwhile is not written before.
    L3  logits that `run` returns are valid until `most_likely`, which launches the next step.

Cost: for each step one copy of two numbers for each row, one wait for it, and O(rows) numpy. A row thrown away cost its
part of one step on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.memory.paged import PagedStorage
from quire.memory.storage import Storage
from quire.sampling.greedy import likeliest, most_likely, tokens_and_logits
from quire.step import Batch, ForwardStep, Int64Array, StepPlan

if TYPE_CHECKING:
    from quire.model.prepare import PreparedModel

__all__ = ["LaunchAhead", "launch_ahead_of"]

_log = logging.getLogger("quire")

ReadLater = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


class _Drawn:
    """The most likely token of each row of logits: `token_ids` on the device, int64, and a copy under way to the host.

    rows: of this step among those of the copy; None for all in order.
    """

    def __init__(
        self, token_ids: torch.Tensor, read: Callable[[], torch.Tensor], rows: Int64Array | None = None
    ) -> None:
        self.token_ids, self._read, self._rows = token_ids, read, rows

    @classmethod
    def of(cls, logits: torch.Tensor, read_later: ReadLater) -> _Drawn:
        found = likeliest(logits)
        return cls(found[0].long(), read_later(found))

    def take(self, rows: Int64Array, rows_on_device: torch.Tensor) -> _Drawn:
        return _Drawn(self.token_ids[rows_on_device], self._read, rows)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copy: tokens and logits as of `most_likely`."""
        tokens, best = tokens_and_logits(self._read())
        return (tokens, best) if self._rows is None else (tokens[self._rows], best[self._rows])


@dataclass(eq=False)
class _Launched:
    """A step of decodes that the device was given ahead. input_ids: on the host. generation: of the storage's views."""

    sequence_ids: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    slots: list[Int64Array]
    generation: int
    logits: torch.Tensor
    drawn: _Drawn

    def rows_of(self, batch: Batch[Any], generation: int) -> Int64Array:
        """int64 [n]: the row of each sequence of `batch`, -1 if it is not the one that the batch computes."""
        num = len(batch.sequence_ids)
        if generation != self.generation or batch.plan.states is not None:
            return np.full(num, -1)
        if np.array_equal(batch.sequence_ids, self.sequence_ids):
            rows = np.arange(num)
        else:
            order = np.argsort(self.sequence_ids)
            found = np.searchsorted(self.sequence_ids, batch.sequence_ids, sorter=order)
            rows = order[np.minimum(found, len(order) - 1)]
        first = batch.plan.query_start[:-1]
        same = (batch.num_new_tokens == 1) & (self.sequence_ids[rows] == batch.sequence_ids)
        same &= batch.input_ids[first] == self.input_ids[rows]
        same &= batch.positions[first] == self.positions[rows]
        for group, slots in zip(batch.plan.groups, self.slots, strict=True):
            same &= group.slot_mapping[first] == slots[rows]
        return np.where(same, rows, -1)


@dataclass(eq=False)
class _Computed:
    """The step that `run` returned the logits of. may_be_followed: by a launch ahead."""

    batch: Batch[Any]
    step: ForwardStep
    logits: torch.Tensor
    drawn: _Drawn
    may_be_followed: bool


class LaunchAhead:
    """The steps of one runner. forward: computes a step in host memory, whose token ids may be on the device.

    read_later, to_device: the device's. generation: of the storage, now. num_launches: steps launched ahead;
    num_rows_launched, num_rows_taken: their rows, and those that batches took.
    """

    def __init__(
        self,
        forward: Callable[[ForwardStep], torch.Tensor],
        read_later: ReadLater,
        to_device: Callable[[torch.Tensor], torch.Tensor],
        generation: Callable[[], int],
    ) -> None:
        self._forward, self._read_later, self._to_device = forward, read_later, to_device
        self._generation = generation
        self._computed: _Computed | None = None
        self._launched: _Launched | None = None
        self.num_launches = self.num_rows_launched = self.num_rows_taken = 0

    def run(self, batch: Batch[Any], step: ForwardStep) -> torch.Tensor:
        """The logits of a batch, `step` being the same in host memory; rows launched ahead are not computed again."""
        launched, self._launched, self._computed = self._launched, None, None
        logits, drawn = None, None
        if launched is not None:
            rows = launched.rows_of(batch, self._generation())
            num_taken = int(np.count_nonzero(rows >= 0))
            self.num_rows_taken += num_taken
            if num_taken == len(rows):
                logits, drawn = self._take_all(launched, rows)
            elif num_taken:
                logits = self._take_some(launched, rows, step)
        if logits is None:
            logits = self._forward(step)
        may_be_followed = batch.is_decode and len(batch.plan.lookahead_slots) == len(batch.sequences)
        if may_be_followed or drawn is not None:
            drawn = drawn or _Drawn.of(logits, self._read_later)
            self._computed = _Computed(batch, step, logits, drawn, may_be_followed)
        return logits

    def most_likely(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """`quire.sampling.greedy.most_likely`; of the logits of the last `run`, with the launch of the next step."""
        computed, self._computed = self._computed, None
        if computed is None or computed.logits is not logits:
            return most_likely(logits)
        launched = self._launch(computed) if computed.may_be_followed else None
        tokens, best = computed.drawn.read()
        if launched is not None:
            launched.input_ids = tokens
        self._launched = launched
        return tokens, best

    def close(self) -> None:
        """Drop the tensors of the device."""
        self._computed = self._launched = None

    def _take_all(self, launched: _Launched, rows: Int64Array) -> tuple[torch.Tensor, _Drawn]:
        if np.array_equal(rows, np.arange(len(launched.sequence_ids))):
            return launched.logits, launched.drawn
        on_device = self._to_device(torch.from_numpy(rows))
        return launched.logits[on_device], launched.drawn.take(rows, on_device)

    def _take_some(self, launched: _Launched, rows: Int64Array, step: ForwardStep) -> torch.Tensor:
        """The step's logits: of the sequences with a row those launched ahead, of the others computed now."""
        rest = rows < 0
        starts, logits_rows = step.batches[0].query_start.numpy(), step.logits_rows.numpy()
        # The sequence of each row of logits, and the row of its logits in (launched, computed).
        sequences = np.searchsorted(starts, logits_rows, side="right") - 1
        computed_now = rest[sequences]
        places = rows[sequences] + 0
        places[computed_now] = len(launched.sequence_ids) + np.arange(np.count_nonzero(computed_now))
        taken = launched.logits.clone()  # the next forward may overwrite them
        logits = torch.cat([taken, self._forward(_part_of(step, rest))])
        return logits[self._to_device(torch.from_numpy(places))]

    def _launch(self, computed: _Computed) -> _Launched | None:
        """Launch the step after `computed`; None if that fails: the step then runs in its turn, and meets the error."""
        batch, generation = computed.batch, self._generation()
        try:
            logits = self._forward(_following(computed.step, batch.plan, computed.drawn.token_ids))
            drawn = _Drawn.of(logits, self._read_later)
        except Exception as error:
            _log.info("a step was not launched ahead: %s", " ".join(str(error).split())[:200])
            return None
        self.num_launches += 1
        self.num_rows_launched += len(batch.sequences)
        slots = [group.lookahead_slots for group in batch.plan.groups]
        return _Launched(
            batch.sequence_ids, batch.input_ids, batch.positions + 1, slots, generation, logits, drawn
        )


def launch_ahead_of(prepared: PreparedModel, storage: Storage) -> LaunchAhead | None:
    """For the runner of `prepared` on `storage`; None where no step can be launched ahead."""
    device = prepared.device
    if device.read_later is None or prepared.by_own_forward:
        return None
    if not isinstance(storage, PagedStorage) or storage.states is not None:
        return None
    return LaunchAhead(prepared.forward, device.read_later, device.to_device, lambda: storage.generation)


def _following(step: ForwardStep, plan: StepPlan, token_ids: torch.Tensor) -> ForwardStep:
    """The step of the same sequences one position further, in the lookahead slots of the plan of a paged storage."""
    batches = (replace(batch, context_lengths=batch.context_lengths + 1) for batch in step.batches)
    slots = (torch.from_numpy(group.lookahead_slots) for group in plan.groups)
    return replace(
        step,
        input_ids=token_ids,
        position_ids=step.position_ids + 1,
        batches=tuple(batches),
        slot_mappings=tuple(slots),
    )


def _part_of(step: ForwardStep, chosen: np.ndarray) -> ForwardStep:
    """The step of some of its sequences. chosen: bool [n]."""
    starts = step.batches[0].query_start.numpy()
    counts = np.diff(starts)
    row_is_chosen = np.repeat(chosen, counts)
    rows = torch.from_numpy(np.flatnonzero(row_is_chosen))
    query_start = np.zeros(np.count_nonzero(chosen) + 1, np.int32)
    np.cumsum(counts[chosen], out=query_start[1:])
    logits_rows = step.logits_rows.numpy()
    new_rows = (np.cumsum(row_is_chosen) - 1)[logits_rows[row_is_chosen[logits_rows]]]
    sequences = torch.from_numpy(np.flatnonzero(chosen))
    batches = (
        replace(
            batch,
            query_start=torch.from_numpy(query_start),
            context_lengths=batch.context_lengths[sequences],
            block_tables=batch.block_tables[sequences],
            num_sequences=len(sequences),
            num_tokens=len(rows),
        )
        for batch in step.batches
    )
    return replace(
        step,
        input_ids=step.input_ids[rows],
        position_ids=step.position_ids[rows],
        batches=tuple(batches),
        slot_mappings=tuple(slots[rows] for slots in step.slot_mappings),
        logits_rows=torch.from_numpy(new_rows),
    )
