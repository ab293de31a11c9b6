"""The device "native": the extension's kernels on this machine's memory. No code of its own, no cost."""

from __future__ import annotations

import torch

from quire import _native
from quire.devices.cpu import native_attention, native_recurrence
from quire.devices.host_device import HostDevice
from quire.recurrence import RecurrenceBackend

__all__ = ["DEVICE", "NativeDevice"]


class NativeDevice(HostDevice):
    """The extension's kernels on this machine; see `quire.devices.device.Device`."""

    name = "native"
    version = _native.isa()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    is_native = True
    copied_by = "native"
    write = staticmethod(native_attention.write)
    run = staticmethod(native_attention.run)
    recurrence: RecurrenceBackend = native_recurrence.BACKEND


DEVICE = NativeDevice()
