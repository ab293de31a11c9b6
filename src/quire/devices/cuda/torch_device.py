"""A device of torch without kernels of Quire's own: attention and recurrences by the references, products by torch.

Correct on any device that torch knows, and the twin of the kernels for one. Tokens are those of the model's own
forward; bits are torch's, whose products may depend on the number of rows, so the promise of the same bits in any
company is not this device's. Quantized weights are refused by name.

Cost: attention gathers a sequence's keys and values in float32, one sequence after another; a recurrence runs some
operators for each token.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec

import torch

from quire.attention import AttentionOptions, reference_attention
from quire.devices.cuda.step_tensors import device_batch, has_late_copies, step_on_device
from quire.devices.cuda.torch_memory import TorchMemory, require_device
from quire.errors import ArgumentError, BackendError
from quire.memory import KVView
from quire.recurrence import RecurrenceBackend, reference_recurrence
from quire.step import AttentionBatch, ForwardStep, StepCache

__all__ = ["TorchDevice", "torch_device_of"]

_TRITON_TYPES = ("cuda", "cpu")  # that its kernels are written for: CUDA and ROCm, and the interpreter


class TorchDevice(TorchMemory):
    """See `quire.devices.device.Device`. name: "torch@cuda:0"."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kv_formats = ("int8", "int4")
    is_native = False
    pack = None
    write = staticmethod(reference_attention.write)
    recurrence: RecurrenceBackend = reference_recurrence.BACKEND

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

    @property
    def read_later(self) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None:
        return self._read_later if has_late_copies(self.torch_device) else None

    def _read_later(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        staged.copy_(tensor, non_blocking=True)
        copied = torch.Event(self.torch_device)
        copied.record(torch.accelerator.current_stream(self.torch_device))

        def read() -> torch.Tensor:
            copied.synchronize()
            return staged

        return read

    def exact_operators(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        return forward(step_on_device(step, self.torch_device, with_tables=True))

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tables = device_batch(batch, self.torch_device).block_tables
        return reference_attention.run(view, query, replace(batch, block_tables=tables), options, out=out)


@functools.cache
def torch_device_of(kernels: str, place: str) -> TorchDevice:
    """The device of `kernels` ("triton", "torch", or "" for the first that this machine has) on torch's device `place`;
    one object for each.

    *raises:* ArgumentError: other kernels. BackendError: this machine has no such device, or no triton.
    """
    if kernels not in ("", "triton", "torch"):
        raise ArgumentError(
            f'expected the back end "triton" or "torch" on device {place!r}, got {kernels!r} - in `backend`'
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
        return TorchDevice(torch_device)
    from quire.devices.cuda.triton_device import TritonDevice

    return TritonDevice(torch_device)
