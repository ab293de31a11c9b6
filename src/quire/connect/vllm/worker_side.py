"""`WorkerSide`: copies blocks between vLLM's memory and payloads, in the worker that owns the memory.

vLLM gives a tensor for each layer, [blocks, ...]. The attention back end decides what lies within a block: its bytes
are copied as they are, for the same back end with the same block size (`model_identity`).

Cost: one copy of the bytes on a CPU; on a device one gather or scatter a layer, and one copy between it and the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quire.connect.vllm.step_transfers import BlockLoad, BlockSave, StepResults, StepTransfers
from quire.errors import ArgumentError

__all__ = ["WorkerSide"]


class WorkerSide:
    """num_blocks: of vLLM's pool; a back end may split a block into several of its own. worker: its rank among
    `num_workers` of tensor parallelism, whose parts of a payload have the same size."""

    def __init__(self, num_blocks: int, worker: int = 0, num_workers: int = 1) -> None:
        self._num_blocks, self._worker, self._num_workers = num_blocks, worker, num_workers
        self._layers: list[torch.Tensor] = []  # [blocks, parts of a block, ...]
        self._block_bytes: list[int] = []
        self._results = StepResults()
        self._ended: set[str] = set()

    def register(self, layers: Mapping[str, torch.Tensor]) -> None:
        """Takes vLLM's tensors, by layer; layers that share their memory count once."""
        seen: set[int] = set()
        for name, tensor in layers.items():
            if tensor.shape[0] % self._num_blocks:
                raise ArgumentError(
                    f"expected a tensor of {self._num_blocks} blocks for the layer {name}, "
                    f"got the shape {tuple(tensor.shape)}"
                )
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            layer = tensor.unflatten(0, (self._num_blocks, -1))
            self._layers.append(layer)
            self._block_bytes.append(layer[0].numel() * layer.element_size())

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Writes payloads into blocks; returns when the forward may read them."""
        for load in loads:
            own_bytes = load.num_blocks * sum(self._block_bytes)
            if load.payload.nbytes != own_bytes * self._num_workers:
                raise ArgumentError(
                    f"expected {own_bytes * self._num_workers} bytes of {load.num_blocks} blocks, "
                    f"got {load.payload.nbytes}"
                )
            ids = torch.tensor(load.block_ids)
            start = self._worker * own_bytes
            for layer, size in zip(self._layers, self._block_bytes, strict=True):
                rows = load.payload[start : start + load.num_blocks * size].reshape(load.num_blocks, size)
                wanted = np.array(rows[load.first : load.first + len(ids)])  # a copy: payloads are read-only
                blocks = torch.from_numpy(wanted).view(layer.dtype).view(len(ids), *layer.shape[1:])
                layer[ids.to(layer.device)] = blocks.to(layer.device)
                start += load.num_blocks * size

    def save(self, saves: Sequence[BlockSave]) -> None:
        """Copies blocks into payloads, for `take_results`."""
        for save in saves:
            ids = torch.tensor(save.block_ids)
            payload = np.empty(len(ids) * sum(self._block_bytes), np.uint8)
            start = 0
            for layer, size in zip(self._layers, self._block_bytes, strict=True):
                blocks = layer[ids.to(layer.device)].cpu().contiguous().view(-1).view(torch.uint8)
                payload[start : start + len(ids) * size] = blocks.numpy()
                start += len(ids) * size
            self._results.parts[save.number] = {self._worker: payload}

    def save_last(self, transfers: StepTransfers) -> None:
        """Saves the blocks of requests that have ended; `take_ended` names them then."""
        for request_id, saves in transfers.last_saves.items():
            self.save(saves)
            self._ended.add(request_id)

    def take_results(self) -> StepResults | None:
        """The payloads copied since the last call; None if there are none."""
        if not self._results.parts:
            return None
        results, self._results = self._results, StepResults()
        return results

    def take_ended(self) -> set[str]:
        """Requests whose last blocks have been copied since the last call."""
        ended, self._ended = self._ended, set()
        return ended
