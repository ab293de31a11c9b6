"""Every block at one moment, and what one of them holds: for whoever looks at a running cache.

`block_map` is cheap (native: some 10 ns a block), so that it can be taken again and again; `tree_view` tells more.
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
    """All blocks by id, ids given up by a resize included.

    namespace_index: into `namespaces`, of blocks whose content is known; -1 of others.
    """

    states: NDArray[np.uint8]  # [num_ids]: FREE, CACHED, HELD, IN_FLIGHT, GIVEN_UP or PINNED
    namespace_index: Int32Array  # [num_ids]
    namespaces: list[bytes]


@dataclass(frozen=True)
class BlockContent:
    """What a block with known content holds: the last `num_own` of `tokens`, int32, which begin with the prompt."""

    namespace: bytes
    tokens: Int32Array
    num_own: int
