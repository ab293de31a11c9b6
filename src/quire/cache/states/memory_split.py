"""`MemorySplit`: the numbers of blocks and state slots in one memory, and the exchange between them. Numbers only: the
callbacks (`resize_blocks`, `give_back_slots`) move the bytes.

A `StateCache` has two pools under one budget. It asks here before it evicts, and before it reports that there is no
room:

    short of blocks   1. Free slots become blocks.
                      2. So do slots of checkpoints that are worth less than the average cached content.
                      3. Cached blocks are evicted.
                      4. All checkpoints go that no sequence is about to copy.
    short of slots    1. Free blocks become slots.
                      2. A checkpoint worth less than the average cached content gives its slot away.
                      3. Else cached blocks are evicted and become a slot.

A checkpoint's worth is tokens saved per byte. Its bytes are those of its state, and of the K and V that are useless
without it; a checkpoint whose K and V are gone is worth nothing. The average is over the bytes of all cached blocks and
all checkpoints, so K and V without a checkpoint lower it, and are then the ones evicted. So neither pool starves the
other: long prompts drive states out, and many short ones drive out blocks.

Free memory moves by `_unit_bytes` at a time, or by one state if that is more. Fewer free blocks than that stay blocks:
new blocks do not become slots in the next step.

Invariants
    X1  slots and blocks together take at most `num_bytes`.
    X2  there are at least as many slots as sequences and pins need, and at least two in addition to those of pins; at
        least as many blocks as are in use, and as owners' floors.

Cost: 0 while neither is short; else O(checkpoints + blocks and slots moved), and one or two prefix look-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quire.cache.states.checkpoints import Checkpoint, Checkpoints
from quire.errors import CapacityError, InvariantError
from quire.spec import KVSpec

__all__ = ["MemorySplit"]

_UNIT_BYTES = 2 << 20
_SMALLEST_SHARE = 64  # of all bytes: the unit of small memories


class MemorySplitCache(Protocol):
    """The part of `StateCache` that `MemorySplit` uses."""

    spec: KVSpec
    num_blocks: int
    num_state_slots: int
    num_slot_ids: int
    checkpoints: Checkpoints

    @property
    def least_state_slots(self) -> int: ...

    @property
    def num_state_slots_needed(self) -> int: ...

    @property
    def num_free_state_slots(self) -> int: ...

    @property
    def sum_of_floors(self) -> int: ...

    def free_and_cached_blocks(self) -> tuple[int, int]: ...
    def num_blocks_for(self, num_tokens: int) -> int: ...
    def free_state_slots(self) -> list[int]: ...
    def victim(self) -> Checkpoint | None: ...
    def has_kv_of(self, checkpoint: Checkpoint) -> bool: ...
    def evict_checkpoint(self, checkpoint: Checkpoint) -> None: ...
    def add_state_slots(self, num: int) -> None: ...
    def give_up_state_slots(self, slots: list[int]) -> None: ...
    def resize(self, num_blocks: int) -> Any: ...


class MemorySplit:
    """See the module's text. num_bytes: of slots and blocks together. max_blocks, max_slots: the numbers that have
    addresses. block_bytes: 0 where blocks hold no bytes (a model of states alone): their number stays."""

    def __init__(
        self,
        cache: MemorySplitCache,
        *,
        num_bytes: int,
        slot_bytes: int,
        block_bytes: int,
        max_slots: int,
        max_blocks: int,
    ) -> None:
        self._cache = cache
        self.num_bytes = num_bytes
        self.slot_bytes = slot_bytes
        self.block_bytes = block_bytes
        self.max_slots = max_slots
        self.max_blocks = max_blocks
        self.resize_blocks: Callable[[int], Any] = cache.resize
        """Gives the cache so many blocks, and moves their memory. *raises:* CapacityError: the system refuses; the
        number of blocks is unchanged."""
        self.give_back_slots: Callable[[list[int]], None] = lambda slots: None
        """Takes the memory of slots that the cache has just given up."""
        self.on_more_slots: Callable[[int], None] = lambda num_ids: None
        """Called when there are more slots, with the bound that every slot id is below."""
        self.num_slots_to_blocks = 0  # since the start
        self.num_slots_from_blocks = 0

    # Possible numbers

    def blocks_beside(self, num_slots: int) -> int:
        """Blocks that fit in memory and addresses next to so many slots."""
        return self._blocks_within(self.num_bytes, num_slots)

    def _blocks_within(self, num_bytes: int, num_slots: int) -> int:
        """`blocks_beside` for another budget."""
        if not self.block_bytes:
            return self._cache.num_blocks
        return max(0, min(self.max_blocks, (num_bytes - num_slots * self.slot_bytes) // self.block_bytes))

    def slots_beside(self, num_blocks: int) -> int:
        """Slots that fit in memory and addresses next to so many blocks."""
        return max(
            0, min(self.max_slots, (self.num_bytes - num_blocks * self.block_bytes) // self.slot_bytes)
        )

    @property
    def num_possible_blocks(self) -> int:
        """Blocks that one sequence could have while no other is open."""
        return self.blocks_beside(self._cache.least_state_slots)

    @property
    def blocks_to_come(self) -> int:
        """Blocks that unneeded slots could become now."""
        cache = self._cache
        needed = max(cache.least_state_slots, cache.num_state_slots_needed)
        return max(0, self.blocks_beside(needed) - cache.num_blocks)

    @property
    def slots_to_come(self) -> int:
        """Slots that unused blocks could become now."""
        free, cached = self._cache.free_and_cached_blocks()
        return self._slots_of(self._spare(free, cached))

    def _spare(self, free: int, cached: int) -> int:
        """Blocks that could become slots. Cached ones do not count if owners have floors: the owner of the evicted ones
        is unknown."""
        cache = self._cache
        return max(
            0, min(free + (0 if cache.sum_of_floors else cached), cache.num_blocks - self._least_blocks)
        )

    @property
    def _least_blocks(self) -> int:
        """Blocks that always stay blocks: those of the floors, and of a first token."""
        return max(self._cache.sum_of_floors, self._cache.num_blocks_for(1))

    def _slots_of(self, num_blocks: int) -> int:
        """More slots that could exist with so many blocks less."""
        cache = self._cache
        return max(0, self.slots_beside(cache.num_blocks - num_blocks) - cache.num_state_slots)

    @property
    def _unit_bytes(self) -> int:
        return max(self.slot_bytes, min(_UNIT_BYTES, self.num_bytes // _SMALLEST_SHARE))

    def check(self) -> None:
        """X1 and X2. *raises:* InvariantError."""
        cache = self._cache
        num_slots, num_blocks = cache.num_state_slots, cache.num_blocks
        num_bytes = num_slots * self.slot_bytes + num_blocks * self.block_bytes
        if num_bytes > self.num_bytes:
            raise InvariantError(
                f"X1: expected at most {self.num_bytes} bytes, got {num_bytes}: {num_slots} slots, {num_blocks} blocks"
            )
        if num_slots < 2 or num_blocks < cache.sum_of_floors:
            raise InvariantError(
                f"X2: expected two slots and {cache.sum_of_floors} blocks, got {num_slots} and {num_blocks}"
            )

    # Another budget

    def fits_in(self, num_bytes: int) -> bool:
        """Whether everything in use, and the least numbers, would fit in so many bytes."""
        num_slots, num_blocks = self._needed()
        return num_slots * self.slot_bytes + num_blocks * self.block_bytes <= num_bytes

    def _needed(self) -> tuple[int, int]:
        """The least numbers of slots and blocks: in use, or always needed."""
        cache = self._cache
        free, cached = cache.free_and_cached_blocks()
        num_slots = max(cache.least_state_slots, cache.num_state_slots_needed)
        return num_slots, max(self._least_blocks, cache.num_blocks - free - cached)

    def resize(self, num_bytes: int) -> None:
        """Changes the budget of both to so many bytes. A smaller budget shrinks both in proportion.

        *raises:* CapacityError: the memory in use does not fit, or the system refuses the memory; the numbers of slots
        and blocks are unchanged.
        """
        cache = self._cache
        least_slots, least_blocks = self._needed()
        if not self.fits_in(num_bytes):
            least_bytes = least_slots * self.slot_bytes + least_blocks * self.block_bytes
            raise CapacityError(
                f"expected at least {least_bytes} bytes for {least_slots} state slots and {least_blocks} blocks in "
                f"use, got {num_bytes} in resize; close sequences"
            )
        num_slots = cache.num_state_slots
        if num_bytes < self.num_bytes:
            num_slots = num_slots * num_bytes // self.num_bytes
        num_slots = min(
            cache.num_state_slots,
            max(num_slots, least_slots),
            (num_bytes - least_blocks * self.block_bytes) // self.slot_bytes,
        )
        if self.block_bytes:
            self.resize_blocks(self._blocks_within(num_bytes, num_slots))  # first: the system may refuse it
        slots = self._slots_given_up(cache.num_state_slots - num_slots, 0, lambda _: True)
        if slots:
            cache.give_up_state_slots(slots)
            self.give_back_slots(slots)
        self.num_bytes = num_bytes

    # Moving

    def for_blocks(self, num_blocks: int, num_slots: int) -> None:
        """Before a reservation of so many blocks: frees memory that costs less than evicting. num_slots: slots that
        stay."""
        free, _ = self._cache.free_and_cached_blocks()
        self._to_blocks(num_blocks - free, num_slots, must=False)

    def for_more_blocks(self, num_blocks: int, num_slots: int) -> bool:
        """After so many blocks were refused: whether there are more now. Changes nothing if they would not suffice."""
        free, cached = self._cache.free_and_cached_blocks()
        return self._to_blocks(max(1, num_blocks - free - cached), num_slots, must=True)

    def make_blocks(self, num_blocks: int) -> bool:
        """Makes so many blocks, of slots if there are fewer; whether there are so many. Makes no block in vain."""
        if num_blocks > self._cache.num_blocks + self.blocks_to_come:
            return False
        self._to_blocks(num_blocks - self._cache.num_blocks, 0, must=True)
        return num_blocks <= self._cache.num_blocks

    def _to_blocks(self, short: int, num_slots: int, *, must: bool) -> bool:
        cache, size = self._cache, self.slot_bytes
        if short <= 0 or not self.block_bytes:
            return False
        unused = self.num_bytes - cache.num_state_slots * size - cache.num_blocks * self.block_bytes
        wanted = max(0, -(-(short * self.block_bytes - unused) // size))
        num_movable = cache.num_state_slots - max(
            cache.least_state_slots, cache.num_state_slots_needed, num_slots
        )
        if must and wanted > num_movable:
            return False
        num_movable = max(0, num_movable)
        num_free = min(num_movable, self._unit_bytes // size) if wanted else 0
        slots = self._slots_given_up(
            min(wanted, num_movable), num_free, lambda victim: must or self._is_worth_less(victim)
        )
        cache.give_up_state_slots(slots)
        num_blocks = self.blocks_beside(cache.num_state_slots)
        has_more = num_blocks > cache.num_blocks
        if has_more and not self._resize_blocks_or_keep(num_blocks):
            cache.add_state_slots(len(slots))
            return False
        if slots:
            self.give_back_slots(slots)
            self.num_slots_to_blocks += len(slots)
        return has_more

    def _resize_blocks_or_keep(self, num_blocks: int) -> bool:
        """Whether there are so many blocks now; if the system refuses, their number is unchanged."""
        try:
            self.resize_blocks(num_blocks)
        except CapacityError:
            return False
        return True

    def _slots_given_up(self, num: int, num_free: int, may_go: Callable[[Checkpoint], bool]) -> list[int]:
        """So many unneeded slots, or up to `num_free` if more are free; fewer if no further checkpoint may go."""
        cache = self._cache
        # Read anew each time: the evicted checkpoint may have been the only target of a copy from a free slot.
        while len(slots := cache.free_state_slots()) < num:
            victim = cache.victim()
            if victim is None or not may_go(victim):
                break
            cache.evict_checkpoint(victim)
        return slots[::-1][: max(num, num_free, 0)]

    def for_slots(self, num_slots: int, num_blocks: int) -> None:
        """Before a reservation of so many slots: frees slots where that costs less than a checkpoint. num_blocks:
        blocks that stay free or cached."""
        cache = self._cache
        short = num_slots - cache.num_free_state_slots
        if short <= 0:
            return
        free, cached = cache.free_and_cached_blocks()
        unit = self._unit_bytes
        left = num_blocks + (unit // self.block_bytes if self.block_bytes else 0)
        num = min(max(short, unit // self.slot_bytes), self._slots_of(self._spare(free - left, 0)))
        if num < short:
            victim = cache.victim()
            if victim is None or not self._is_worth_less(victim):
                num = max(num, min(short, self._slots_of(self._spare(free - num_blocks, cached))))
        if num <= 0:
            return
        wanted = min(cache.num_blocks, self.blocks_beside(cache.num_state_slots + num))
        if wanted == cache.num_blocks or self._resize_blocks_or_keep(wanted):
            cache.add_state_slots(num)
            self.on_more_slots(cache.num_slot_ids)
            self.num_slots_from_blocks += num

    def _is_worth_less(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is worth less than the average cached content, in tokens saved per byte."""
        cache = self._cache
        if not cache.has_kv_of(checkpoint):
            return True
        each = cache.spec.bytes_per_token if self.block_bytes else 0
        own = cache.checkpoints.worth(checkpoint)
        all_saved = sum(map(cache.checkpoints.worth, cache.checkpoints))
        _, cached = cache.free_and_cached_blocks()
        all_bytes = len(cache.checkpoints) * self.slot_bytes + cached * self.block_bytes
        return own * all_bytes < all_saved * (self.slot_bytes + own * each)
