"""Of all that memory and tiers have, what a consumer can place: blocks whose parents it was told of.

A tier may have a tail without its head, and the head may be nowhere. Such a tail is not told. It is told when its
parent is (in whatever medium), and told as removed, reason "unreachable", when the parent leaves the last medium.

Invariants
    P1  after each event, the parent of each block that was told and not removed is told as well, in some medium; or
        the block begins a sequence.
    P2  what has such a parent and is held in a medium is told of that medium: nothing else is kept back.
    P3  per medium, stored and removed take turns for each block, beginning with stored.

Cost: a step for each block of an event that comes and of one that goes out; a block's token ids while it is held.
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
    """one: the block alone, as an event, of whatever medium. media: those that have it, in order."""

    one: BlockStored
    media: dict[str, None] = field(default_factory=dict)
    is_told: bool = False


class KnownParents:
    """See the module's text. Of one thread."""

    def __init__(self) -> None:
        self._held: dict[int, _KnownBlock] = {}
        self._children: dict[int, dict[int, None]] = {}  # of blocks that are held, by parent

    def pass_on(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """What to tell after these events. They hold P3 themselves."""
        told: list[KVEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, told)
            elif isinstance(event, BlockRemoved):
                self._remove(event, told)
            else:
                if event.medium is None:
                    self._held.clear()
                    self._children.clear()
                told.append(event)
        return told

    def _store(self, event: BlockStored, told: list[KVEvent]) -> None:
        for one in _each(event):
            number, parent = one.block_hashes[0], one.parent_block_hash
            held = self._held.get(number)
            if held is None:
                held = self._held[number] = _KnownBlock(one)
                if parent is not None:
                    self._children.setdefault(parent, {})[number] = None
            held.media[event.medium] = None
        parent = event.parent_block_hash
        if parent is not None and not self._is_told(parent):
            return
        told.append(event)
        new = [number for number in event.block_hashes if not self._held[number].is_told]
        for number in new:
            self._held[number].is_told = True
        more: list[BlockStored] = []
        for number in new:
            held = self._held[number]
            more += (replace(held.one, medium=medium) for medium in held.media if medium != event.medium)
        waiting = [child for number in new for child in self._children.get(number, ())]
        while waiting:
            number = waiting.pop()
            held = self._held[number]
            if held.is_told:
                continue
            held.is_told = True
            more += (replace(held.one, medium=medium) for medium in held.media)
            waiting += self._children.get(number, ())
        told += _joined(more)

    def _remove(self, event: BlockRemoved, told: list[KVEvent]) -> None:
        known = tuple(number for number in event.block_hashes if self._is_told(number))
        for number in event.block_hashes:
            if number in self._held:
                self._held[number].media.pop(event.medium, None)
        told += self._in_order(event, known, self._unreachable(known))
        for number in event.block_hashes:
            held = self._held.get(number)
            if held is not None and not held.media:
                self._forget(number, held.one.parent_block_hash)

    def _unreachable(self, known: tuple[int, ...]) -> list[int]:
        """What is told no longer because some of `known` have left their last medium: those, and what stands on them.
        Children before their parents."""
        gone: list[int] = []
        for root in known:
            waiting = [] if self._held[root].media else [root]
            under: list[int] = []  # parents first
            while waiting:
                number = waiting.pop()
                if self._is_told(number):
                    self._held[number].is_told = False
                    under.append(number)
                    waiting += self._children.get(number, ())
            gone += reversed(under)
        return gone

    def _in_order(self, event: BlockRemoved, known: tuple[int, ...], gone: list[int]) -> list[KVEvent]:
        """The removals of `known` from the event's medium, and of `gone` from all media, as P1 wants them."""
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
            replace(event, block_hashes=tuple(one[0] for one in run), reason=reason, medium=medium)
            for (reason, medium), run in groupby(pieces, key=lambda one: one[1:])
        ]

    def _forget(self, number: int, parent: int | None) -> None:
        del self._held[number]
        if parent is not None:
            siblings = self._children[parent]
            del siblings[number]
            if not siblings:
                del self._children[parent]

    def _is_told(self, number: int) -> bool:
        held = self._held.get(number)
        return held is not None and held.is_told


def _each(event: BlockStored) -> Iterable[BlockStored]:
    """Its blocks, an event each."""
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


def _joined(ones: list[BlockStored]) -> list[KVEvent]:
    """Those one behind the other in one event."""
    joined: list[KVEvent] = []
    run: list[BlockStored] = []
    for at, one in enumerate(ones):
        run.append(one)
        following = ones[at + 1] if at + 1 < len(ones) else None
        if (
            following is not None
            and following.medium == one.medium
            and following.parent_block_hash == one.block_hashes[0]
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
