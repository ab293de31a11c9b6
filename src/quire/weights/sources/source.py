"""`WeightSource`: named tensors in their saved form, one at a time, from any source.

    safetensors   files of a checkpoint: torch's types
    gguf          one GGUF file: torch's types, and codes with the name of their quantization
    live          a model in memory

Readers of weights (`load_gguf`, `fingerprint`) use this protocol alone, so they do not depend on the kind of source.
Not a model: nothing is renamed, converted or placed. Names are the source's own.

Cost: opening reads headers; a tensor's bytes are touched when it is read, and the caller owns them.
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
        name: its name in the source.
        shape: of its values, in torch's order: [num_outputs, num_inputs] of a linear layer.
        saved_type: torch's type, or GGUF's name of a quantization, such as "Q4_K".
        read: returns its bytes, read-only: a tensor of `saved_type` and `shape`; for a quantization uint8
            [..., bytes of a row], the file's codes and scales.
        path: its file; None in memory.
        offset: of its first byte in that file.
    """

    name: str
    shape: tuple[int, ...]
    saved_type: torch.dtype | str
    read: Callable[[], torch.Tensor]
    path: Path | None = None
    offset: int = 0

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.saved_type, str)


class WeightSource(Protocol):
    """All tensors of a model, each once, in the source's order.

    files: all files that the tensors are read from: equal files give equal tensors. Empty for a live model.
    """

    @property
    def files(self) -> tuple[Path, ...]: ...

    def __iter__(self) -> Iterator[CheckpointTensor]: ...
