"""`OomBackoff`: after steps that the storage had no memory for, how long nobody joins those that run.

Every refusal makes it twice as many steps, until somebody has ended, so that who joins is not turned out every time.
Plain numbers: who is sent back to wait is the scheduler's business.
"""

from __future__ import annotations

from quire.scheduler.request import RequestSequence

__all__ = ["OomBackoff"]

_LONGEST_WAIT = 64  # steps


class OomBackoff:
    """steps_to_wait: in which none joins those that run. alone: the one sequence whose step, the last one, was refused
    while no other ran."""

    def __init__(self) -> None:
        self.steps_to_wait, self._next_wait = 0, 1
        self.alone: RequestSequence | None = None

    def refused(self, alone: RequestSequence | None) -> None:
        """A step was. alone: who ran alone and is tried once more."""
        self.steps_to_wait, self.alone = self._next_wait, alone
        self._next_wait = min(2 * self._next_wait, _LONGEST_WAIT)

    def computed(self) -> None:
        """A step was computed. Nothing to do where `steps_to_wait` is 0 and `alone` None."""
        self.steps_to_wait, self.alone = max(0, self.steps_to_wait - 1), None

    def ended(self) -> None:
        """Somebody who ran has ended: there is memory."""
        self.steps_to_wait, self._next_wait = min(1, self.steps_to_wait), 1
