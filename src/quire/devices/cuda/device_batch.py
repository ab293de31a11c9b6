"""A step's attention tables on the device: made once a step, kept in `AttentionBatch.native_handle`.

One buffer in host memory and one copy: rows of sequences, context lengths, block tables, each at a multiple of 16
bytes. Kernels read lengths there; grids depend on the numbers below alone.

Cost: building the buffer is two numpy copies of the tables' size; the copy does not wait if the host's is pinned.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.step import AttentionBatch

__all__ = ["DeviceBatch", "device_batch"]

_ALIGNED = 4  # int32 numbers in 16 bytes


class DeviceBatch:
    """int32 tensors on the device: query_start [n + 1], context_lengths [n], block_tables [n, table_width].

    num_single: sequences with one row. max_context: positions that the tables' width has room for.
    """

    def __init__(self, batch: AttentionBatch, device: torch.device) -> None:
        starts = batch.query_start.numpy()
        tables = batch.block_tables.numpy()
        n, width = tables.shape
        self.table_width = -(-width // _ALIGNED) * _ALIGNED
        first_lengths = -(-(n + 1) // _ALIGNED) * _ALIGNED
        first_tables = first_lengths + -(-n // _ALIGNED) * _ALIGNED
        host = torch.empty(
            first_tables + n * self.table_width, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        numbers = host.numpy()
        numbers[: n + 1] = starts
        numbers[first_lengths : first_lengths + n] = batch.context_lengths.numpy()
        numbers[first_tables:].reshape(n, self.table_width)[:, :width] = tables
        on_device = host.to(device, non_blocking=True)
        self.query_start = on_device[: n + 1]
        self.context_lengths = on_device[first_lengths : first_lengths + n]
        self.block_tables = on_device[first_tables:].view(n, self.table_width)
        self.num_single = int(np.count_nonzero(np.diff(starts) == 1))
        self.max_context = width * batch.block_size
        self._floats: torch.Tensor | None = None

    def floats(self, num_floats: int) -> torch.Tensor:
        """Scratch memory of at least `num_floats` float32 on the device; the next call gives the same."""
        if self._floats is None or self._floats.numel() < num_floats:
            self._floats = torch.empty(num_floats, dtype=torch.float32, device=self.query_start.device)
        return self._floats


def device_batch(batch: AttentionBatch, device: torch.device) -> DeviceBatch:
    """The batch's tables on `device`, made at the first call."""
    handle = batch.native_handle
    if handle is None:
        handle = batch.native_handle = DeviceBatch(batch, device)
    return handle
