"""What a cache tells of itself: events, the tree, the map of units, figures, its proof. Nothing here changes it.

`Cache` is built on it. Cost: one call to the back end each; O(nodes) or O(units) where it says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache import arguments
from quire.cache.events import CacheEvents
from quire.cache.memory_use import MemoryUse
from quire.cache.tree_view import TreeView
from quire.cache.unit_map import PINNED, UnitContent, UnitMap
from quire.errors import ArgumentError, SequenceClosedError

if TYPE_CHECKING:
    from quire.cache.pins import Pins
    from quire.spec import KVSpec

__all__ = ["InspectedCache"]


class InspectedCache:
    """Looks at what `Cache.__init__` made."""

    _manager: Any
    pins: Pins
    spec: KVSpec
    num_blocks: int
    num_block_ids: int
    block_size: int
    unit_bytes: int
    _open_ids: set[int]

    def record_events(self, is_on: bool) -> None:
        """Whether to note what happens to full blocks from now on; at first it is off, which costs nothing.

        Turned on, the events begin with `cleared` and every full block there is; turned off, those not taken are lost.
        They take memory (4 bytes a token and some 50 an event) until they are taken.
        """
        self._manager.record_events(bool(is_on))

    @property
    def num_events(self) -> int:
        """How many `take_events` would give now: in most steps none."""
        return self._manager.num_events

    def take_events(self) -> CacheEvents:
        """What has happened since the last call, in order (`events.py`). Take them after each `reserve`, before its
        copies are done: the bytes of what was evicted are still there."""
        return CacheEvents.from_arrays(self._manager.take_events())

    def tree(self) -> TreeView:
        """Every node of the prefix tree as arrays, for reports. O(nodes)."""
        return TreeView.from_arrays(self._manager.tree())

    def unit_map(self) -> UnitMap:
        """The state of every unit and whose content it has, for looking on. O(units + nodes)."""
        states, namespace_index = self._manager.unit_map()
        if len(self.pins):
            states = states.copy()
            states[self.pins.units] = PINNED
        return UnitMap(states, namespace_index, self._manager.namespaces())

    def content_of(self, unit: int) -> UnitContent | None:
        """The tokens that a unit has, and those before them; None where its content is not known (yet)."""
        content = self._call("content_of", arguments.count(unit, "a unit", 0))
        return None if content is None else UnitContent(*content)

    def namespaces(self) -> list[bytes]:
        """Those in which content is known or a sequence is open, sorted."""
        return self._manager.namespaces()

    @property
    def num_free_blocks(self) -> int:
        """Units that could be handed out: free ones and cached ones."""
        free, cached, _, _ = self._manager.counts()
        return free + cached

    @property
    def num_held_blocks(self) -> int:
        """Units that open sequences refer to, pinned ones among them."""
        return self._manager.counts()[2]

    @property
    def num_cached_blocks(self) -> int:
        """Units with findable content that no sequence holds."""
        return self._manager.counts()[1]

    @property
    def usage(self) -> float:
        """Share of the units that are in use, 0 .. 1; cached ones are not."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def stats(self) -> dict[str, int]:
        """Figures now (num_blocks, free, cached, held, leased, pinned, num_sequences, num_nodes) and counted since the
        start (hit_tokens, query_tokens, evicted_blocks, copied_blocks, deduplicated_blocks)."""
        stats, pinned = self._manager.stats(), self.pins.num_units
        return {**stats, "held": stats["held"] - pinned, "pinned": pinned}

    def memory_use(self) -> MemoryUse:
        """What the memory is used for now. Cost: O(blocks of open sequences); sequences still looking look again."""
        size = self.block_size
        _, cached, held, leased = self._manager.counts()
        used = 0
        computed = {i: self._manager.num_computed_tokens(i) for i in self._open_ids}
        for group in self.spec.groups:
            tokens_in = np.zeros(self.num_block_ids, np.int64)
            for sequence_id, num_computed in computed.items():
                table = self._manager.block_table(sequence_id, group.index)[: -(-num_computed // size)]
                filled = np.minimum(size, num_computed - size * np.arange(len(table)))
                is_kept = table >= 0
                np.maximum.at(tokens_in, table[is_kept], filled[is_kept])
            used += int(tokens_in.sum()) * group.bytes_per_token
        return MemoryUse(
            reserved=(held + leased) * self.unit_bytes,
            used=used,
            later=0,
            external=0,
            cached=cached * self.unit_bytes,
            peak=self._manager.most_units * self.unit_bytes,
            total=self.num_blocks * self.unit_bytes,
        )

    @property
    def largest_free_blocks(self) -> int:
        """Units that one sequence could be given now: here, where units may lie anywhere, all that are available."""
        return self.num_free_blocks

    def check(self) -> None:
        """Prove every invariant; `InvariantError` with the numbers where one does not hold."""
        self._manager.check()
        self.pins.prove()

    def _call(self, method: str, *args: Any) -> Any:
        """A call to the back end, its errors in the cache's terms."""
        try:
            return getattr(self._manager, method)(*args)
        except KeyError as error:
            raise SequenceClosedError(
                f"expected an open sequence, got sequence {error.args[0]}, which is closed or was never opened, "
                f"in {method}"
            ) from None
        except ValueError as error:
            raise ArgumentError(str(error)) from None
