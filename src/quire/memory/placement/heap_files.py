"""The memory of a placement heap: where each unit's pieces lie in which file, and which of it is taken.

Not an owner: it counts no references. `heap` decides which units are in use, `mapping` where they are mapped. A "file"
is what a back end makes, be it a file or a device's memory.

A file holds `units_per_file` units, lane after lane, the pieces of a lane side by side: unit u is in file u //
units_per_file.

Invariants
    F1  a unit's place never changes while its file is there.
    F2  `committed[lane, unit]` bytes of a piece have memory behind them; it is kept until `give_back` or `drop`.

Cost: `commit` and `give_back` one call to the machine for each run of neighbours and lane.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from quire.errors import CapacityError
from quire.memory.placement.backend import PlacementBackend
from quire.memory.placement.calls import HUGE_PAGE_BYTES

__all__ = ["HeapFiles", "taking"]


def taking(call: Callable[..., Any], *args: Any) -> Any:
    """A call that takes something from the operating system, its refusal in our terms."""
    try:
        return call(*args)
    except OSError as error:
        raise CapacityError(
            f"the operating system gives no memory for the KV cache: {error}; close sequences or lower the KV memory"
        ) from error


class HeapFiles:
    """Files of `units_per_file` units, `max_units` in all, with a piece of `piece_bytes[lane]` in every lane."""

    def __init__(
        self, piece_bytes: tuple[int, ...], max_units: int, units_per_file: int, backend: PlacementBackend
    ) -> None:
        self.piece_bytes = piece_bytes
        self.max_units = max_units
        self.units_per_file = units_per_file
        self.backend = backend
        huge = any(size % HUGE_PAGE_BYTES == 0 for size in piece_bytes)
        self.alignment = math.lcm(backend.page_bytes, HUGE_PAGE_BYTES if huge else 1)
        self._lane_offsets: list[int] = []
        self._file_bytes = 0
        for size in piece_bytes:
            self._lane_offsets.append(self._file_bytes)
            self._file_bytes += -(-size * units_per_file // self.alignment) * self.alignment
        self.files: dict[int, Any] = {}
        # Of every unit there can be: costs memory only where units are used.
        self._committed = np.zeros((len(piece_bytes), max_units), np.int32)

    # Files

    def make(self, index: int) -> None:
        """*raises:* CapacityError: the machine gives none."""
        self.backend.budget.check(1)
        self.files[index] = taking(self.backend.make_heap, self._file_bytes, self.alignment)
        self.backend.budget.add(1)

    def drop(self, indices: list[int]) -> None:
        """Files of which nothing is mapped."""
        for index in indices:
            start, stop = self.span(index)
            self.backend.drop_heap(self.files.pop(index))
            self.backend.budget.add(-1)
            self._committed[:, start:stop] = 0

    def next_index(self) -> int | None:
        """The lowest file that is not there, if there may be one more."""
        index = 0
        while index in self.files:
            index += 1
        return index if index * self.units_per_file < self.max_units else None

    def span(self, index: int) -> tuple[int, int]:
        """The units of a file, [start, stop)."""
        return index * self.units_per_file, min((index + 1) * self.units_per_file, self.max_units)

    # Pieces

    def place(self, unit: int, lane: int) -> tuple[Any, int]:
        """The file of a piece, and its offset there."""
        index, place = divmod(unit, self.units_per_file)
        return self.files[index], self._lane_offsets[lane] + place * self.piece_bytes[lane]

    def addresses(self, units: np.ndarray, lane: int) -> np.ndarray:
        """int64, where the pieces of units can be reached whether mapped or not."""
        index, place = np.divmod(units, self.units_per_file)
        bases = np.array([self.backend.heap_address(self.files[one]) for one in index.tolist()], np.int64)
        return bases + self._lane_offsets[lane] + place * self.piece_bytes[lane]

    def adjacent(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Whether each unit of `right` lies directly behind that of `left` in every lane."""
        return (right == left + 1) & (left // self.units_per_file == right // self.units_per_file)

    def commit(self, units: np.ndarray, piece_bytes: Sequence[int]) -> None:
        """Have memory behind the first bytes of these units' pieces. *raises:* CapacityError: there is none."""
        wanted = np.asarray(piece_bytes)[:, None]
        for lane in np.flatnonzero((self._committed[:, units] < wanted).any(axis=1)).tolist():
            size = piece_bytes[lane]
            lacking = np.unique(units[self._committed[lane, units] < size])
            for first, count in self._runs(lacking, whole=size == self.piece_bytes[lane]):
                taking(self.backend.commit, *self.place(first, lane), count * size)
                self._committed[lane, first : first + count] = size

    def give_back(self, units: np.ndarray) -> None:
        """The memory of these units (ascending, mapped nowhere) to the machine."""
        for lane, size in enumerate(self.piece_bytes):
            for first, count in self._runs(units[self._committed[lane, units] > 0], whole=True):
                taking(self.backend.give_back, *self.place(first, lane), count * size)
                self._committed[lane, first : first + count] = 0

    def copy(self, source: int, target: int, num_bytes: Sequence[int]) -> None:
        for lane, size in enumerate(num_bytes):
            if size:
                self.backend.copy(*self.place(source, lane), *self.place(target, lane), size)

    @property
    def committed_bytes(self) -> int:
        """Memory that all files take now, as the machine tells it."""
        return sum(self.backend.committed_bytes(file) for file in self.files.values())

    def _runs(self, units: np.ndarray, *, whole: bool) -> Iterator[tuple[int, int]]:
        """First and number of neighbours among ascending units; one by one where not all of a piece is meant."""
        if len(units):
            apart = ~self.adjacent(units[:-1], units[1:]) if whole else np.ones(len(units) - 1, bool)
            cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(units)]
            for start, stop in itertools.pairwise(cuts):
                yield int(units[start]), stop - start
