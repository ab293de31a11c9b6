"""One step in three types, each made by one part and read by the next. Data alone.

    StepPlan      granted by the cache: where new tokens go, and which blocks are read (`KVCache.reserve`)
    Batch         chosen by the scheduler: which tokens of which sequences, with that plan (`Scheduler.schedule`)
    ForwardStep   computed by the model: the same as tensors, with the tables of the storage (`Runner.run`)

A `StepPlan` has a `GroupPlan` for each group of layers and a `StatePlan`, a `ForwardStep` an `AttentionBatch` for each
table and a `RecurrenceStep`. n sequences have T new tokens, which are the rows of the step: sequence after sequence,
each in the order of its text.

Invariants
    S1  rows query_start[i] .. query_start[i + 1] - 1 are sequence i's new tokens, at least one; the last of them has
        position context_lengths[i] - 1.
    S2  a step does not change once it was handed on; later calls of the cache do not affect it.
    S3  a state slot is written for one reason in a step: slots and the slots of checkpoints are all distinct.

These types check nothing: the maker of a step is responsible for it. `quire.attention.attention_batch` and
`quire.recurrence.recurrence_step` are checked constructors for callers who use those parts alone.
Cost: none; the types only hold arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the cache and its plans run without torch
    import torch

__all__ = [
    "AttentionBatch",
    "Batch",
    "ForwardStep",
    "GroupPlan",
    "Int32Array",
    "Int64Array",
    "NativePlan",
    "RecurrenceStep",
    "StatePlan",
    "StepCache",
    "StepPlan",
    "StepRefusedError",
    "StepSequence",
]

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]


class StepRefusedError(Exception):
    """The storage has no memory for a step now: nothing was computed or written. Its cause is the CapacityError."""


# From the cache


class GroupPlan(Protocol):
    """One group's part of a step. Immutable: later calls on the cache do not show in it."""

    @property
    def step(self) -> int:
        """Number of the step: 1 for a cache's first successful `reserve`, then 2, ..."""
        ...

    @property
    def query_start(self) -> Int32Array:
        """int32 [n + 1]: the new tokens of sequence i are rows query_start[i] .. query_start[i + 1] - 1."""
        ...

    @property
    def context_lengths(self) -> Int32Array:
        """int32 [n]: each sequence's length once the step's new tokens are in; lookahead not counted."""
        ...

    @property
    def slot_mapping(self) -> Int64Array:
        """int64 [query_start[n]]: block * size + offset of each new token, sequences in order. -1 only in the
        plan of a `restore`, which no step computes: behind a window."""
        ...

    @property
    def lookahead_slots(self) -> Int64Array:
        """int64 [n * num_lookahead]: block * size + offset of each lookahead position, which follow the
        new tokens; those of sequence i are at i * num_lookahead .. (i + 1) * num_lookahead - 1."""
        ...

    @property
    def block_tables(self) -> Int32Array:
        """int32 [n, widest], made when asked for. Row i has ceil((context_lengths[i] + num_lookahead) /
        size) entries, then -1; -1 also where a block behind a window has been given up."""
        ...

    @property
    def copies(self) -> Int32Array:
        """int32 [m, 3] (source block, destination block, tokens): to be done before the step writes."""
        ...


