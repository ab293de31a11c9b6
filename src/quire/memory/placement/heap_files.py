"""The memory of a placement heap: where each unit's pieces lie in which file, and which of it is taken.

Not an owner: it counts no references. `heap` decides which units are in use, `mapping` where they are mapped. A "file"
is what a back end makes, be it a file or a device's memory.

A file holds `units_per_file` units, lane after lane, the pieces of a lane side by side: unit u is in file u //
units_per_file. Where a huge page is a whole number of a lane's pieces, `frame_units` of them, so many units each, from
the lane's beginning on, are a *frame*: a huge page, if all its units got memory in one call.

Invariants
    F1  a unit's place never changes while its file is there.
    F2  `committed[lane, unit]` bytes of a piece have memory behind them; it is kept until `give_back` or `drop`.
    F3  `is_huge[lane][frame]`: the frame is one huge page.

Cost: `commit` and `give_back` one call to the machine for each run of neighbours and lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from quire.errors import CapacityError
from quire.memory.placement.backend import PlacementBackend

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
        self.frame_units = [self._frame_units(size) for size in piece_bytes]
        alignment = backend.huge_bytes if any(self.frame_units) else backend.page_bytes
        self._lane_offsets: list[int] = []
        self._file_bytes = 0
        for size in piece_bytes:
            self._lane_offsets.append(self._file_bytes)
            self._file_bytes += -(-size * units_per_file // alignment) * alignment
        self.files: dict[int, Any] = {}
        # Of every unit there can be: costs memory only where units are used.
        self._committed = np.zeros((len(piece_bytes), max_units), np.int32)
        self.is_huge = [np.zeros(max_units // each + 1 if each else 0, bool) for each in self.frame_units]

    def alignment_for(self, num_positions: int, sizes: Sequence[int]) -> int:
        """Of a range's lanes that map so many bytes a position: that of huge pages where one fits."""
        lanes = zip(sizes, self.piece_bytes, self.frame_units, strict=True)
        has_frames = any(each and size == full and num_positions >= each for size, full, each in lanes)
        return self.backend.huge_bytes if has_frames else self.backend.page_bytes

    # Files

    def make(self, index: int) -> None:
        """*raises:* CapacityError: the machine gives none."""
        self.backend.budget.check(1)
        self.files[index] = taking(self.backend.make_heap, self._file_bytes)
        self.backend.budget.add(1)

    def drop(self, indices: list[int]) -> None:
        """Files of which nothing is mapped."""
        for index in indices:
            start, stop = self.span(index)
            self.backend.drop_heap(self.files.pop(index))
            self.backend.budget.add(-1)
            self._committed[:, start:stop] = 0
            for each, is_huge in zip(self.frame_units, self.is_huge, strict=True):
                if each:
                    is_huge[start // each : -(-stop // each)] = False

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
            if size == self.piece_bytes[lane] and self.frame_units[lane]:
                lacking = self._commit_frames(lane, lacking)
            for first, count in self._runs(lacking, whole=size == self.piece_bytes[lane]):
                taking(self.backend.commit, *self.place(first, lane), count * size)
                self._committed[lane, first : first + count] = size

    def give_back(self, units: np.ndarray) -> None:
        """The memory of these units (ascending, mapped nowhere) to the machine."""
        for lane, size in enumerate(self.piece_bytes):
            for first, count in self._runs(units[self._committed[lane, units] > 0], whole=True):
                taking(self.backend.give_back, *self.place(first, lane), count * size)
                self._committed[lane, first : first + count] = 0
                if each := self.frame_units[lane]:
                    self.is_huge[lane][first // each : -(-(first + count) // each)] = False

    def copy(self, source: int, target: int, num_bytes: Sequence[int]) -> None:
        for lane, size in enumerate(num_bytes):
            if size:
                self.backend.copy(*self.place(source, lane), *self.place(target, lane), size)

    @property
    def committed_bytes(self) -> int:
        """Memory that all files take now, as the machine tells it."""
        return sum(self.backend.committed_bytes(file) for file in self.files.values())

    def _frame_units(self, size: int) -> int:
        """Pieces of this size that a huge page has, 0 where it is no whole number or files would begin within one."""
        huge = self.backend.huge_bytes
        fits = self.backend.merges and huge and huge % size == 0 and self.units_per_file % (huge // size) == 0
        return huge // size if fits else 0

    def _commit_frames(self, lane: int, lacking: np.ndarray) -> np.ndarray:
        """Have huge pages behind the frames wholly among the ascending units that have no memory yet; what remains."""
        each, size = self.frame_units[lane], self.piece_bytes[lane]
        if len(lacking) < each:
            return lacking
        frames, counts = np.unique(lacking // each, return_counts=True)
        for frame in frames[counts == each].tolist():
            units = slice(frame * each, (frame + 1) * each)
            if self._committed[lane, units].any():
                continue
            if not taking(self.backend.commit_huge, *self.place(units.start, lane)):
                break  # there is none; the next one is asked for in the next call
            self._committed[lane, units] = size
            self.is_huge[lane][frame] = True
        return lacking[self._committed[lane, lacking] < size]

    def _runs(self, units: np.ndarray, *, whole: bool) -> Iterator[tuple[int, int]]:
        """First and number of neighbours among ascending units; one by one where not all of a piece is meant."""
        if len(units):
            apart = ~self.adjacent(units[:-1], units[1:]) if whole else np.ones(len(units) - 1, bool)
            cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(units)]
            for start, stop in itertools.pairwise(cuts):
                yield int(units[start]), stop - start
