"""`torch_device_of`: finds a device of torch by the names of its kernels and its place.

Cost: the import of torch's device, and of triton for its kernels, at the first call of a name.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from quire.devices.cuda.torch_device import TorchDevice
from quire.devices.cuda.torch_memory import require_device
from quire.errors import ArgumentError, BackendError

__all__ = ["torch_device_of"]

_TRITON_TYPES = ("cuda", "cpu")  # that its kernels are written for: CUDA and ROCm, and the interpreter


@functools.cache
def torch_device_of(kernels: str, place: str) -> TorchDevice:
    """The device of `kernels` on torch's device `place`; one object for each.

    kernels: "triton", "torch", or "" for the first that this machine has. With "+fast" ("triton+fast") torch's own
    products compute where they are faster.

    *raises:* ArgumentError: other kernels. BackendError: this machine has no such device, or no triton.
    """
    kernels, plus, mode = kernels.partition("+")
    is_fast = mode == "fast"
    if kernels not in ("", "triton", "torch") or (plus and not is_fast):
        raise ArgumentError(
            f'expected the back end "triton" or "torch" on device {place!r}, got {kernels + plus + mode!r} - in '
            "`backend`"
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
    require_device(torch_device)
    has_triton = find_spec("triton") is not None
    if kernels == "triton" and not has_triton:
        raise BackendError(
            'expected triton for backend "triton", got none; install it (pip install "quire-kv[cuda]"), or take '
            'backend="torch"'
        )
    if kernels == "torch" or not has_triton or torch_device.type not in _TRITON_TYPES:
        return TorchDevice(torch_device, is_fast)
    from quire.devices.cuda.triton_device import TritonDevice

    return TritonDevice(torch_device, is_fast)
