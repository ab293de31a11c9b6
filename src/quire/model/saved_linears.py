"""The 16-bit and float32 panels of linear layers, kept from one start to the next (`saved_weights`).

Kept are weights whose bytes stand unchanged in a safetensors file, and those that follow from one tensor of a GGUF file
(`MappedFiles.origins`, `DenseWeights.origins`). `pack_linears` packs; here is said what is asked for.

Cost: as of `saved_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from quire.backends import native_module
from quire.model.file_ranges import FileRanges, key_of
from quire.model.linear import DTYPE_NAMES, NativeWeight
from quire.model.saved_weights import SavedWeights, WeightToSave
from quire.saved_folder import SavedFolder

__all__ = ["SavedLinears"]


class SavedLinears(SavedWeights):
    """Of those of `weights`, each [num_outputs, num_inputs] as `weights_to_pack` has them. `pack` is for
    `pack_linears`."""

    def __init__(self, folder: SavedFolder, mapped: FileRanges, weights: Sequence[torch.Tensor]) -> None:
        native = cast(Any, native_module())
        wanted = []
        for weight, origin in zip(weights, mapped.origins(weights), strict=True):
            dtype = DTYPE_NAMES[weight.dtype]
            made = (*weight.shape, *weight.stride())
            num_bytes = native.packed_num_bytes(*weight.shape, dtype)
            layout = (dtype, native.panel_layout(dtype))
            wanted.append(
                WeightToSave(key_of(weight), () if origin is None else (origin,), made, layout, num_bytes)
            )
        super().__init__(folder, wanted)

    def pack(self, weight: torch.Tensor) -> NativeWeight:
        """The packed form of `weight`: mapped, or packed now (and written)."""
        return self.take(
            key_of(weight), lambda: NativeWeight(weight), lambda packed, _: NativeWeight.at(weight, packed)
        )
