"""Whose memory is short, and who gives way: quotas and floors of accounts, pins, as the scheduler needs them.

The cache enforces limits unit by unit (`quire.cache.accounts`); here is what they mean for whole requests.

    can ever have   the smaller of quota - own pins, and pool - what floors and pins keep from it
    short           an account that holds what it can ever have and needs more: one of its own gives way
    gives way       else the last of those whose account is above its floor; never the first of all

Cost: O(accounts) a question.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from quire.cache.units import max_tokens_for
from quire.engine.request import Sample
from quire.errors import CapacityError
from quire.sizes import format_size

__all__ = ["FairShare", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Of an account, in units; quota -1: none. name: for messages."""

    name: str
    floor: int = 0
    quota: int = -1


class FairShare:
    """See the module's text. cache: a `quire.Cache`; without limits and pins its questions cost nothing."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._limits: dict[int, Limits] = {}

    def set(self, account: int, limits: Limits | None) -> None:
        """*raises:* ArgumentError where the cache cannot; nothing was changed."""
        if limits is None:
            self._limits.pop(account, None)
            self._cache.set_limits(account)
            return
        if limits.floor or limits.quota >= 0 or account in self._limits:
            self._cache.set_limits(account, limits.floor, limits.quota)
        self._limits[account] = limits

    def sum_of_floors(self) -> int:
        return sum(limits.floor for limits in self._limits.values())

    # -- whole requests --------------------------------------------------------------------------------

    def can_ever_have(self, account: int) -> int:
        """Units that one request of the account could get if no other ran, pins of its own not counted."""
        pins = self._cache.pins
        others = set(self._limits) | set(pins.accounts)
        kept = sum(
            max(self._limits[other].floor if other in self._limits else 0, pins.units_of(other))
            for other in others
            if other != account
        )
        own = pins.units_of(account)
        units = self._cache.num_blocks - kept - own
        limits = self._limits.get(account)
        if limits is not None and limits.quota >= 0:
            units = min(units, limits.quota - own)
        return units

    def max_tokens(self, account: int) -> int:
        """The longest sequence that the account could ever have, pins not counted; 0 for none."""
        cache = self._cache
        if not self._limits and not len(cache.pins):
            return cache.max_tokens_alone()
        return max_tokens_for(cache.spec, max(0, self.can_ever_have(account)), cache.block_size)

    def check_fits(self, account: int, num_tokens: int, num_shared: int, what: str) -> None:
        """*raises:* CapacityError unless a sequence of so many tokens could be computed in this account alone.

        num_shared: units of those it needs that pins hold for it.
        """
        cache = self._cache
        needed = cache.units_alone(num_tokens) - num_shared
        most = self.can_ever_have(account)
        if needed <= most:
            return
        unit, size, own = cache.unit, cache.unit_bytes, cache.pins.units_of(account)
        limits = self._limits.get(account)
        owner = f"of tenant {limits.name!r} " if limits is not None else ""
        numbers = f"got one {owner}of {num_tokens} tokens that needs {needed} {unit}s of "
        if limits is not None and 0 <= limits.quota < needed + own:
            raise CapacityError(
                f"expected a request that fits in its tenant's quota, {numbers}{limits.quota} "
                f"({format_size(limits.quota * size)}, {own} {unit}s of them pinned) - in {what}; lower max_tokens or "
                f"shorten the prompt, or raise the quota to {format_size((needed + own) * size)}"
            )
        kept, stats = cache.num_blocks - most, cache.stats()
        withheld = f", {kept} of which pins and other tenants' floors keep" if kept else ""
        raise CapacityError(
            f"expected a request that fits in the KV cache, {numbers}{cache.num_blocks}{withheld} (free "
            f"{stats['free']}, cached {stats['cached']}, held {stats['held']}) - in {what}; lower max_tokens or "
            f"shorten the prompt to at most {self.max_tokens(account)} tokens in all, or raise kv_memory by a factor "
            f"of {(needed + kept) / cache.num_blocks:.2f}"
        )

    # -- a step ----------------------------------------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """Whether some account has a name here."""
        return bool(self._limits)

    def waits_for(self, account: int, units: int, num_taken: int) -> Literal["itself", "others"] | None:
        """Whose units an account has to wait for that wants so many beyond `num_taken`, promised to it already.

        "itself": it would have more than it can ever have. "others": what is free now is kept for their floors.
        None: for nobody's; whether the pool has them is another question.
        """
        if not self._limits:
            return None
        counts = self._cache.account_counts(account)
        if counts.held + counts.leased + num_taken + units > self._cache.max_units(account):
            return "itself"
        return "others" if num_taken + units > self._cache.num_available(account) else None

    def may_give_way(self, live: list[Sample], chosen: Iterable[tuple[Sample, int]]) -> list[Sample]:
        """Of those that run or load (sorted), among whom the last is to give way, as `chosen` has no room.

        The first of them stays, where there is another one.
        """
        if not self._limits:
            return live
        by_account: dict[int, list[tuple[Sample, int]]] = {}
        for sample, n in chosen:
            by_account.setdefault(sample.request.account, []).append((sample, n))
        for account, samples in by_account.items():
            if account not in self._limits:
                continue
            counts = self._cache.account_counts(account)
            needed = self._cache.num_blocks_needed([s.sequence for s, _ in samples], [n for _, n in samples])
            if counts.held + counts.leased + needed > self._cache.max_units(account):
                return [sample for sample in live if sample.request.account == account]
        above = [sample for sample in live[1:] if self._is_above_floor(sample.request.account)]
        return live[:1] + (above or live[1:])

    def _is_above_floor(self, account: int) -> bool:
        limits = self._limits.get(account)
        if limits is None or not limits.floor:
            return True
        counts = self._cache.account_counts(account)
        return counts.held + counts.leased > limits.floor