@dataclass(frozen=True, eq=False)
class StatePlan:
    """A step's work on the states of recurrent layers. A state slot holds one state of every such layer.

    operations: (source slot, target slot), done in order before the step's rows, even if the step then fails;
    `ZERO_STATE` as source is the state before any token. slots: int64 [n], distinct: the rows of sequence i start from
    slot slots[i] and update it. checkpoints: (row of the step, slot): the state after that row is written there as
    well.
    """

    slots: Int64Array
    operations: tuple[tuple[int, int], ...]
    checkpoints: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class StepPlan:
    """The grant of a `reserve`. It has the arrays of group 0 under their own names.

    groups: of the cache, in order. states: of a model with state layers.
    """

    groups: Sequence[GroupPlan]
    states: StatePlan | None = None

    @property
    def step(self) -> int:
        """See `GroupPlan.step`."""
        return self.groups[0].step

    @property
    def query_start(self) -> Int32Array:
        """See `GroupPlan.query_start`: int32 [n + 1]."""
        return self.groups[0].query_start

    @property
    def context_lengths(self) -> Int32Array:
        """See `GroupPlan.context_lengths`: int32 [n]."""
        return self.groups[0].context_lengths

    @property
    def num_groups(self) -> int:
        """Groups of the cache, g."""
        return len(self.groups)

    def group(self, index: int) -> GroupPlan:
        """The same arrays for group `index`; IndexError beyond the last group."""
        if not 0 <= index < len(self.groups):
            raise IndexError(f"expected a group of 0 .. {len(self.groups) - 1}, got {index} in plan.group")
        return self.groups[index]

    @property
    def slot_mapping(self) -> Int64Array:
        """See `GroupPlan.slot_mapping`: int64 [query_start[n]]."""
        return self.groups[0].slot_mapping

    @property
    def lookahead_slots(self) -> Int64Array:
        """See `GroupPlan.lookahead_slots`: int64 [n * num_lookahead]."""
        return self.groups[0].lookahead_slots

    @property
    def block_tables(self) -> Int32Array:
        """See `GroupPlan.block_tables`: int32 [n, widest]."""
        return self.groups[0].block_tables

    @property
    def copies(self) -> Int32Array:
        """See `GroupPlan.copies`: int32 [m, 3]."""
        return self.groups[0].copies


class NativePlan(GroupPlan, Protocol):
    """`quire._native.StepPlan`."""

    @property
    def num_groups(self) -> int: ...
    def group(self, index: int) -> GroupPlan: ...


# From the scheduler


class StepSequence(Protocol):
    """The fields of a scheduler's sequence that a step uses; `quire.scheduler.request.RequestSequence` has them."""

    num_tokens: int
    num_computed: int
    last_token: int


Chosen = TypeVar("Chosen", bound=StepSequence)


