"""Recurrences of state layers: Mamba 1 and 2, gated delta rule and KDA, linear attention, RG-LRU, short convolution.

`backend()` is the way in; `reference` is the definition in torch, token by token in float32, `native` the kernels.
`recurrence_step` makes a step of numbers that are not the engine's.

Others may use the names below, and
    backends, checks   homes of the names below
    native             the kernels
"""

from quire.recurrence.recurrence_backend import RecurrenceBackend, backend, register
from quire.recurrence.recurrence_checks import recurrence_step

__all__ = ["RecurrenceBackend", "backend", "recurrence_step", "register"]
