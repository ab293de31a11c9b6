"""Which row of addresses is whose: rows of open sequences, and parked ones, still mapped, that the next ones adopt.

Not a mapper: where a row leads is `RowPlaces`' business.

Invariant: every row is one sequence's or parked.
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
        self.of: dict[int, int] = {}  # of open sequences
        self.parked = list(range(num_rows))  # never used ones first, then in the order they were left

    def adopt(self, ids: list[int], tables: list[np.ndarray], places: Sequence[RowPlaces]) -> list[int]:
        """Give rows to the sequences that have none, each the parked one that leads to most of its blocks already.

        Returns: those sequences. *raises:* CapacityError: more sequences than rows; nothing has changed then.
        """
        new = [(at, sequence) for at, sequence in enumerate(ids) if sequence not in self.of]
        if len(new) > len(self.parked):
            raise CapacityError(
                f"expected at most {self.num_rows} sequences at once, got {len(self.of) + len(new)}; close some "
                "or raise max_num_seqs"
            )
        for at, sequence in new:
            matches = np.zeros(len(self.parked), np.int64)
            for one, table in zip(places, tables, strict=True):
                matches += one.num_led(self.parked, table[at])
            # Of equals the one parked longest, first of all one that was never used.
            self.of[sequence] = self.parked.pop(int(matches.argmax()))
        return [sequence for _, sequence in new]

    def park(self, sequences: list[int]) -> None:
        """They have rows, which they leave."""
        self.parked += [self.of.pop(sequence) for sequence in sequences]
