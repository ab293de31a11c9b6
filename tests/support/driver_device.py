"""A device whose memory comes from the fake driver of CUDA, with the reference attention on it.

Its bytes are this process's, so the references read them in place; an address without memory ends the process.

    with driver_device() as (device, driver): LLM(..., backend="driver")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from support.fake_driver import FakeDriver, fake_driver

from quire.attention import reference_attention
from quire.devices import register
from quire.devices.cuda.driver_memory import DriverMemory
from quire.devices.device import unregister
from quire.recurrence import reference_recurrence

__all__ = ["DriverDevice", "driver_device"]


class DriverDevice(DriverMemory):
    """See `quire.devices.device.Device`."""

    name = "driver"
    version = "1"
    dtypes = (torch.float32, torch.bfloat16)
    kv_formats = ("int8", "int4")
    is_native = False
    recurrence = reference_recurrence.BACKEND
    pack = None
    write = staticmethod(reference_attention.write)
    run = staticmethod(reference_attention.run)

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


@contextmanager
def driver_device(
    page_bytes: int = 4096, total_bytes: int = 64 << 20
) -> Iterator[tuple[DriverDevice, FakeDriver]]:
    """`LLM(backend="driver")` is this device. At the end all of its memory must have gone back."""
    driver = fake_driver(page_bytes, total_bytes)
    device = DriverDevice()
    register(device.name, lambda: device)
    try:
        yield device, driver
    finally:
        unregister(device.name)
        device.ahead.close()
    device.trim()
    assert driver.fault == ""
    assert (driver.num_handles, driver.num_mappings) == (0, 0)
