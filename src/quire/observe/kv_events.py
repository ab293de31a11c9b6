"""KV events for other programs: blocks stored in and removed from memory and tiers, in vLLM's format.

A block has `block_size` tokens, the engine's option, whatever the blocks of some layers have. The mirror's changes
give memory's events, `tier_events` those of tiers; `known_parents` holds back blocks whose parent is in no medium.
Consecutive blocks are one event; a batch has the events between two calls of `collect`. On the wire (`to_wire`) a batch
is a msgpack array, as vLLM's publishers send it and its consumers read it:

    [ts, [event, ...], data_parallel_rank]
    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

medium: "CPU" is memory, the pool; "CPU_TIER1", "DISK", "PEERS" and "REMOTE" are the tiers host, disk, peers and remote.
A block may be in several; an event of one medium says nothing of another. AllBlocksCleared has no medium on the wire
and means all of them: with tiers, a clear of one medium is sent as BlockRemoved only.

Block hashes are unsigned 64-bit integers, of a hash chained over namespace and tokens. extra_keys has an entry for each
block: null, or its extra keys in hexadecimal; for a namespace's first block they begin with the namespace's digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.cache.block_hash import block_number, namespace_digest
from quire.observe.event_types import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.observe.known_parents import KnownParents
from quire.observe.tree_mirror import Block, Change, TreeMirror

__all__ = [
    "MEDIA",
    "MEDIUM",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KVEvent",
    "KVEventSubscribers",
    "TierSource",
    "to_wire",
]

MEDIA = {"host": "CPU_TIER1", "disk": "DISK", "peers": "PEERS", "remote": "REMOTE"}  # by tier

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class EventBatch:
    """ts: seconds since 1970."""

    ts: float
    events: tuple[KVEvent, ...]


class TierSource(Protocol):
    """A source of the tiers' events: `tier_events.TierEvents`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pop_events(self) -> list[KVEvent]:
        """The events since the last call."""
        ...

    def snapshot(self) -> list[KVEvent]:
        """Stored events of the tiers' content up to the last `pop_events`."""
        ...


class KVEventSubscribers:
    """The subscribers. Each is called in the engine's thread, between steps, and should be quick.

    A subscriber that raises is removed, and the error is logged.
    """

    def __init__(
        self, mirror: TreeMirror, wall_clock: Callable[[], float], tiers: TierSource | None = None
    ) -> None:
        self._mirror = mirror
        self._tiers = tiers
        self._wall_clock = wall_clock
        self._callbacks: list[Callable[[EventBatch], None]] = []
        self._known = KnownParents()  # the state that all subscribers know

    def add(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Sends the present content first; returns a function that unsubscribes."""
        self.collect()
        events = _events(self._mirror.snapshot(), self._mirror.block_size, AllBlocksCleared())
        if self._tiers is not None:
            if not self._callbacks:
                self._tiers.start()
            events += self._tiers.snapshot()
        known = KnownParents()
        try:
            callback(EventBatch(self._wall_clock(), tuple(known.filter_events(events))))
        except BaseException:
            if self._tiers is not None and not self._callbacks:
                self._tiers.stop()
            raise
        if not self._callbacks:
            self._known = known
            self._mirror.listeners.append(self._send_changes)
        self._callbacks.append(callback)
        return lambda: self._remove(callback)

    def _remove(self, callback: Callable[[EventBatch], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)
            if not self._callbacks:
                self._mirror.listeners.remove(self._send_changes)
                self._known = KnownParents()
                if self._tiers is not None:
                    self._tiers.stop()

    def collect(self) -> None:
        """Sends the tiers' events since the last call."""
        if self._callbacks and self._tiers is not None and (events := self._tiers.pop_events()):
            self._send(events)

    def _send_changes(self, changes: list[Change]) -> None:
        # With tiers, a clear of memory is not a clear of all.
        cleared = AllBlocksCleared(None if self._tiers is None else MEDIUM)
        self._send(_events(changes, self._mirror.block_size, cleared))

    def _send(self, events: list[KVEvent]) -> None:
        known = self._known.filter_events(events)
        if not known:
            return
        batch = EventBatch(self._wall_clock(), tuple(known))
        for callback in tuple(self._callbacks):
            try:
                callback(batch)
            except Exception:
                _log.exception("a subscriber to KV events failed and is removed: %r", callback)
                self._remove(callback)


def _events(changes: list[Change], block_size: int, cleared: AllBlocksCleared) -> list[KVEvent]:
    events: list[KVEvent] = []
    run: list[Block] = []

    def end_run() -> None:
        if run:
            events.append(_stored(run, block_size))
            run.clear()

    gone: list[Block] = []
    reason = ""

    def end_gone() -> None:
        if gone:
            events.append(
                BlockRemoved(
                    tuple(number for block in gone for number in reversed(_numbers(block))),
                    namespace_digest(gone[0].namespace),
                    reason,
                )
            )
            gone.clear()

    for change in changes:
        block = change.block
        if change.kind != "stored" or block is None or (run and block.parent is not run[-1]):
            end_run()
        if change.kind != "removed" or (
            gone and block is not None and (change.reason, block.namespace) != (reason, gone[-1].namespace)
        ):
            end_gone()
        if block is None:
            events.append(cleared)
        elif change.kind == "stored":
            run.append(block)
        else:
            gone.append(block)
            reason = change.reason
    end_run()
    end_gone()
    return events


def _stored(run: list[Block], block_size: int) -> BlockStored:
    parent = run[0].parent
    return BlockStored(
        block_hashes=tuple(number for block in run for number in _numbers(block)),
        parent_block_hash=None if parent is None else block_number(parent.hash),
        token_ids=tuple(token for block in run for token in block.tokens.tolist()),
        block_size=block_size,
        namespace_digest=namespace_digest(run[0].namespace),
        extra_keys=tuple(
            tuple(
                (at - first, key)
                for at, key in sorted(block.extra_keys.items())
                if first <= at < first + block_size
            )
            for block in run
            for first in range(0, len(block.tokens), block_size)
        ),
    )


def _numbers(block: Block) -> list[int]:
    """The numbers of the blocks of `block_size` tokens in a node."""
    return [block_number(block_hash) for block_hash in (*block.inner_hashes, block.hash)]


def to_wire(batch: EventBatch, data_parallel_rank: int | None = None) -> list[Any]:
    """The batch as msgpack packs it; see the module's text."""
    events = [
        _wire_event(event)
        for event in batch.events
        if not (isinstance(event, AllBlocksCleared) and event.medium is not None)
    ]
    return [batch.ts, events, data_parallel_rank]


def _wire_event(event: KVEvent) -> list[Any]:
    if isinstance(event, BlockStored):
        keys = [[key.hex() for _, key in own] for own in event.extra_keys]
        if event.parent_block_hash is None and event.namespace_digest:
            keys[0].insert(0, event.namespace_digest)
        wire = [
            "BlockStored", list(event.block_hashes), event.parent_block_hash, list(event.token_ids),
            event.block_size, None, event.medium, None,
        ]  # fmt: skip
        return [*wire, [own or None for own in keys]] if any(keys) else wire
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", list(event.block_hashes), event.medium]
    return ["AllBlocksCleared"]
