"""A device of torch without kernels of Quire's own: attention and recurrences by the references, products by torch.

Correct on any device that torch knows, and the twin of the kernels for one. Tokens are those of the model's own
forward; bits are torch's, whose products may depend on the number of rows, so the promise of the same bits in any
company is not this device's. Quantized weights and state layers it refuses by name.

Cost: attention gathers a sequence's keys and values in float32, one sequence after another.
"""

from __future__ import annotations

import functools
import hashlib

import torch

from quire.attention import reference_attention
from quire.devices.cuda.torch_memory import TorchMemory
from quire.errors import ArgumentError
from quire.recurrence import RecurrenceBackend

__all__ = ["TorchDevice", "torch_device_of"]


class TorchDevice(TorchMemory):
    """See `quire.devices.device.Device`. name: "torch@cuda:0"."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kv_formats = ("int8", "int4")
    is_native = False
    pack = None
    write = staticmethod(reference_attention.write)
    run = staticmethod(reference_attention.run)
    recurrence: RecurrenceBackend | None = None

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.name = f"torch@{torch_device}"

    @property
    def version(self) -> str:
        """Of torch and of the card, whose products may differ."""
        card = self.torch_device.type
        if card == "cuda":
            card = torch.cuda.get_device_name(self.torch_device)
        return hashlib.sha256(f"{torch.__version__} {card}".encode()).hexdigest()[:16]


@functools.cache
def torch_device_of(kernels: str, place: str) -> TorchDevice:
    """The device of `kernels`, "torch" or "" for the best there are, on torch's device `place`; one object for each.

    *raises:* ArgumentError: other kernels. BackendError: this machine has no such device.
    """
    if kernels not in ("", "torch"):
        raise ArgumentError(
            f'expected the back end "torch" on device {place!r}, got {kernels!r} - in `backend`'
        )
    try:
        torch_device = torch.device(place)
    except RuntimeError as error:
        raise ArgumentError(
            f"expected a device that torch {torch.__version__} knows, such as cuda or cuda:1, got {place!r} - in "
            "`device`"
        ) from error
    if torch_device.index is None and torch_device.type != "cpu":
        torch_device = torch.device(torch_device.type, 0)
    return TorchDevice(torch_device)
