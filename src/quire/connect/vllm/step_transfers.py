"""The messages of the connector's two sides in a step of vLLM: blocks to load and to save, and the saved ones.

A payload has the bytes of several blocks: for each worker (of tensor parallelism), for each layer, one block after the
other, each as it lies in the worker's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

__all__ = ["BlockLoad", "BlockSave", "StepResults", "StepTransfers"]


@dataclass(frozen=True, eq=False)
class BlockLoad:
    """A payload of `num_blocks` blocks; those from number `first` on go to `block_ids`."""

    payload: np.ndarray
    num_blocks: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockSave:
    """Blocks to copy into one payload, whose results have this number."""

    number: int
    block_ids: tuple[int, ...]


@dataclass(eq=False)
class StepTransfers:
    """From the scheduler's side to the worker's, once a step.

    loads: before the step's forward. saves: of blocks that the forward fills, behind it. last_saves: of requests that
    have ended, by request id; their blocks are free once these are done.
    """

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    last_saves: dict[str, list[BlockSave]] = field(default_factory=dict)


@dataclass(eq=False)
class StepResults:
    """From the workers' side to the scheduler's: by the number of a `BlockSave`, by worker, its part of the payload."""

    parts: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)

    def joined(self, other: StepResults) -> StepResults:
        """The results of these and other workers, of one step."""
        numbers = self.parts.keys() | other.parts.keys()
        return StepResults(
            {
                number: {**self.parts.get(number, {}), **other.parts.get(number, {})}
                for number in sorted(numbers)
            }
        )

    def payloads(self) -> Iterator[tuple[int, np.ndarray]]:
        """Number and whole payload of each `BlockSave`."""
        for number, parts in self.parts.items():
            yield (
                number,
                np.concatenate([parts[worker] for worker in sorted(parts)]) if len(parts) > 1 else parts[0],
            )
