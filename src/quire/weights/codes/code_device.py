"""The code that computes from quantized weights, by the name of a back end: a device's, the extension's, or torch's.

A device with memory of its own has the codes there (`Device.pack_codes`, else torch's definition on its tensors); any
other back end computes on this machine. Cost: a look-up.
"""

from __future__ import annotations

from typing import Any

from quire.backends import extension, is_host_backend
from quire.devices import Device, device_of

__all__ = ["code_device", "code_extension"]


def code_device(backend: str | None) -> Device | None:
    """The device whose memory has the codes with `LLM(backend=backend)`; None: this machine's."""
    device = None if is_host_backend(backend) else device_of(backend)
    return None if device is None or device.is_host else device


def code_extension(backend: str | None) -> Any:
    """The extension, if it packs and multiplies the codes; else None."""
    return extension(backend) if code_device(backend) is None else None
