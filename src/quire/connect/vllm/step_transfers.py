"""What the two sides of the connector tell each other in a step of vLLM: blocks to load and save, and those saved.

A payload has the bytes of several blocks: for each layer, one block after the other, each as it lies in vLLM's memory.
"""

from __future__ import annotations

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
    """From the worker's side to the scheduler's: payloads by the number of their `BlockSave`."""

    payloads: dict[int, np.ndarray] = field(default_factory=dict)