@dataclass(slots=True, eq=False)
class Batch(Generic[Chosen]):
    """One forward: `sequences[i]` computes its next `num_new_tokens[i]` tokens.

    sequence_ids: int64 [n], their cache sequences. num_new_tokens: int64 [n]. input_ids, positions: int64 [T].
    logit_rows: int64 [R], the rows whose logits are wanted. sampled: the sequences that draw a token; if every sequence
    computes its newest token and draws the next one, it is the list `sequences` itself. draw_rows: int64
    [len(sampled)], the index among the first `num_draw_rows` of the R rows from which each draws. The others are
    `scored`: (sequence, its positions that score the next token of its prompt), in order. completed: the sequences that
    end with this step and draw nothing. drafts: the draft tokens of decodes that have some, as further rows of theirs:
    the row of logits behind the j-th draft is j rows after the sequence's own.
    plan: the cache's, its sequences in the order of `sequences`.
    closed_ids: int64, cache sequences that were closed since the step before.
    """

    sequences: list[Chosen]
    sequence_ids: Int64Array
    num_new_tokens: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    logit_rows: Int64Array
    sampled: list[Chosen]
    draw_rows: Int64Array
    plan: StepPlan
    closed_ids: Int64Array
    num_draw_rows: int = 0
    scored: Sequence[tuple[Chosen, range]] = ()
    completed: Sequence[Chosen] = ()
    drafts: Mapping[Chosen, Sequence[int]] = field(default_factory=dict)

    @property
    def copying(self) -> list[Chosen]:
        """The sequences with a copy in this step's plan: if the step is undone, they cannot continue unchanged."""
        copying = np.zeros(len(self.sequences), bool)
        for group in self.plan.groups:
            if len(group.copies):
                copying |= np.isin(group.block_tables, group.copies[:, 1]).any(axis=1)
        return [self.sequences[at] for at in np.flatnonzero(copying).tolist()]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes its newest token and draws one: a batch of decodes alone."""
        return self.sampled is self.sequences

    @property
    def is_prompt(self) -> bool:
        """Whether some sequence computes more than its newest token and its drafts."""
        return len(self.input_ids) > len(self.sequences) + sum(map(len, self.drafts.values()))


# For the model


class StepCache(Protocol):
    """The memory of a forward; `quire.model.paged_cache.PagedCache`. generation: changes with its views. compiled: data
    of a device over those views; dropped when the cache is closed."""

    generation: int
    compiled: Any


@dataclass(eq=False)
class AttentionBatch:
    """Which rows read which blocks, through one table: the attention's part of a step, for all layers of the table.

    Contiguous int32 in host memory. query_start: [n + 1]. context_lengths: [n]. block_tables: [n, widest], the blocks
    of each sequence's positions in order; -1 beyond its end and where a window has given blocks back. block_size:
    tokens of a block. num_threads: threads a kernel may use. native_handle: the same in the kernels' form, from their
    first call on.
    """

    query_start: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    num_threads: int
    num_sequences: int
    num_tokens: int
    native_handle: Any = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class RecurrenceStep:
    """Rows and state slot of each sequence, and the targets of state copies: the recurrences' part of a step, for all
    state layers.

    starts: [n + 1], rising from 0: where the rows of each sequence begin. slots: [n], the index of each sequence's
    state in the state tensor, read and updated in place. checkpoints: pairs (row, slot), sorted: after that row's token
    the state of its sequence is also written to that slot. positions: int64 [T] of each row in its text; a row at
    position 0 begins a text: its sequence's slot holds zeros then (some mixers treat that row specially). A recurrence
    by itself needs no positions. native_handle: the same in the kernels' form, from their first call on.
    """

    starts: Sequence[int]
    slots: Sequence[int]
    checkpoints: Sequence[tuple[int, int]] = ()
    positions: torch.Tensor | None = None
    native_handle: Any = field(init=False, default=None)
    _at_row: dict[int, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for row, slot in self.checkpoints:
            self._at_row.setdefault(row, []).append(slot)

    def on_device(self, to_device: Callable[[torch.Tensor], torch.Tensor]) -> RecurrenceStep:
        """The step with its positions on the device of the model's modules."""
        return self if self.positions is None else replace(self, positions=to_device(self.positions))

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def written_slots(self) -> tuple[int, ...]:
        """All slots that a call writes."""
        return (*self.slots, *(slot for _, slot in self.checkpoints))

    @property
    def begins_text(self) -> torch.Tensor:
        """bool [T]: whether a row is the first of its text."""
        assert self.positions is not None  # as in every step of a model
        return self.positions == 0

    def sequences(self) -> Iterator[tuple[int, range]]:
        """Each sequence's slot and rows."""
        for slot, start, stop in zip(self.slots, self.starts, self.starts[1:], strict=False):
            yield slot, range(start, stop)

    def checkpoints_after(self, row: int) -> list[int]:
        """The slots, in addition to the sequence's own, that the state after `row` is written to."""
        return self._at_row.get(row, [])


@dataclass(eq=False)
class ForwardStep:
    """One step's input of the model.

    input_ids, position_ids: int64 [T]. batches: the attention's input, for each table of the storage. slot_mappings:
    int64 [T] for each table, where each row's K and V go. logits_rows: int64 [R], the rows whose next-token logits are
    wanted. states: the state layers' input, for a model with such layers.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    batches: tuple[AttentionBatch, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    logits_rows: torch.Tensor
    states: RecurrenceStep | None = None

    def on_device(self, to_device: Callable[[torch.Tensor], torch.Tensor]) -> ForwardStep:
        """The step with its tensors on the device of the model's modules; the attention moves its batches itself."""
        return replace(
            self,
            input_ids=to_device(self.input_ids),
            position_ids=to_device(self.position_ids),
            slot_mappings=tuple(map(to_device, self.slot_mappings)),
            logits_rows=to_device(self.logits_rows),
            states=None if self.states is None else self.states.on_device(to_device),
        )
