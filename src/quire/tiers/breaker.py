"""What gives a partner that failed a rest: calls are refused for a while, then one trial decides.

    closed --failed--> open --the pause is over, begin_trial--> half-open --succeeded--> closed
                        ^                                           |
                        +------------------- failed ----------------+

The pause doubles with each failure, up to `max_pause_s`; it starts again at `first_pause_s` once the partner has been
well for as long as the last pause was. So one that passes every trial and fails every call after it is not asked more
and more often.

Invariants
    B1  at most one trial is under way.
    B2  a call that began before the last change of state changes nothing any more: many calls that fail together
        are one failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """See the module's text. clock: seconds that pass."""

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
        self._number = 0  # of the present state: each change makes it another
        self._pause_s = 0.0  # the last one; 0: there was none
        self._since = clock()  # when the present state began

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        return self._state

    @property
    def pause_left_s(self) -> float:
        """Until a trial may begin; 0 where none is needed or one may begin now."""
        with self._lock:
            return max(0.0, self._since + self._pause_s - self._clock()) if self._state == "open" else 0.0

    def begin(self) -> int | None:
        """The number of a call that may be made, to be told how it went; None: not now."""
        with self._lock:
            return self._number if self._state == "closed" else None

    def begin_trial(self) -> int | None:
        """The number of the trial, whose caller makes it and tells how it went; None: none is due."""
        with self._lock:
            if self._state != "open" or self._clock() < self._since + self._pause_s:
                return None
            self._change("half-open")
            return self._number

    def succeeded(self, number: int) -> None:
        """A trial did: calls may be made again. (Of a call, it says nothing new.)"""
        with self._lock:
            if number == self._number and self._state == "half-open":
                self._change("closed")

    def failed(self, number: int) -> None:
        """A call or a trial did: no calls for a while."""
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
