"""Which query rows read which blocks: one step's batch, for one group of layers.

Not tied to a layer: it is built once per step and group, and every layer of the group runs with it.

Invariants
    P1  rows [query_start[s], query_start[s + 1]) are sequence s's new tokens; the last of them has position
        context_lengths[s] - 1.
    P2  sequence s's table names the blocks of its positions in order; entries are -1 beyond its end and where a
        window has given blocks back.
    P3  all three are contiguous int32 on the CPU, and never change.

Cost: O(sequences), about 20 us; the tables are taken over, not copied, when they are int32 already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.errors import ArgumentError

__all__ = ["AttentionPlan"]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Make it with `build`, which checks."""

    query_start: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    num_threads: int
    num_sequences: int
    num_tokens: int

    @classmethod
    def build(
        cls,
        query_start: Any,
        context_lengths: Any,
        block_tables: Any,
        block_size: int,
        num_threads: int | None = None,
    ) -> AttentionPlan:
        """The plan of a varlen batch; decodes (one row) and prefills mix freely.

        Args:
            query_start: int32 [n + 1], first row of each sequence, and the number of rows.
            context_lengths: int32 [n], tokens of each sequence once this step's are in.
            block_tables: int32 [n, widest].
            block_size: tokens of a block.
            num_threads: threads a kernel may use; torch's number if not given.

        Raises:
            ArgumentError: shapes that do not agree, or a table too short for its sequence.
        """
        starts = _int32(query_start)
        contexts = _int32(context_lengths)
        tables = _int32(block_tables)
        threads = torch.get_num_threads() if num_threads is None else num_threads
        n = contexts.size
        if starts.shape != (n + 1,) or contexts.shape != (n,) or tables.ndim != 2 or tables.shape[0] != n:
            raise ArgumentError(
                "expected query_start [n + 1], context_lengths [n] and block_tables [n, widest], "
                f"got {tuple(starts.shape)}, {tuple(contexts.shape)} and {tuple(tables.shape)}"
            )
        if n == 0 or block_size < 1 or threads < 1:
            raise ArgumentError(
                f"expected at least one sequence, block size and thread, got {n}, {block_size} and {threads}"
            )
        lengths = starts[1:] - starts[:-1]
        shortest, widest = int(lengths.min()), int(contexts.max())
        if int(starts[0]) != 0 or shortest < 1 or (contexts < lengths).any():
            raise ArgumentError(
                "expected query_start to rise from 0 by 1 to context_length rows per sequence, "
                f"got {starts.tolist()} with context lengths {contexts.tolist()}"
            )
        if tables.shape[1] * block_size < widest:
            raise ArgumentError(
                f"expected block tables of {-(-widest // block_size)} blocks of {block_size} tokens for a context of "
                f"{widest}, got {tables.shape[1]}"
            )
        return cls(
            query_start=torch.from_numpy(starts),
            context_lengths=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(tables),
            block_size=block_size,
            num_threads=threads,
            num_sequences=n,
            num_tokens=int(starts[-1]),
        )


def _int32(values: Any) -> np.ndarray:
    """Checked in numpy, whose small operations cost a tenth of torch's."""
    return np.ascontiguousarray(values.cpu() if isinstance(values, torch.Tensor) else values, dtype=np.int32)
