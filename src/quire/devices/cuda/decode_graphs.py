"""Decode steps as captured graphs: the kernels of a whole forward by one launch.

A graph belongs to one cache's memory, to a number of rows and to widths of its tables, each rounded up (`_Shape`). All
that it reads and writes is at constant addresses: a step's numbers are copied into the graph's own buffer, once. Rows
beyond the batch have no context and slot -1: kernels read no page for them and write none. A step that no graph takes
runs eagerly, with the same bits: kernels read lengths on the device, and their grids decide no bits.

Invariants
    G1  a capture and its warm-up have such rows alone, so they change no page.
    G2  graphs share one pool of memory and are dropped together, when views change or the cache is closed.
    G3  a forward that cannot be captured (its host code waits for the device) is found at the first try, is told once,
        and runs eagerly from then on.

Cost: the copy and the launch, some tens of us a step; a capture two forwards, once for each shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from quire.devices.cuda.step_tensors import DeviceBatch, StepBuffer
from quire.step import AttentionBatch, ForwardStep

__all__ = ["CapturesGraphs", "CudaGraphs", "DecodeGraphs"]

MAX_ROWS = 256
_MIN_WIDTH = 16  # of a table
_log = logging.getLogger("quire")

Forward = Callable[[ForwardStep], torch.Tensor]


class CapturesGraphs(Protocol):
    """The capture of a device. `capture` runs `compute` and returns its result and a function that runs it again, into
    the same result. *raises:* RuntimeError: it cannot be captured."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]: ...


class CudaGraphs:
    """Graphs of CUDA, of one pool; warmed up on a stream of their own, as torch asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may create handles of memory meanwhile.
        capturing: AbstractContextManager[Any] = torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        )
        with capturing:
            result = compute()
        return result, graph.replay


@dataclass(frozen=True)
class _Shape:
    """Rows, and by table the width and the tokens of a block."""

    num_rows: int
    tables: tuple[tuple[int, int], ...]


class _Graph:
    """One captured forward with its buffer. The buffer's arrays: ids, positions, rows of logits, starts, then slots,
    context lengths and table of each table."""

    def __init__(self, shape: _Shape, device: torch.device, forward: Forward, graphs: CapturesGraphs) -> None:
        n = shape.num_rows
        shapes: list[tuple[tuple[int, ...], type]] = [((n,), np.int64)] * 3 + [((n + 1,), np.int32)]
        for width, _ in shape.tables:
            shapes += [((n,), np.int64), ((n,), np.int32), ((n, width), np.int32)]
        self._shape, self._buffer = shape, StepBuffer(shapes, device)
        ids, positions, logits_rows, starts, *_ = self._buffer.host
        ids[:], positions[:] = 0, 0
        logits_rows[:], starts[:] = np.arange(n), np.arange(n + 1)
        self._clear(0)
        self._buffer.copy()
        step = self._step()
        self._result, self._replay = graphs.capture(lambda: forward(step))

    def _clear(self, num_rows: int) -> None:
        """Make all rows from `num_rows` on rows without context."""
        for slots, contexts in zip(self._buffer.host[4::3], self._buffer.host[5::3], strict=True):
            slots[num_rows:], contexts[num_rows:] = -1, 0

    def _step(self) -> ForwardStep:
        n = self._shape.num_rows
        ids, positions, logits_rows, starts, *tensors = self._buffer.on_device
        host_starts = torch.arange(n + 1, dtype=torch.int32)
        batches = []
        for index, (width, block_size) in enumerate(self._shape.tables):
            contexts, table = tensors[3 * index + 1 : 3 * index + 3]
            unused = torch.zeros(n, dtype=torch.int32)
            batch = AttentionBatch(host_starts, unused, unused[:, None], block_size, 1, n, n)
            batch.native_handle = DeviceBatch(
                starts, contexts, table, num_single=n, max_context=width * block_size
            )
            batches.append(batch)
        return ForwardStep(ids, positions, tuple(batches), tuple(tensors[::3]), logits_rows)

    def run(self, step: ForwardStep) -> torch.Tensor:
        """The logits of the step's rows. They are overwritten by the next call."""
        n = step.input_ids.numel()
        ids, positions, _, _, *arrays = self._buffer.host
        is_here = step.input_ids.is_cpu
        ids[:n], positions[:n] = step.input_ids.numpy() if is_here else 0, step.position_ids.numpy()
        for index, (batch, slots) in enumerate(zip(step.batches, step.slot_mappings, strict=True)):
            our_slots, our_contexts, our_table = arrays[3 * index : 3 * index + 3]
            our_slots[:n], our_contexts[:n] = slots.numpy(), batch.context_lengths.numpy()
            table = batch.block_tables.numpy()
            our_table[:n, : table.shape[1]] = table
        self._clear(n)
        self._buffer.copy()
        if not is_here:
            self._buffer.on_device[0][:n] = step.input_ids
        self._replay()
        return self._result[:n]


class DecodeGraphs:
    """The graphs over one cache's memory. generation: of the cache's views that they were captured over."""

    def __init__(self, device: torch.device, graphs: CapturesGraphs, generation: int) -> None:
        self.generation = generation
        self._device, self._graphs = device, graphs
        self._by_shape: dict[_Shape, _Graph] = {}
        self._is_refused = False

    def run(self, step: ForwardStep, forward: Forward) -> torch.Tensor | None:
        """The logits of a step of decodes; None: no graph takes the step."""
        shape = None if self._is_refused else _shape_of(step)
        if shape is None:
            return None
        graph = self._by_shape.get(shape)
        if graph is None:
            try:
                graph = self._by_shape[shape] = _Graph(shape, self._device, forward, self._graphs)
            except RuntimeError as error:
                self._is_refused = True
                _log.info("decode steps run without captured graphs: %s", " ".join(str(error).split())[:200])
                return None
        return graph.run(step)


def _shape_of(step: ForwardStep) -> _Shape | None:
    n = step.input_ids.numel()
    if step.states is not None or step.logits_rows.numel() != n or n > MAX_ROWS:
        return None
    if any(batch.num_sequences != n for batch in step.batches):
        return None
    tables = tuple(
        (max(_MIN_WIDTH, 1 << (batch.block_tables.shape[1] - 1).bit_length()), batch.block_size)
        for batch in step.batches
    )
    return _Shape(1 << (n - 1).bit_length() if n <= 8 else -(-n // 8) * 8, tables)
