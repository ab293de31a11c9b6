"""Recurrences of state layers: Mamba 1 and 2, gated delta rule and KDA, linear attention, RG-LRU, short convolution.

`backend()` is the entry point; `reference_recurrence` is the definition in torch, token by token in float32,
`native_recurrence` the kernels.

Others may use the names below, and
    recurrence_backend, step  the backends by name, and the rows of a step
    native_recurrence         the kernels
"""

from quire.recurrence.recurrence_backend import RecurrenceBackend, backend, register
from quire.recurrence.step import RecurrenceStep

__all__ = ["RecurrenceBackend", "RecurrenceStep", "backend", "register"]
