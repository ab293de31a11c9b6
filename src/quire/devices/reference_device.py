"""The device "python": the references in torch on this machine's memory. No code of its own, no cost.

A device of one's own is most simply a subclass of `ReferenceDevice` with its own name, version and `run`.
"""

from __future__ import annotations

import torch

from quire.attention import reference_attention
from quire.devices.host_device import HostDevice
from quire.recurrence import RecurrenceBackend, reference_recurrence

__all__ = ["DEVICE", "ReferenceDevice"]


class ReferenceDevice(HostDevice):
    """Torch on this machine, any floating dtype; see `quire.devices.device.Device`."""

    name = "python"
    version = ""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    is_native = False
    copied_by = "python"
    write = staticmethod(reference_attention.write)
    run = staticmethod(reference_attention.run)
    recurrence: RecurrenceBackend = reference_recurrence.BACKEND


DEVICE = ReferenceDevice()
