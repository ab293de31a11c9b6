"""`OomBackoff`: the number of steps without admission after a step that the storage had no memory for.

Each refused step doubles it until a running sequence ends, so that admitted sequences are not preempted each time.
Numbers only: the scheduler chooses the sequence that is preempted.
"""

from __future__ import annotations

from quire.scheduler.request import RequestSequence

__all__ = ["OomBackoff"]

_LONGEST_WAIT = 64  # steps


class OomBackoff:
    """steps_to_wait: coming steps without admission. alone: the only running sequence, if the last step was refused
    with it."""

    def __init__(self) -> None:
        self.steps_to_wait, self._next_wait = 0, 1
        self.alone: RequestSequence | None = None

    def record_refusal(self, alone: RequestSequence | None) -> None:
        """Records a refused step. alone: the only running sequence, which is tried once more; None if several ran."""
        self.steps_to_wait, self.alone = self._next_wait, alone
        self._next_wait = min(2 * self._next_wait, _LONGEST_WAIT)

    def record_computed(self) -> None:
        """Records a computed step. Without effect if `steps_to_wait` is 0 and `alone` None."""
        self.steps_to_wait, self.alone = max(0, self.steps_to_wait - 1), None

    def record_end(self) -> None:
        """Records that a running sequence has ended and returned its memory."""
        self.steps_to_wait, self._next_wait = min(1, self.steps_to_wait), 1
