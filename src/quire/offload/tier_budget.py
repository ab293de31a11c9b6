"""`TierBudget`: how long requests may wait for a tier that gives them nothing. One account of seconds for each tier.

2 % of the time that prompts take to compute is paid in, and the time that a load saved. A look-up takes its time out,
and a load the time by which it was slower than computing. A look-up is made while the account can pay for it; a load
that is expected to be slower than computing, when the account has the difference beyond what it began with. So a slow
tier costs at most 2 % in the long run, and a tier that becomes fast again is noticed.

Cost: a few additions for each request. Several threads may call.
"""

from __future__ import annotations

import threading

from quire.offload.throughputs import Throughputs

__all__ = ["TierBudget"]

_SHARE = 0.02
_START_S = 1.0
_MAX_S = 10.0
_FREE_S = 1e-3  # of a look-up: no request notices it


class TierBudget:
    """See the module's text. speeds: the engine's measurements."""

    def __init__(self, speeds: Throughputs) -> None:
        self._speeds = speeds
        self._lock = threading.Lock()
        self._balance_s: dict[str, float] = {}
        self._paid_s: dict[str, float] = {}  # the computing time whose share is paid in

    def may_look_up(self, tier: str, expected_s: float) -> bool:
        """Whether a request may wait for a look-up of this tier."""
        return expected_s <= _FREE_S or self._balance(tier) >= expected_s

    def may_try(self, tier: str, loss_s: float) -> bool:
        """Whether a load may be tried that is expected to take `loss_s` longer than computing."""
        return self._balance(tier) >= _START_S + loss_s

    def add_look_up(self, tier: str, seconds: float) -> None:
        self._add(tier, -max(0.0, seconds - _FREE_S))

    def add_load(self, tier: str, seconds: float, num_tokens: int) -> None:
        """Adds a load that took `seconds` and brought `num_tokens`."""
        self._add(tier, self._speeds.compute_s(num_tokens) - seconds)

    def _balance(self, tier: str) -> float:
        self._add(tier, 0.0)
        return self._balance_s[tier]

    def _add(self, tier: str, seconds: float) -> None:
        with self._lock:
            computed_s = self._speeds.computed_s
            paid_in = _SHARE * (computed_s - self._paid_s.get(tier, 0.0))
            self._paid_s[tier] = computed_s
            balance_s = self._balance_s.get(tier, _START_S) + paid_in + seconds
            self._balance_s[tier] = max(-_MAX_S, min(_MAX_S, balance_s))
