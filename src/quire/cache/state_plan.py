"""What a step does with the states of recurrent layers, beside its `StepPlan`: numbers only.

A state slot holds one state of every state layer. Before the step's rows, `operations` are done in order, whatever
becomes of the step; then the rows of sequence i go on from, and into, slot `slots[i]`; and the state after a row that
`checkpoints` names is written to that slot as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.protocol import GroupPlan, StepPlan, in_words_of
from quire.cache.types import Int32Array, Int64Array

__all__ = ["StatePlan", "StepPlanWithStates"]


@dataclass(frozen=True, eq=False)
class StatePlan:
    """slots: int64 [n], distinct. operations: (source slot, target slot), where `ZERO_STATE` as source is the state
    before any token. checkpoints: (row of the step, slot)."""

    slots: Int64Array
    operations: tuple[tuple[int, int], ...]
    checkpoints: tuple[tuple[int, int], ...]


@in_words_of(StepPlan)
class StepPlanWithStates:
    """A back end's plan, and what the step does with states."""

    def __init__(self, plan: StepPlan, states: StatePlan) -> None:
        self._plan = plan
        self.states = states

    @property
    def num_groups(self) -> int:
        return self._plan.num_groups

    def group(self, index: int) -> GroupPlan:
        return self._plan.group(index)

    @property
    def step(self) -> int:
        return self._plan.step

    @property
    def query_start(self) -> Int32Array:
        return self._plan.query_start

    @property
    def context_lengths(self) -> Int32Array:
        return self._plan.context_lengths

    @property
    def slot_mapping(self) -> Int64Array:
        return self._plan.slot_mapping

    @property
    def lookahead_slots(self) -> Int64Array:
        return self._plan.lookahead_slots

    @property
    def block_tables(self) -> Int32Array:
        return self._plan.block_tables

    @property
    def copies(self) -> Int32Array:
        return self._plan.copies
