"""Recurrences of state layers: Mamba 1 and 2, gated delta rule and KDA, linear attention, RG-LRU, short convolution.

`backend()` is the entry point; `reference_recurrence` is the definition in torch, token by token in float32.
`recurrence_step` makes a step from arrays of a caller other than the engine.

Others may use the names below, and
    recurrence_backend, recurrence_checks   the backends by name; checks of arguments
"""

from quire.recurrence.recurrence_backend import RecurrenceBackend, backend, register
from quire.recurrence.recurrence_checks import recurrence_step

__all__ = ["RecurrenceBackend", "backend", "recurrence_step", "register"]
