"""The state of every block at one moment, and the content of a single block: for observers of a running cache.

`block_map` is cheap (native: some 10 ns a block), so that observers can call it often; `tree_view` tells more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.cache.types import Int32Array

__all__ = [
    "CACHED",
    "FREE",
    "GIVEN_UP",
    "HELD",
    "IN_FLIGHT",
    "PINNED",
    "BlockContent",
    "BlockMap",
]

FREE, CACHED, HELD, IN_FLIGHT, GIVEN_UP, PINNED = range(6)


@dataclass(frozen=True)
class BlockMap:
    """All blocks by id, including the ids that a resize gave up.

    namespace_index: into `namespaces`, for blocks with known content; -1 for the others.
    """

    states: NDArray[np.uint8]  # [num_ids]: FREE, CACHED, HELD, IN_FLIGHT, GIVEN_UP or PINNED
    namespace_index: Int32Array  # [num_ids]
    namespaces: list[bytes]


@dataclass(frozen=True)
class BlockContent:
    """The content of a block: the last `num_own` of `tokens`, int32, which start at the beginning of the prompt."""

    namespace: bytes
    tokens: Int32Array
    num_own: int
