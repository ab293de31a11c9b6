"""`SimulatedStore`: blocks in a tier that all replicas share, by number and a cost line, without a byte.

Every computed block is written to it. The least recently used prompt goes first, tail before head. A replica loads the
blocks that its memory lacks, if a load takes less time than the computation. This is a model of `remote_cache`, with
`cache_write="through"`: no fault, no limit of bandwidth over all replicas.

Invariant: a block is there only with all blocks before it.

Cost: O(blocks of the prompt) a call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.simulate.cost_line import CostLine

__all__ = ["SimulatedStore"]


class SimulatedStore:
    """num_blocks: that it holds. cost: of one load: a fixed part, and one for each loaded token."""

    def __init__(self, num_blocks: int, cost: CostLine) -> None:
        self.num_blocks, self.cost = num_blocks, cost
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the first goes first

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, block_ids: Sequence[int], start: int) -> int:
        """Blocks from `start` on, without a gap, that the store has."""
        stop = start
        while stop < len(block_ids) and block_ids[stop] in self._blocks:
            stop += 1
        return stop - start

    def put(self, block_ids: Sequence[int]) -> None:
        """Stores a prompt's blocks, or marks them as used; a prompt larger than the store keeps its beginning."""
        for block_id in reversed(block_ids[: self.num_blocks]):
            self._blocks[block_id] = None
            self._blocks.move_to_end(block_id)
        while len(self._blocks) > self.num_blocks:
            self._blocks.popitem(last=False)
