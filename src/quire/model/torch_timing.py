"""Reports calls of torch's own linear layers and attention, which no native kernel records.

For the profile of a step on `backend="python"`, at the cost of a hook per linear layer and a call per attention; on the
native back end the kernels record themselves (native/kernels/profile.hpp), and little is left to report.

Cost: about 2 us for each of those calls, and nothing for a model without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.attention import AttentionBackend, AttentionOptions
from quire.devices import Device
from quire.devices.cpu.packed_weights import NativeWeight
from quire.memory.view import KVView
from quire.step import AttentionBatch
from quire.weights.codes import QuantizedPanels

__all__ = ["RecordCall", "time_attention", "time_linears"]

# record(kind, start, duration): kind 0 a linear layer, 1 attention, 2 a KV write; ns of time.perf_counter_ns().
RecordCall = Callable[[int, int, int], None]

_LINEAR, _ATTENTION, _KV_WRITE = range(3)


class _TimedAttention:
    """A back end that reports every call."""

    def __init__(self, backend: AttentionBackend, record: RecordCall) -> None:
        self._backend = backend
        self._record = record

    def write(self, view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        start = time.perf_counter_ns()
        self._backend.write(view, k, v, slot_mapping)
        self._record(_KV_WRITE, start, time.perf_counter_ns() - start)

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        plan: AttentionBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        start = time.perf_counter_ns()
        result = self._backend.run(view, query, plan, options, out=out)
        self._record(_ATTENTION, start, time.perf_counter_ns() - start)
        return result


def time_attention(backend: Device, record: RecordCall) -> AttentionBackend:
    """`backend`, with its calls reported; the native back end itself, which records its own."""
    return backend if backend.is_native else _TimedAttention(backend, record)


def time_linears(model: nn.Module, record: RecordCall) -> Callable[[], None]:
    """Report every call of a linear layer that the native kernels do not compute; returns a function that stops it."""
    handles = []
    for module in model.modules():
        is_linear = isinstance(module, (nn.Linear, Conv1D)) and not any(module.children())
        packed = module.__dict__.get("_packed")
        by_kernels = isinstance(packed, NativeWeight) or (
            isinstance(packed, QuantizedPanels) and packed.native is not None
        )
        if is_linear and not by_kernels:
            started: list[int] = []

            def note_start(*_: Any, started: list[int] = started) -> None:
                started.append(time.perf_counter_ns())

            def report(*_: Any, started: list[int] = started) -> None:
                start = started.pop()
                record(_LINEAR, start, time.perf_counter_ns() - start)

            handles += [module.register_forward_pre_hook(note_start), module.register_forward_hook(report)]

    def stop() -> None:
        while handles:
            handles.pop().remove()

    return stop
