"""The events of the Python back end as they happen (`events.py` defines their meaning).

The log ignores partial nodes. The content of a full node never changes while it exists, so an event refers to its node,
and becomes numbers and bytes when it is taken. Cost: O(columns) an event, O(block size) when taken; 0 while off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.events import KINDS, REASONS, EventArrays
from quire.cache.manager.elements import decode
from quire.cache.manager.prefix import HOLE, Node
from quire.cache.types import NORMAL

__all__ = ["EventLog"]


@dataclass
class _Event:
    kind: str
    node: Node | None
    block_ids: list[int]
    owner_id: int
    reason: str
    cache_priority: int


class EventLog:
    """Off until it is turned on."""

    def __init__(self, num_columns: int, block_size: int) -> None:
        self.is_on = False
        self._num_columns = num_columns
        self._block_size = block_size
        self._events: list[_Event] = []

    def turn_on(self) -> None:
        self.is_on = True
        self.cleared()

    def turn_off(self) -> None:
        self.is_on = False
        self._events.clear()

    def stored(self, node: Node, block_ids: list[int], owner_id: int, cache_priority: int) -> None:
        self._note(_Event("stored", node, list(block_ids), owner_id, "", cache_priority))

    def removed(
        self, node: Node, block_ids: list[int], owner_id: int, reason: str, cache_priority: int
    ) -> None:
        self._note(_Event("removed", node, list(block_ids), owner_id, reason, cache_priority))

    def cleared(self) -> None:
        self._note(_Event("cleared", None, [HOLE] * self._num_columns, 0, "", NORMAL))

    def _note(self, event: _Event) -> None:
        is_full = event.node is None or event.node.num_tokens == self._block_size
        if self.is_on and is_full:
            self._events.append(event)

    def __len__(self) -> int:
        return len(self._events)

    def take(self) -> EventArrays:
        events, self._events = self._events, []
        stored = {index: event.node for index, event in enumerate(events) if event.kind == "stored"}
        blocks = {index: decode(node.content) for index, node in stored.items() if node is not None}
        names: dict[bytes, int] = {}
        named, parents = np.full(len(events), -1, np.int32), np.full(len(events), -1, np.int64)
        for index, node in stored.items():
            assert node is not None
            named[index] = names.setdefault(node.root.content, len(names))
            if node.parent is not None and node.parent.parent is not None:
                parents[index] = node.parent.id
        tokens = np.array([tokens for tokens, _ in blocks.values()], np.int32)
        return {
            "kinds": np.array([KINDS.index(event.kind) for event in events], np.int32),
            "reasons": np.array([REASONS.index(event.reason) for event in events], np.int32),
            "node_ids": np.array([-1 if e.node is None else e.node.id for e in events], np.int64),
            "parent_ids": parents,
            "owner_ids": np.array([event.owner_id for event in events], np.int32),
            "cache_priorities": np.array([event.cache_priority for event in events], np.int32),
            "namespace_index": named,
            "block_ids": np.array([event.block_ids for event in events], np.int32).reshape(
                -1, self._num_columns
            ),
            "tokens": tokens.reshape(-1, self._block_size),
            "namespaces": list(names),
            "extra_keys": [
                (index, offset, key) for index, (_, keys) in blocks.items() for offset, key in keys
            ],
        }
