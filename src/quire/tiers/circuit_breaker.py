"""A circuit breaker: after a failure it refuses calls to a partner for a pause, then one trial decides.

    closed --failure--> open --the pause is over, begin_trial--> half-open --success--> closed
                         ^                                           |
                         +------------------ failure ----------------+

The pause doubles with each failure, up to `max_pause_s`. It starts again at `first_pause_s` once the partner has worked
for as long as the last pause. So a partner that passes every trial and fails the calls after it is called less often.

Invariants
    B1  at most one trial is under way.
    B2  the result of a call that began before the last change of state has no effect: many calls that fail together
        are one failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """See the module's text. clock: monotonic seconds."""

    def __init__(
        self,
        *,
        first_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state: Literal["closed", "open", "half-open"] = "closed"
        self._number = 0  # of the present state; each change adds 1
        self._pause_s = 0.0  # the last pause; 0: none so far
        self._since = clock()  # when the present state began

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        return self._state

    @property
    def pause_left_s(self) -> float:
        """Seconds until a trial may begin; 0 if it may now, or if none is needed."""
        with self._lock:
            return max(0.0, self._since + self._pause_s - self._clock()) if self._state == "open" else 0.0

    def begin(self) -> int | None:
        """The number of a call, for `record_failure`; None: the call may not be made now."""
        with self._lock:
            return self._number if self._state == "closed" else None

    def begin_trial(self) -> int | None:
        """The number of a trial, whose caller makes it and records the result; None: no trial is due."""
        with self._lock:
            if self._state != "open" or self._clock() < self._since + self._pause_s:
                return None
            self._change("half-open")
            return self._number

    def record_success(self, number: int) -> None:
        """After a successful trial calls may be made again. After a call this does nothing."""
        with self._lock:
            if number == self._number and self._state == "half-open":
                self._change("closed")

    def record_failure(self, number: int) -> None:
        """After a failed call or trial no calls are made for a pause."""
        with self._lock:
            if number != self._number or self._state == "open":
                return
            well_s = self._clock() - self._since if self._state == "closed" else 0.0
            doubled = self._pause_s and well_s < self._pause_s
            self._pause_s = min(self._max_pause_s, 2 * self._pause_s) if doubled else self._first_pause_s
            self._change("open")

    def _change(self, state: Literal["closed", "open", "half-open"]) -> None:
        self._state = state
        self._number += 1
        self._since = self._clock()
