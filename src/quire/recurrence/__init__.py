"""Recurrences of state layers: Mamba 1 and 2, gated delta rule and KDA, linear attention, RG-LRU, short convolution.

`backend()` is the way in; `reference` is the definition in torch, token by token in float32, `native` the kernels.

Others may use the names below, and
    backends, step   the back ends by name, and a step's rows; homes of the names below
    native     the kernels
"""

from quire.recurrence.recurrence_backend import RecurrenceBackend, backend, register
from quire.recurrence.step import RecurrenceStep

__all__ = ["RecurrenceBackend", "RecurrenceStep", "backend", "register"]
