"""Devices: memory, attention, recurrences and linear layers of one kind of hardware; one folder a device.

`device_of(name)` is the entry point. "python" computes by the references in torch, "native" by the extension (`cpu/`),
both in this machine's memory (`quire.memory.device_memory.HostMemory`); `register` adds a device.

Others may use the names below, and
    device                                   home of the names below
    reference_device                         the device of the references in torch
    cpu.native_attention                     the extension's kernels of attention
    cpu.native_recurrence                    the extension's kernels of recurrences
    cpu.packed_weights                       linear layers packed for the processor
"""

from quire.devices.device import Device, PackedCodes, PackedWeight, PacksCodes, device_of, register

__all__ = ["Device", "PackedCodes", "PackedWeight", "PacksCodes", "device_of", "register"]
