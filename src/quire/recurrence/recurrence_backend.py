"""The call of a backend of recurrences. No code, no cost.

`quire.recurrence.reference_recurrence` is the definition in torch; `device_of(name).recurrence` (`quire.devices`) is
the backend of a device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quire.recurrence.recurrences import Recurrence
from quire.step import RecurrenceStep

__all__ = ["RecurrenceBackend"]


class RecurrenceBackend(Protocol):
    """The recurrences of one engine step, for the rows of many sequences."""

    def compute(
        self, call: Recurrence, step: RecurrenceStep, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of each row.

        The state of each sequence is read, and written after its last row; slots that the step does not name are
        neither read nor written. The bits of a row's result and of a state depend on that sequence's rows and state
        alone: not on how a prompt is divided into calls, on the other sequences or their order, or on the number of
        threads.

        Args:
            out: contiguous, of the shape and type of `call.rows`, to write into; allocated by default. It shares no
                memory with an input.

        Raises:
            ArgumentError: unfit arguments; nothing is changed then.
        """
        ...
