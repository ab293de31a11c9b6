"""Accounts: whose memory a unit counts in, and how much of it the others must leave or nobody may exceed.

A unit counts in the account of the sequence it was allocated for until it is free again, whoever uses it meanwhile.
Account 0 is nobody's: it has no limits. Of the others,

    floor   units below which no eviction for another's need brings the account
    quota   units that it may own; its own cached ones go before it would own more

A call of `reserve` is decided as a whole, before anything changes, so that nothing fails in its middle. With `need`
units wanted by an account in the call, it may lose

    budget = need + max(0, owned - floor)

cached units by evictions, its own included: so it ends with no fewer than min(owned, floor). What the call may take is
then free + the sum over accounts of min(cached, budget), in whichever order the sequences come.

Cost: O(accounts) for each decision, O(1) for each unit.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOBODY", "NO_QUOTA", "Account", "Accounts"]

NOBODY = 0
NO_QUOTA = -1


@dataclass
class Account:
    """Limits, what it owns now, and what it needs and may lose in the call under way."""

    floor: int = 0
    quota: int = NO_QUOTA
    num_owned: int = 0  # held + cached + leased units
    need: int = 0
    budget: int = 0


class Accounts:
    """By number; one is made when it is first mentioned."""

    def __init__(self) -> None:
        self.by_number: dict[int, Account] = {NOBODY: Account()}

    def __getitem__(self, number: int) -> Account:
        return self.by_number.setdefault(number, Account())

    def set_limits(self, number: int, floor: int, quota: int) -> None:
        account = self[number]
        account.floor, account.quota = floor, quota

    def need(self, needs: dict[int, int]) -> None:
        """Begin a call in which the accounts need so many units."""
        for number, account in self.by_number.items():
            account.need = needs.get(number, 0)
            account.budget = account.need + max(0, account.num_owned - account.floor)

    def sum_of_other_floors(self, number: int) -> int:
        return sum(account.floor for other, account in self.by_number.items() if other != number)
