"""The 16-bit and float32 panels of linear layers, saved from one start to the next (`saved_weights`).

A weight is saved if its bytes stand unchanged in a safetensors file, or if it is made from one tensor of a GGUF file
(`MappedFiles.origins`, `GGUFRanges.origins`). `pack_linears` packs; this module lists the weights and their layouts.

Cost: as of `saved_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from quire.backends import native_module
from quire.devices.cpu.packed_weights import DTYPE_NAMES, NativeWeight
from quire.saved_folder import SavedFolder
from quire.weights.file_ranges import FileRanges, weight_key
from quire.weights.saved_weights import SavedWeights, WeightToSave

__all__ = ["SavedLinears"]


class SavedLinears(SavedWeights):
    """The saved panels of `weights`, each [num_outputs, num_inputs], as `weights_to_pack` returns them. `pack` is an
    argument of `pack_linears`."""

    def __init__(self, folder: SavedFolder, file_ranges: FileRanges, weights: Sequence[torch.Tensor]) -> None:
        native = cast(Any, native_module())
        to_save = []
        for weight, origin in zip(weights, file_ranges.origins(weights), strict=True):
            dtype = DTYPE_NAMES[weight.dtype]
            settings = (*weight.shape, *weight.stride())
            num_bytes = native.packed_num_bytes(*weight.shape, dtype)
            layout = (dtype, native.panel_layout(dtype))
            to_save.append(
                WeightToSave(
                    weight_key(weight), () if origin is None else (origin,), settings, layout, num_bytes
                )
            )
        super().__init__(folder, to_save)

    def pack(self, weight: torch.Tensor) -> NativeWeight:
        """The packed form of `weight`: mapped, or packed now (and saved)."""
        return self.load_or_make(
            weight_key(weight),
            lambda: NativeWeight(weight),
            lambda packed, _: NativeWeight.from_packed(weight, packed),
        )
