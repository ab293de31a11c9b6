"""A device whose memory comes from the fake driver of CUDA, with the reference attention on it.

Its bytes are this process's, so the references read them in place; an address without memory ends the process.

    with driver_device() as (device, driver): LLM(..., backend="driver")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from support.fake_driver import FakeDriver, fake_driver

from quire.devices import register
from quire.devices.cuda.driver_memory import DriverMemory
from quire.devices.cuda.torch_device import TorchDevice
from quire.devices.device import unregister

__all__ = ["DriverDevice", "driver_device"]


class DriverDevice(DriverMemory, TorchDevice):
    """`TorchDevice` with all of its memory by the driver's calls."""

    def __init__(self) -> None:
        TorchDevice.__init__(self, torch.device("cpu"))
        DriverMemory.__init__(self, torch.device("cpu"))
        self.name = "driver"


@contextmanager
def driver_device(
    page_bytes: int = 4096, total_bytes: int = 64 << 20
) -> Iterator[tuple[DriverDevice, FakeDriver]]:
    """`LLM(backend="driver")` is this device. At the end all of its memory must have gone back."""
    driver = fake_driver(page_bytes, total_bytes)
    device = DriverDevice()
    device.collects_soon = False
    register(device.name, lambda: device)
    try:
        yield device, driver
    finally:
        unregister(device.name)
        device.ahead.close()
        device.behind.close()
    device.trim()
    assert driver.fault == ""
    assert (driver.num_handles, driver.num_mappings) == (0, 0)
