"""The device "python": the references in torch on this machine's memory. No code of its own, no cost.

A device of one's own is most simply a subclass of `ReferenceDevice` with its own name, version and `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from quire.attention import reference_attention
from quire.memory.device_memory import HostMemory
from quire.recurrence import RecurrenceBackend, reference_recurrence
from quire.step import ForwardStep, StepCache

__all__ = ["DEVICE", "ReferenceDevice"]


class ReferenceDevice(HostMemory):
    """Torch on this machine, any floating dtype; see `quire.devices.device.Device`."""

    name = "python"
    version = ""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    kv_formats = ("int8", "int4")
    is_native = False
    copied_by = "python"
    pack = read_later = None
    write = staticmethod(reference_attention.write)
    run = staticmethod(reference_attention.run)
    recurrence: RecurrenceBackend = reference_recurrence.BACKEND

    def exact_operators(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        return forward(step)


DEVICE = ReferenceDevice()
