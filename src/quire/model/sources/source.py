"""`WeightSource`: named tensors as they are stored, one at a time, wherever they lie.

    safetensors   files of a checkpoint: torch's types
    gguf          one GGUF file: torch's types, and codes with the name of their quantization
    live          a model that is in memory already

A reader of weights (`load_gguf`, `fingerprint`) sees nothing but this, so it never asks which of them it has.
Not a model: nothing is renamed, widened or put anywhere. Names are the source's own.

Cost: opening reads headers; a tensor's bytes are touched when it is read, and belong to nobody afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

__all__ = ["CheckpointTensor", "WeightSource"]


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a source.

    Args:
        name: as the source calls it.
        shape: of its values, as torch counts: [num_outputs, num_inputs] of a linear layer.
        stored: torch's type, or the name of a quantization as GGUF has it, such as "Q4_K".
        read: gives its bytes, not to be written to: a tensor of `stored` and `shape`; of a quantization uint8
            [..., bytes of a row], the codes and scales as they stand in the file.
        path: the file it is in; None where it is in memory.
        offset: of its first byte in that file.
    """

    name: str
    shape: tuple[int, ...]
    stored: torch.dtype | str
    read: Callable[[], torch.Tensor]
    path: Path | None = None
    offset: int = 0

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.stored, str)


class WeightSource(Protocol):
    """All tensors of a model, each once, in the source's order.

    files: all that the tensors are read from, which decide them: equal files, equal tensors. Empty for a live model.
    """

    @property
    def files(self) -> tuple[Path, ...]: ...

    def __iter__(self) -> Iterator[CheckpointTensor]: ...
