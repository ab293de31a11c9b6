"""A device of torch with kernels in Triton: paged attention, and every operator of the model a function of its row.

So a request has the same bits alone and in company, cold, hit, in chunks, preempted. Memory, recurrences and copies are
those of `TorchDevice`, its twin without kernels. Triton's interpreter (TRITON_INTERPRET=1) runs it on CPU tensors,
slowly.

Cost: a launch is some us on the host; a kernel is compiled at its first launch and kept in triton's folder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from quire.devices.cuda import code_kernels, exact_operators
from quire.devices.cuda.code_kernels import DeviceCodes
from quire.devices.cuda.decode_graphs import CapturesGraphs, CudaGraphs, DecodeGraphs
from quire.devices.cuda.exact_operators import ExactOperators
from quire.devices.cuda.torch_device import TorchDevice
from quire.devices.cuda.triton_attention import TritonAttention, is_interpreted
from quire.errors import BackendError
from quire.step import ForwardStep, StepCache

__all__ = ["TritonDevice"]


class TritonDevice(TorchDevice):
    """See `quire.devices.device.Device`. name: "triton@cuda:0".

    is_fast: torch computes products, norms and sums, by the libraries of the card, whose bits may depend on the rows of
    a step; the name then is "triton+fast@cuda:0".
    """

    kernels = "triton"

    def __init__(self, torch_device: torch.device, is_fast: bool = False) -> None:
        super().__init__(torch_device, is_fast)
        if torch_device.type == "cpu" and not is_interpreted():
            raise BackendError(
                'expected a card for backend "triton", got device "cpu", where only its interpreter runs the kernels; '
                "set TRITON_INTERPRET=1 to try them"
            )
        if is_interpreted():
            self.dtypes = (torch.float32, torch.float16)
        self._attention = TritonAttention(torch_device)
        self.graphs: CapturesGraphs | None = CudaGraphs(torch_device) if torch_device.type == "cuda" else None
        self.pack_codes = functools.partial(DeviceCodes, device=torch_device)
        outside = _outside_modes if is_interpreted() else lambda call: call
        self.write, self.run = outside(self._attention.write), outside(self._attention.run)

    @property
    def version(self) -> str:
        """Of the kernels and their tiles, of torch and of the card."""
        # The exact operators too in the fast mode: the key of stored K and V may change more often than their bits.
        parts = (super().version, self._attention.version, exact_operators.version(), code_kernels.version())
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        if self.graphs is not None:
            captured = cache.compiled
            if captured is None or captured.generation != cache.generation:
                captured = cache.compiled = DecodeGraphs(self.torch_device, self.graphs, cache.generation)
            logits = captured.run(step, forward)
            if logits is not None:
                return logits
        return super().compute(step, forward, cache)

    def exact_operators(self) -> AbstractContextManager[object]:
        return nullcontext() if self.is_fast else ExactOperators()


def _outside_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` outside of `exact_operators`: the interpreter copies its tensors by torch's operators."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return call(*args, **kwargs)

    return run
