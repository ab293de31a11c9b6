"""Which rows of a step belong to which sequence, in which slot its state is, and where states are copied to.

Not the states, nor what a layer computes: one `RecurrenceStep` serves all state layers of an engine step.

    S1  The rows of sequence s are starts[s] to starts[s + 1] - 1: at least one each, none between.
    S2  A slot is written for one reason in a call: slots and the slots of checkpoints are all distinct.

Cost: a pass over the lists when it is made; nothing afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from quire.errors import ArgumentError

__all__ = ["RecurrenceStep"]


class RecurrenceStep:
    """The rows, slots and checkpoints of one call; it does not change.

    Args:
        starts: [num_sequences + 1], rising from 0: where the rows of each sequence begin.
        slots: [num_sequences]: which state of the state tensor is a sequence's. Read and updated in place.
        checkpoints: pairs (row, slot): after that row's token the state of its sequence is also written to that slot.

    Raises:
        ArgumentError: rows that do not rise from 0, slots that are not distinct, a checkpoint at a row that is none.
    """

    __slots__ = ("_at_row", "checkpoints", "native_handle", "slots", "starts")

    def __init__(
        self,
        starts: Iterable[int] | torch.Tensor,
        slots: Iterable[int] | torch.Tensor,
        checkpoints: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.starts = _whole_numbers("starts", starts)
        self.slots = _whole_numbers("slots", slots)
        pairs = [_whole_numbers("a checkpoint", pair) for pair in checkpoints]
        if any(len(pair) != 2 for pair in pairs):
            raise ArgumentError(f"expected checkpoints as pairs (row, slot), got {pairs}")
        self.checkpoints: tuple[tuple[int, int], ...] = tuple(sorted((row, slot) for row, slot in pairs))
        self.native_handle: Any = None  # the same as the kernels take it, once they have been called
        self._at_row: dict[int, list[int]] = {}
        for row, slot in self.checkpoints:
            self._at_row.setdefault(row, []).append(slot)
        self._check()

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

    def sequences(self) -> Iterator[tuple[int, range]]:
        """Each sequence's slot and rows."""
        for slot, start, stop in zip(self.slots, self.starts, self.starts[1:], strict=False):
            yield slot, range(start, stop)

    def checkpoints_after(self, row: int) -> list[int]:
        """The slots that the state after `row` is written to, beside its own."""
        return self._at_row.get(row, [])

    def _check(self) -> None:
        starts, slots = self.starts, self.slots
        if not slots or len(starts) != len(slots) + 1:
            raise ArgumentError(
                f"expected one sequence or more, with one start more than slots, got {len(starts)} starts and "
                f"{len(slots)} slots"
            )
        if starts[0] != 0 or starts[-1] >= 1 << 63 or any(stop <= start for start, stop in pairwise(starts)):
            raise ArgumentError(f"expected starts that rise from 0, a row or more a sequence, got {starts}")
        written = self.written_slots
        if min(written) < 0 or max(written) >= 1 << 63 or len(set(written)) != len(written):
            raise ArgumentError(
                f"expected slots of 0 to 2^63 - 1, all distinct, those of checkpoints included, got {slots} and "
                f"checkpoints {self.checkpoints}"
            )
        rows = [row for row, _ in self.checkpoints]
        if rows and (rows[0] < 0 or rows[-1] >= starts[-1]):
            raise ArgumentError(
                f"expected checkpoints at rows of 0 to {starts[-1] - 1}, got {self.checkpoints}"
            )


def _whole_numbers(name: str, values: Iterable[int] | torch.Tensor) -> tuple[int, ...]:
    try:
        listed = values.tolist() if isinstance(values, torch.Tensor) else values
        return tuple(operator.index(value) for value in listed)
    except TypeError:
        raise ArgumentError(f"expected {name} as a list of whole numbers, got {values!r}") from None
