"""KV events for those outside: which blocks memory has, told as they come and go, in the field's established shape.

Made from the mirror's changes. Blocks that come one behind the other are one event; a batch is what happened between
two looks. On the wire (`to_wire`) a batch is a msgpack array as vLLM's publishers send and its consumers read it:

    [ts, [event, ...], data_parallel_rank]
    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

Block hashes are unsigned 64-bit integers, of a hash chained over namespace and tokens. extra_keys has an entry for each
block: null, or its extra keys in hexadecimal; for a namespace's first block they begin with the namespace's digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.cache.mirror import Block, Change, TreeMirror, namespace_digest

__all__ = [
    "MEDIUM",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KVEvent",
    "Subscribers",
    "to_wire",
]

MEDIUM = "CPU"  # where the pool's blocks lie

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class BlockStored:
    """Blocks one behind the other. token_ids: of all of them. extra_keys: of each, (offset, key)."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    namespace_digest: str
    extra_keys: tuple[tuple[tuple[int, bytes], ...], ...]
    medium: str = MEDIUM


@dataclass(frozen=True)
class BlockRemoved:
    """reason: "evicted", "forgotten" (drop, resize) or "cleared"."""

    block_hashes: tuple[int, ...]
    namespace_digest: str
    reason: str
    medium: str = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is there any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class EventBatch:
    """ts: seconds since 1970."""

    ts: float
    events: tuple[KVEvent, ...]


class Subscribers:
    """Those who want to know. Called in the engine's thread, between steps: what takes long should go elsewhere.

    A subscriber that raises is told no more, and the log says so.
    """

    def __init__(self, mirror: TreeMirror, wall_clock: Callable[[], float]) -> None:
        self._mirror = mirror
        self._wall_clock = wall_clock
        self._callbacks: list[Callable[[EventBatch], None]] = []

    def add(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Tells first what there is; returns what ends it."""
        if not self._callbacks:
            self._mirror.listeners.append(self._tell_all)
        callback(self._batch(self._mirror.snapshot()))
        self._callbacks.append(callback)
        return lambda: self._remove(callback)

    def _remove(self, callback: Callable[[EventBatch], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)
            if not self._callbacks:
                self._mirror.listeners.remove(self._tell_all)

    def _batch(self, changes: list[Change]) -> EventBatch:
        return EventBatch(self._wall_clock(), tuple(_events(changes, self._mirror.block_size)))

    def _tell_all(self, changes: list[Change]) -> None:
        batch = self._batch(changes)
        for callback in tuple(self._callbacks):
            try:
                callback(batch)
            except Exception:
                _log.exception("a subscriber to KV events failed, and is told no more: %r", callback)
                self._remove(callback)


def _events(changes: list[Change], block_size: int) -> list[KVEvent]:
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
                BlockRemoved(tuple(map(_number, gone)), namespace_digest(gone[0].namespace), reason)
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
            events.append(AllBlocksCleared())
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
        block_hashes=tuple(map(_number, run)),
        parent_block_hash=None if parent is None else _number(parent),
        token_ids=tuple(token for block in run for token in block.tokens.tolist()),
        block_size=block_size,
        namespace_digest=namespace_digest(run[0].namespace),
        extra_keys=tuple(tuple(sorted(block.extra_keys.items())) for block in run),
    )


def _number(block: Block) -> int:
    return int.from_bytes(block.hash[-8:], "big")


def to_wire(batch: EventBatch, data_parallel_rank: int | None = None) -> list[Any]:
    """What msgpack is given; see the module's text."""
    return [batch.ts, [_wire_event(event) for event in batch.events], data_parallel_rank]


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
