"""Owners: the accounts that blocks count in, each with a floor that the others must leave and a quota.

A block counts in the owner of the sequence it was allocated for until it is free again, even if others use it. Owner 0
stands for no owner and has no limits. The others have

    floor   blocks below which no eviction for another's need brings the owner
    quota   blocks that it may own; its own cached ones go before it would own more

A call of `reserve` is decided as a whole, before anything changes, so that it never fails in its middle. An owner that
wants `need` blocks in the call may lose

    budget = need + max(0, owned - floor)

cached blocks by evictions, its own included: so it ends with no fewer than min(owned, floor). The call may then take
free + the sum over owners of min(cached, budget), in any order of the sequences.

Cost: O(owners) for each decision, O(1) for each block.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOBODY", "NO_QUOTA", "Owner", "Owners"]

NOBODY = 0
NO_QUOTA = -1


@dataclass
class Owner:
    """An owner's limits and owned blocks, and its need and budget in the present call."""

    floor: int = 0
    quota: int = NO_QUOTA
    num_owned: int = 0  # held + cached + in flight blocks
    need: int = 0
    budget: int = 0


class Owners:
    """Owners by number; each is made at its first use."""

    def __init__(self) -> None:
        self.by_number: dict[int, Owner] = {NOBODY: Owner()}

    def __getitem__(self, number: int) -> Owner:
        return self.by_number.setdefault(number, Owner())

    def set_limits(self, number: int, floor: int, quota: int) -> None:
        owner_id = self[number]
        owner_id.floor, owner_id.quota = floor, quota

    def need(self, needs: dict[int, int]) -> None:
        """Begin a call in which the owners need so many blocks."""
        for number, owner_id in self.by_number.items():
            owner_id.need = needs.get(number, 0)
            owner_id.budget = owner_id.need + max(0, owner_id.num_owned - owner_id.floor)

    def sum_of_other_floors(self, number: int) -> int:
        return sum(owner_id.floor for other, owner_id in self.by_number.items() if other != number)
