"""Recurrences of state layers: Mamba 1 and 2, gated delta rule and KDA, linear attention, RG-LRU, short convolution.

A recurrence is a class with its arguments (`recurrences`), and `RecurrenceBackend.compute` its one call;
`reference_recurrence` is the definition in torch, token by token in float32. `quire.devices` finds a backend by the
name of its device. `recurrence_step` makes a step from arrays of a caller other than the engine.

Others may use the names below, and
    reference_recurrence                   the definition
    recurrences                            the classes of all recurrences
"""

from quire.recurrence.recurrence_backend import RecurrenceBackend
from quire.recurrence.recurrence_checks import recurrence_step
from quire.recurrence.recurrences import (
    CausalConvolution,
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    Recurrence,
)

__all__ = [
    "CausalConvolution",
    "DeltaRule",
    "LinearAttention",
    "Mamba1Scan",
    "Mamba2Scan",
    "RealGatedUnit",
    "Recurrence",
    "RecurrenceBackend",
    "recurrence_step",
]
