"""The recipe's smallest eviction policy: first in, first out, however often a block was used since."""

from quire.cache.manager.eviction import EvictionPolicy, register


class Fifo(EvictionPolicy):
    def __init__(self) -> None:
        self.clock = 0
        self.since: dict[int, int] = {}

    def stored(self, block_id: int) -> None:
        self.clock += 1
        self.since[block_id] = self.clock

    def key(self, block_id: int) -> float:
        return self.since[block_id]


register("fifo", Fifo)
