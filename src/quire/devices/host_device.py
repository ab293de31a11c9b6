"""`HostDevice`: the part that the devices "python" and "native" share: this machine's memory, and no work of a device.

Results are there when a call returns, and `quire.weights` packs the weights. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from quire.memory.device_memory import HostMemory
from quire.step import ForwardStep, StepCache

__all__ = ["HostDevice"]


class HostDevice(HostMemory):
    """Base of devices on this machine; see `quire.devices.device.Device`."""

    kv_formats = ("int8", "int4")
    pack = pack_codes = read_later = None

    def exact_operators(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        return forward(step)
