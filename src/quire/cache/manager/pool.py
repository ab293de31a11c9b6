"""The pool: `num_blocks` blocks, each in exactly one state, and how many block tables name it.

    free       no known content, no table names it            in the set of free ones (`free_blocks.py`)
    cached     content known to the tree, no table names it   in the eviction order (`eviction.py`)
    held       some block table names it                      on no list
    in flight  no table names it, but a running step may      on the lease list, oldest first
               still read or write it

In addition there are the ids given up by a resize, which are no blocks of the pool until it grows again.

The pool knows no tokens and no tree; the caller of a move says whether the content is known. Every move is O(1), plus
the cost of the set of free blocks.
Every block that is not free counts in one owner (`owners.py`).

Invariants
    P1  free + cached + held + in flight = num_blocks, each block in one list only; with the ids given up they are all
        ids from 0 to `num_ids` - 1.
    P2  `num_references[block_id]` is the number of table entries that name it; it is 0 unless the block is held.
    P3  an owner's `num_owned` is the number of blocks that are not free and count in it.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.cache.manager.eviction import EvictionOrder, EvictionPolicy
from quire.cache.manager.free_blocks import FreeBlocks
from quire.cache.manager.owners import NO_QUOTA, Owners

__all__ = ["NO_WRITER", "Pool"]

NO_WRITER = -1


class Pool:
    """Blocks 0 .. num_blocks - 1 at first. run_blocks: how many of them make a run; see `FreeBlocks`."""

    def __init__(
        self,
        num_blocks: int,
        run_blocks: int,
        policy: EvictionPolicy | None = None,
        *,
        counts_uses: bool = False,
    ) -> None:
        self.num_ids = num_blocks
        self.run_blocks = run_blocks
        self.given_up: list[int] = []
        self.free = FreeBlocks(num_blocks, run_blocks)
        self.cached = EvictionOrder(num_blocks, policy, counts_uses=counts_uses)
        self.owner_ids = Owners()
        # Block -> the step that has to complete first.
        self.in_flight: OrderedDict[int, int] = OrderedDict()
        self.num_references = [0] * num_blocks
        # The one sequence that may write after the committed tokens of the block.
        self.writer = [NO_WRITER] * num_blocks
        # The newest step that may still use the block, over all sequences that released it.
        self.busy_until = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return self.num_ids - len(self.given_up)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be handed out: free ones, and cached ones after an eviction."""
        return len(self.free) + len(self.cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self.free) - len(self.cached) - len(self.in_flight)

    # Owners

    def available(self, needs: dict[int, int]) -> int:
        """Begins a call in which the owners need so many blocks; the blocks that it could be given."""
        self.owner_ids.need(needs)
        return len(self.free) + sum(
            min(self.cached.num_cached(number), owner_id.budget)
            for number, owner_id in self.owner_ids.by_number.items()
        )

    def exceeds_a_quota(self, needs: dict[int, int]) -> bool:
        """Whether an owner's need and its blocks that cannot be evicted exceed its quota."""
        return any(need and self.room_in_quota(number) < need for number, need in needs.items())

    def room_in_quota(self, number: int) -> int:
        """Blocks that the owner may still take before its quota, once its cached ones are given up."""
        owner_id = self.owner_ids[number]
        if owner_id.quota == NO_QUOTA:
            return self.num_ids
        return owner_id.quota - owner_id.num_owned + self.cached.num_cached(number)

    def fits(self, needs: dict[int, int], num_left: int) -> bool:
        """Whether the owners can get the blocks they need with `num_left` blocks still available."""
        return not self.exceeds_a_quota(needs) and sum(needs.values()) + num_left <= self.available(needs)

    def num_available_to(self, number: int) -> int:
        """Blocks that this owner alone could be given now."""
        # It needs as many as it can get, so all of its own cached blocks may go.
        available = self.available({number: self.num_blocks})
        return max(0, min(available, self.room_in_quota(number)))

    def max_owner_blocks(self, number: int) -> int:
        """Blocks that the owner is sure to get once no other owner holds any."""
        limits = self.owner_ids.by_number.get(number)
        most = self.num_blocks - self.owner_ids.sum_of_other_floors(number)
        return max(0, most if limits is None or limits.quota == NO_QUOTA else min(most, limits.quota))

    def owner_counts(self, number: int) -> tuple[int, int, int]:
        """(held, cached, in flight) blocks that count in it."""
        cached = self.cached.num_cached(number)
        in_flight = sum(self.cached.owner_id[block_id] == number for block_id in self.in_flight)
        owned = self.owner_ids.by_number[number].num_owned if number in self.owner_ids.by_number else 0
        return owned - cached - in_flight, cached, in_flight

    def _disown(self, block_id: int) -> None:
        self.owner_ids[self.cached.owner_id[block_id]].num_owned -= 1

    # Moves

    def take(self, block_id: int, cache_priority: int) -> None:
        """One more table names the block, whose content is known (it is cached, in flight or held)."""
        if not self.num_references[block_id]:
            if block_id in self.cached:
                self.cached.remove(block_id)
            else:
                del self.in_flight[block_id]
        self.num_references[block_id] += 1
        self.cached.cache_priority[block_id] = max(self.cached.cache_priority[block_id], cache_priority)
        if self.cached.policy is not None:
            self.cached.policy.used(block_id)

    def pop_free(self, owner_id: int, cache_priority: int, before: int, position: int) -> int:
        """A free block, now held by one table and counting in the owner.

        It is for `position`, after the block `before` of the previous position (negative: there is none).
        """
        block_id = self.free.take(before, position)
        self.num_references[block_id] = 1
        self.cached.owner_id[block_id], self.cached.cache_priority[block_id] = owner_id, cache_priority
        self.cached.uses[block_id] = 1
        self.owner_ids[owner_id].num_owned += 1
        if self.cached.policy is not None:
            self.cached.policy.stored(block_id)
        return block_id

    def park(self, block_id: int, *, is_known: bool, flight: int, least_key: float) -> None:
        """Takes a block that no table names any more: in flight until step `flight` if that is not 0, else settled.

        least_key: see `EvictionOrder.append`.
        """
        if flight:
            self.in_flight[block_id] = flight
        elif is_known:
            self.cached.append(block_id, least_key)
        else:
            self._disown(block_id)
            self.free.add(block_id)

    def uncache(self, block_id: int) -> None:
        """The block's content is no longer known: a cached block becomes free, any other keeps its state."""
        if block_id in self.cached:
            self.cached.remove(block_id)
            self._disown(block_id)
            self.free.add(block_id)

    def give_up(self) -> int:
        """The lowest of the free blocks leaves the pool."""
        block_id = self.free.take_lowest()
        self.given_up.append(block_id)
        return block_id

    def grow(self, num_blocks: int) -> None:
        """Grows to `num_blocks` blocks: those given up last come back first, then there are new ones."""
        while self.num_blocks < num_blocks and self.given_up:
            self.free.add(self.given_up.pop())
        num_new = max(0, num_blocks - self.num_blocks)
        self.free.grow(num_new)
        self.num_ids += num_new
        self.num_references += [0] * num_new
        self.writer += [NO_WRITER] * num_new
        self.busy_until += [0] * num_new
        self.cached.grow(num_new)

    def oldest_flight(self) -> tuple[int, int] | None:
        """(block, step) of the lease that ends first."""
        return next(iter(self.in_flight.items()), None)

    def reset(self) -> None:
        """Frees every block that is not in flight. No block may be held."""
        for block_id in self.cached:
            self._disown(block_id)
        self.cached.clear()
        self.free = FreeBlocks(self.num_ids, self.run_blocks)
        for block_id in (*self.in_flight, *self.given_up):
            self.free.remove(block_id)
