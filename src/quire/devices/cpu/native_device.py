"""The device "native": the extension's kernels on this machine's memory. No code of its own, no cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from quire import _native
from quire.devices.cpu import native_attention, native_recurrence
from quire.memory.device_memory import HostMemory
from quire.recurrence import RecurrenceBackend
from quire.step import ForwardStep, StepCache

__all__ = ["DEVICE", "NativeDevice"]


class NativeDevice(HostMemory):
    """The extension's kernels on this machine; see `quire.devices.device.Device`."""

    name = "native"
    version = _native.isa()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kv_formats = ("int8", "int4")
    is_native = True
    copied_by = "native"
    pack = read_later = None
    write = staticmethod(native_attention.write)
    run = staticmethod(native_attention.run)
    recurrence: RecurrenceBackend = native_recurrence.BACKEND

    def exact_operators(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        return forward(step)


DEVICE = NativeDevice()
