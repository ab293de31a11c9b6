"""The pool: `num_blocks` units, each in exactly one state, and how many block tables name it.

    free     no known content, nobody names it            in the set of free ones (`free_units.py`)
    cached   content known to the tree, nobody names it   in the eviction order (`eviction.py`)
    held     some block table names it                    on no list
    leased   nobody names it, but a step under way may    on the lease list, oldest first
             still read or write it

and beside them the ids given up by a resize, which are no units of the pool until it grows again.

The pool knows no tokens and no tree; who moves a unit says whether its content is known. Every move is O(1), but for
what the set of free units costs.
Every unit that is not free counts in one account (`accounts.py`).

Invariants
    P1  free + cached + held + leased = num_blocks, each unit in one list only; with those given up they are all
        ids from 0 to `num_ids` - 1.
    P2  `num_references[unit]` is the number of table entries that name it; it is 0 unless the unit is held.
    P3  an account's `num_owned` is the number of units that are not free and count in it.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.cache.accounts import NO_QUOTA, Accounts
from quire.cache.eviction import EvictionOrder
from quire.cache.free_units import FreeUnits

__all__ = ["NO_WRITER", "Pool"]

NO_WRITER = -1


class Pool:
    """Units 0 .. num_blocks - 1 at first. run_blocks: how many of them make a run; see `FreeUnits`."""

    def __init__(self, num_blocks: int, run_blocks: int) -> None:
        self.num_ids = num_blocks
        self.run_blocks = run_blocks
        self.given_up: list[int] = []
        self.free = FreeUnits(num_blocks, run_blocks)
        self.cached = EvictionOrder(num_blocks)
        self.accounts = Accounts()
        # Unit -> the step that has to complete first.
        self.leased: OrderedDict[int, int] = OrderedDict()
        self.num_references = [0] * num_blocks
        # The one sequence that may write beyond what is committed in the unit.
        self.writer = [NO_WRITER] * num_blocks
        # The newest step that one of those who let go of the unit may still have under way.
        self.busy_until = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return self.num_ids - len(self.given_up)

    @property
    def num_available(self) -> int:
        """Units that could be handed out: free ones, and cached ones after an eviction."""
        return len(self.free) + len(self.cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self.free) - len(self.cached) - len(self.leased)

    # Accounts

    def available(self, needs: dict[int, int]) -> int:
        """Units that a call could be given in which the accounts need so many; begins that call."""
        self.accounts.need(needs)
        return len(self.free) + sum(
            min(self.cached.num_cached(number), account.budget)
            for number, account in self.accounts.by_number.items()
        )

    def exceeds_a_quota(self, needs: dict[int, int]) -> bool:
        """Whether what cannot be evicted and what is needed are more than a quota."""
        return any(need and self.room_in_quota(number) < need for number, need in needs.items())

    def room_in_quota(self, number: int) -> int:
        """Units that the account may still take before its quota, its cached ones given up."""
        account = self.accounts[number]
        if account.quota == NO_QUOTA:
            return self.num_ids
        return account.quota - account.num_owned + self.cached.num_cached(number)

    def fits(self, needs: dict[int, int], num_left: int) -> bool:
        """Whether the accounts can be given what they need and `num_left` units would still be available."""
        return not self.exceeds_a_quota(needs) and sum(needs.values()) + num_left <= self.available(needs)

    def num_available_to(self, number: int) -> int:
        """Units that this account alone could be given now."""
        # It needs as many as it can get, so all of its own cached units may go.
        available = self.available({number: self.num_blocks})
        return max(0, min(available, self.room_in_quota(number)))

    def max_units(self, number: int) -> int:
        """Units that the account is sure to get once nobody else holds any."""
        limits = self.accounts.by_number.get(number)
        most = self.num_blocks - self.accounts.sum_of_other_floors(number)
        return max(0, most if limits is None or limits.quota == NO_QUOTA else min(most, limits.quota))

    def account_counts(self, number: int) -> tuple[int, int, int]:
        """(held, cached, leased) units that count in it."""
        cached = self.cached.num_cached(number)
        leased = sum(self.cached.account[unit] == number for unit in self.leased)
        owned = self.accounts.by_number[number].num_owned if number in self.accounts.by_number else 0
        return owned - cached - leased, cached, leased

    def _disown(self, unit: int) -> None:
        self.accounts[self.cached.account[unit]].num_owned -= 1

    # Moves

    def take(self, unit: int, retention: int) -> None:
        """One more table names the unit, whose content is known (it is cached, leased or held)."""
        if not self.num_references[unit]:
            if unit in self.cached:
                self.cached.remove(unit)
            else:
                del self.leased[unit]
        self.num_references[unit] += 1
        self.cached.retention[unit] = max(self.cached.retention[unit], retention)

    def pop_free(self, account: int, retention: int, before: int, position: int) -> int:
        """A free unit, now held by one table and counting in the account.

        For its block at `position`, behind the one that has the unit `before` (negative: none)."""
        unit = self.free.take(before, position)
        self.num_references[unit] = 1
        self.cached.account[unit], self.cached.retention[unit] = account, retention
        self.accounts[account].num_owned += 1
        return unit

    def park(self, unit: int, *, is_known: bool, lease: int) -> None:
        """A unit that nobody names any more: leased until step `lease` if that is not 0, else settled."""
        if lease:
            self.leased[unit] = lease
        elif is_known:
            self.cached.append(unit)
        else:
            self._disown(unit)
            self.free.add(unit)

    def uncache(self, unit: int) -> None:
        """Its content is not known any more: a cached unit becomes free, another one stays what it is."""
        if unit in self.cached:
            self.cached.remove(unit)
            self._disown(unit)
            self.free.add(unit)

    def give_up(self) -> int:
        """The lowest of the free units leaves the pool."""
        unit = self.free.take_lowest()
        self.given_up.append(unit)
        return unit

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks` units: those given up last come back first, then there are new ones."""
        while self.num_blocks < num_blocks and self.given_up:
            self.free.add(self.given_up.pop())
        num_new = max(0, num_blocks - self.num_blocks)
        self.free.grow(num_new)
        self.num_ids += num_new
        self.num_references += [0] * num_new
        self.writer += [NO_WRITER] * num_new
        self.busy_until += [0] * num_new
        self.cached.grow(num_new)

    def oldest_lease(self) -> tuple[int, int] | None:
        """(unit, step) of the lease that ends first."""
        return next(iter(self.leased.items()), None)

    def reset(self) -> None:
        """Everything that is not leased is free. Nothing may be held."""
        for unit in self.cached:
            self._disown(unit)
        self.cached.clear()
        self.free = FreeUnits(self.num_ids, self.run_blocks)
        for unit in (*self.leased, *self.given_up):
            self.free.remove(unit)
