"""The weights of a model in memory: every parameter once, by its first name, and every persistent buffer.

Packed weights of `accelerate` are unpacked. There is no file: their present values are their only source.

Cost: the tensors themselves, no copies, except for unpacked weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from quire.weights.dense_weights import dense_weight
from quire.weights.sources.source import CheckpointTensor

__all__ = ["LiveSource"]


class LiveSource:
    """The weights of `model`. See `WeightSource`."""

    files: tuple[Path, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __iter__(self) -> Iterator[CheckpointTensor]:
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _checkpoint_tensor(f"{prefix}.{name}", parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield _checkpoint_tensor(f"{prefix}.{name}", buffer)


def _checkpoint_tensor(name: str, tensor: torch.Tensor) -> CheckpointTensor:
    return CheckpointTensor(name, tuple(tensor.shape), tensor.dtype, lambda: dense_weight(tensor))
