"""The numbers of a step on a card: packed into one buffer in host memory, and one copy.

Cost: two copies of the numbers in host memory and one over the bus, some us; the last one is from pinned memory, so
that it does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from quire.step import AttentionBatch, ForwardStep

__all__ = ["DeviceBatch", "StepBuffer", "device_batch", "has_late_copies", "move_together", "step_on_device"]

_ALIGNED = 16  # bytes; also table entries of a row, in units of int32


def has_late_copies(device: torch.device) -> bool:
    """Whether copies between the device and pinned memory run while the host goes on."""
    return device.type not in ("cpu", "mps")


class StepBuffer:
    """Arrays of fixed shapes and types, in one range of host memory and one on the device.

    host: numpy arrays to write, at any time. on_device: tensors that have their numbers after `copy`.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], type]], device: torch.device) -> None:
        starts = [0]
        for shape, kind in shapes:
            num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
            starts.append(starts[-1] + -(-num_bytes // _ALIGNED) * _ALIGNED)
        self._host = torch.empty(starts[-1], dtype=torch.uint8)
        self._device = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self.host: list[np.ndarray] = []
        self.on_device: list[torch.Tensor] = []
        for (shape, kind), start in zip(shapes, starts, strict=False):
            stop = start + int(np.prod(shape)) * np.dtype(kind).itemsize
            self.host.append(self._host.numpy()[start:stop].view(kind).reshape(shape))
            dtype = torch.int64 if kind is np.int64 else torch.int32
            self.on_device.append(self._device[start:stop].view(dtype).view(shape))

    def copy(self) -> None:
        """Copy all arrays to the device, in the order of its stream. That copy may be late: it reads pinned memory of
        its own, which torch keeps for so long."""
        staged = self._host
        if has_late_copies(self._device.device):
            staged = torch.empty_like(staged, pin_memory=True).copy_(staged)
        self._device.copy_(staged, non_blocking=True)


def move_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 and int32 arrays on the device, by one copy."""
    buffer = StepBuffer([(array.shape, array.dtype.type) for array in arrays], device)
    for ours, array in zip(buffer.host, arrays, strict=True):
        ours[...] = array
    buffer.copy()
    return buffer.on_device


class DeviceBatch:
    """An attention batch as kernels read it: int32 tensors on the device.

    query_start: [n + 1]. context_lengths: [n]. block_tables: [n, table_width], a multiple of 4; entries beyond a
    sequence's end are not read. num_single: sequences with one row. max_context: positions that the tables have room
    for; grids depend on it.
    """

    def __init__(
        self,
        query_start: torch.Tensor,
        context_lengths: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        num_single: int,
        max_context: int,
    ) -> None:
        self.query_start, self.context_lengths, self.block_tables = query_start, context_lengths, block_tables
        self.table_width = block_tables.shape[1]
        self.num_single, self.max_context = num_single, max_context
        self._floats: torch.Tensor | None = None

    def floats(self, num_floats: int) -> torch.Tensor:
        """Scratch memory of at least `num_floats` float32 on the device; the next call gives the same."""
        if self._floats is None or self._floats.numel() < num_floats:
            self._floats = torch.empty(num_floats, dtype=torch.float32, device=self.query_start.device)
        return self._floats


def device_batch(batch: AttentionBatch, device: torch.device) -> DeviceBatch:
    """The batch's tables on `device`, made at the first call and kept in `AttentionBatch.native_handle`."""
    if batch.native_handle is None:
        batch.native_handle = _batch_of(batch, move_together(_arrays_of(batch), device))
    return batch.native_handle


def step_on_device(step: ForwardStep, device: torch.device, *, with_tables: bool) -> ForwardStep:
    """The step with its tensors on `device`, by one copy. with_tables: also those of its batches (`device_batch`).

    Its token ids may be there already.
    """
    parts = [step.position_ids, *step.slot_mappings, step.logits_rows]
    states = step.states
    if states is not None and states.positions is not None:
        parts.append(states.positions)
    if step.input_ids.is_cpu:
        parts.append(step.input_ids)
    arrays = [part.numpy() for part in parts]
    tables = [_arrays_of(batch) for batch in step.batches] if with_tables else []
    moved = move_together([*arrays, *(array for table in tables for array in table)], device)
    num_slots = len(step.slot_mappings)
    for index, batch in enumerate(step.batches if with_tables else ()):
        first = len(arrays) + 3 * index
        batch.native_handle = _batch_of(batch, moved[first : first + 3])
    if states is not None and states.positions is not None:
        states = replace(states, positions=moved[2 + num_slots])
    return replace(
        step,
        input_ids=moved[len(arrays) - 1] if step.input_ids.is_cpu else step.input_ids,
        position_ids=moved[0],
        slot_mappings=tuple(moved[1 : 1 + num_slots]),
        logits_rows=moved[1 + num_slots],
        states=states,
    )


def _arrays_of(batch: AttentionBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tables = batch.block_tables.numpy()
    if missing := -tables.shape[1] % 4:
        tables = np.pad(tables, ((0, 0), (0, missing)), constant_values=-1)
    return batch.query_start.numpy(), batch.context_lengths.numpy(), tables


def _batch_of(batch: AttentionBatch, moved: Sequence[torch.Tensor]) -> DeviceBatch:
    num_single = int(np.count_nonzero(np.diff(batch.query_start.numpy()) == 1))
    max_context = batch.block_tables.shape[1] * batch.block_size
    return DeviceBatch(*moved, num_single=num_single, max_context=max_context)
