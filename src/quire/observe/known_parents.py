"""`KnownParents`: of the events of memory and tiers, those whose parent block a consumer already knows.

A tier may have a tail without its head, and the head may be nowhere. Events of such a tail are held back until its
parent is reported (in any medium); it is reported as removed, reason "unreachable", when the parent leaves the last
medium.

Invariants
    P1  after each event, the parent of each reported block is reported as well, in some medium; or the block begins a
        sequence.
    P2  a block with such a parent is reported in each medium that has it.
    P3  per medium, stored and removed alternate for each block, beginning with stored.

Cost: a step for each block of an incoming and of an outgoing event; a block's token ids while it is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from quire.observe.event_types import BlockRemoved, BlockStored, KVEvent

__all__ = ["KnownParents"]

_UNREACHABLE = "unreachable"


@dataclass(slots=True)
class _KnownBlock:
    """event: the stored event of this block alone, of any medium. media: media that have the block, in order."""

    event: BlockStored
    media: dict[str, None] = field(default_factory=dict)
    is_reported: bool = False


class KnownParents:
    """See the module's text. For one thread."""

    def __init__(self) -> None:
        self._held: dict[int, _KnownBlock] = {}
        self._children: dict[int, dict[int, None]] = {}  # of blocks that are held, by parent

    def filter_events(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """The events to report after these, which must satisfy P3."""
        reported: list[KVEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, reported)
            elif isinstance(event, BlockRemoved):
                self._remove(event, reported)
            else:
                if event.medium is None:
                    self._held.clear()
                    self._children.clear()
                reported.append(event)
        return reported

    def _store(self, event: BlockStored, reported: list[KVEvent]) -> None:
        for block in _each(event):
            number, parent = block.block_hashes[0], block.parent_block_hash
            held = self._held.get(number)
            if held is None:
                held = self._held[number] = _KnownBlock(block)
                if parent is not None:
                    self._children.setdefault(parent, {})[number] = None
            held.media[event.medium] = None
        parent = event.parent_block_hash
        if parent is not None and not self._is_reported(parent):
            return
        reported.append(event)
        new = [number for number in event.block_hashes if not self._held[number].is_reported]
        for number in new:
            self._held[number].is_reported = True
        more: list[BlockStored] = []
        for number in new:
            held = self._held[number]
            more += (replace(held.event, medium=medium) for medium in held.media if medium != event.medium)
        waiting = [child for number in new for child in self._children.get(number, ())]
        while waiting:
            number = waiting.pop()
            held = self._held[number]
            if held.is_reported:
                continue
            held.is_reported = True
            more += (replace(held.event, medium=medium) for medium in held.media)
            waiting += self._children.get(number, ())
        reported += _joined(more)

    def _remove(self, event: BlockRemoved, reported: list[KVEvent]) -> None:
        known = tuple(number for number in event.block_hashes if self._is_reported(number))
        for number in event.block_hashes:
            if number in self._held:
                self._held[number].media.pop(event.medium, None)
        reported += self._in_order(event, known, self._unreachable(known))
        for number in event.block_hashes:
            held = self._held.get(number)
            if held is not None and not held.media:
                self._forget(number, held.event.parent_block_hash)

    def _unreachable(self, known: tuple[int, ...]) -> list[int]:
        """Blocks to report as removed because some of `known` have left their last medium: these and their
        descendants, children before parents."""
        gone: list[int] = []
        for root in known:
            waiting = [] if self._held[root].media else [root]
            under: list[int] = []  # parents first
            while waiting:
                number = waiting.pop()
                if self._is_reported(number):
                    self._held[number].is_reported = False
                    under.append(number)
                    waiting += self._children.get(number, ())
            gone += reversed(under)
        return gone

    def _in_order(self, event: BlockRemoved, known: tuple[int, ...], gone: list[int]) -> list[KVEvent]:
        """The removals of `known` from the event's medium, and of `gone` from all media, in the order that P1 needs."""
        going, there = set(known), set(gone)
        pieces: list[tuple[int, str, str]] = []  # number, reason, medium
        for number in gone:
            pieces += ((number, _UNREACHABLE, medium) for medium in self._held[number].media)
            if number in going:
                pieces.append((number, event.reason, event.medium))
        if all(reason != _UNREACHABLE for _, reason, _ in pieces):  # in the event's own order
            return (
                [event if known == event.block_hashes else replace(event, block_hashes=known)]
                if known
                else []
            )
        pieces += ((number, event.reason, event.medium) for number in known if number not in there)
        return [
            replace(event, block_hashes=tuple(block[0] for block in run), reason=reason, medium=medium)
            for (reason, medium), run in groupby(pieces, key=lambda block: block[1:])
        ]

    def _forget(self, number: int, parent: int | None) -> None:
        del self._held[number]
        if parent is not None:
            siblings = self._children[parent]
            del siblings[number]
            if not siblings:
                del self._children[parent]

    def _is_reported(self, number: int) -> bool:
        held = self._held.get(number)
        return held is not None and held.is_reported


def _each(event: BlockStored) -> Iterable[BlockStored]:
    """One event for each block."""
    size, parent = event.block_size, event.parent_block_hash
    for at, number in enumerate(event.block_hashes):
        yield replace(
            event,
            block_hashes=(number,),
            parent_block_hash=parent,
            token_ids=event.token_ids[at * size : (at + 1) * size],
            extra_keys=event.extra_keys[at : at + 1],
        )
        parent = number


def _joined(blocks: list[BlockStored]) -> list[KVEvent]:
    """Joins consecutive blocks into one event."""
    joined: list[KVEvent] = []
    run: list[BlockStored] = []
    for at, block in enumerate(blocks):
        run.append(block)
        following = blocks[at + 1] if at + 1 < len(blocks) else None
        if (
            following is not None
            and following.medium == block.medium
            and following.parent_block_hash == block.block_hashes[0]
        ):
            continue
        joined.append(
            replace(
                run[0],
                block_hashes=tuple(block.block_hashes[0] for block in run),
                token_ids=tuple(token for block in run for token in block.token_ids),
                extra_keys=tuple(keys for block in run for keys in block.extra_keys),
            )
        )
        run = []
    return joined
