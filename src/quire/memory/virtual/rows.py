"""The owner of each row of addresses: an open sequence, or none: a parked row is still mapped, and a new sequence
adopts it.

Not a mapper: `RowPlaces` knows the blocks of a row.

Invariant: every row belongs to one sequence or is parked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.errors import CapacityError
from quire.memory.virtual.row_places import RowPlaces

__all__ = ["Rows"]


class Rows:
    """`num_rows` rows, all parked."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.row_of: dict[int, int] = {}  # by open sequence
        self.parked = list(range(num_rows))  # unused rows first, then in the order they were parked

    def adopt(self, ids: list[int], tables: list[np.ndarray], places: Sequence[RowPlaces]) -> list[int]:
        """Give rows to the sequences without one, each the parked row that leads to most of its blocks already.

        Returns these sequences. *raises:* CapacityError: more sequences than rows; nothing has changed then.
        """
        new = [(at, sequence) for at, sequence in enumerate(ids) if sequence not in self.row_of]
        if len(new) > len(self.parked):
            raise CapacityError(
                f"expected at most {self.num_rows} sequences at once, got {len(self.row_of) + len(new)}; close some "
                "or raise max_num_seqs"
            )
        for at, sequence in new:
            matches = np.zeros(len(self.parked), np.int64)
            for group_places, table in zip(places, tables, strict=True):
                matches += group_places.count_mapped(self.parked, table[at])
            # Among equals the row parked longest; unused rows come first.
            self.row_of[sequence] = self.parked.pop(int(matches.argmax()))
        return [sequence for _, sequence in new]

    def park(self, sequences: list[int]) -> None:
        """Park the rows of these sequences, which have one each."""
        self.parked += [self.row_of.pop(sequence) for sequence in sequences]
