"""A device of torch without kernels of Quire's own: attention and recurrences by the references, products by torch.

Correct on any device that torch knows, and the twin of the kernels for one. Tokens are those of the model's own
forward; bits are torch's, whose products may depend on the number of rows, so the promise of the same bits in any
company is not this device's. Quantized weights are multiplied by their definition (`quire.weights.codes`), in any
company alike.

Cost: attention gathers a sequence's keys and values in float32, one sequence after another; a recurrence runs some
operators for each token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from quire.attention import AttentionOptions, reference_attention
from quire.devices.cuda.laid_out_codes import LaidOutCodes
from quire.devices.cuda.step_tensors import device_batch, has_late_copies, step_on_device
from quire.devices.cuda.torch_memory import TorchMemory
from quire.devices.device import PacksCodes
from quire.memory import KVView
from quire.recurrence import RecurrenceBackend, reference_recurrence
from quire.step import AttentionBatch, ForwardStep, StepCache

__all__ = ["TorchDevice"]


class TorchDevice(TorchMemory):
    """See `quire.devices.device.Device`. name: "torch@cuda:0".

    is_fast: quantized weights are dequantized for each product and multiplied by torch; the name then is
    "torch+fast@cuda:0".
    """

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kv_formats = ("int8", "int4")
    is_native = False
    pack = None
    write = staticmethod(reference_attention.write)
    recurrence: RecurrenceBackend = reference_recurrence.BACKEND
    kernels = "torch"

    def __init__(self, torch_device: torch.device, is_fast: bool = False) -> None:
        super().__init__(torch_device)
        self.is_fast = is_fast
        self.name = f"{self.kernels}{'+fast' if is_fast else ''}@{torch_device}"
        self.pack_codes: PacksCodes | None = partial(LaidOutCodes, device=torch_device) if is_fast else None

    @property
    def version(self) -> str:
        """Of torch and of the card, whose products may differ."""
        card = self.torch_device.type
        if card == "cuda":
            card = torch.cuda.get_device_name(self.torch_device)
        fast = " fast" if self.is_fast else ""
        return hashlib.sha256(f"{torch.__version__} {card}{fast}".encode()).hexdigest()[:16]

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
