"""Experts of a GGUF file, one 3-D tensor per projection: maps the rows of its tensors to experts, and reads one at a
time.

transformers' processor of the architecture runs on row numbers, layer by layer (`expert_layout`).

Not here: other tensors, and the handling of experts that are not understood (`load_gguf`).

Cost: a few bytes for each row of a layer's experts, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quire.weights.codes import QuantizedWeight
from quire.weights.codes.readers import GGUF_TYPES, gguf_form, read_gguf
from quire.weights.expert_layout import CheckpointExpert, ExpertPart, projection_experts, row_numbers
from quire.weights.file_ranges import FileRange, MappedFiles
from quire.weights.sources import CheckpointTensor, to_float32

__all__ = ["GGUFExperts", "gguf_experts"]

Process = Callable[[CheckpointTensor, np.ndarray, dict[str, torch.Tensor]], Any]
"""transformers' processing of a tensor's values: returns the name and the values in the model's layout. A processor of
experts puts the values into the given tensors itself, and returns no name."""

GGUFExperts = dict[str, tuple[set[str], list[CheckpointExpert]]]
"""By the model's parameter: the names of the file's tensors that it is made from, and each expert."""


def gguf_experts(
    tensors: Iterable[CheckpointTensor],
    shape: PreTrainedModel,
    process: Process,
    names: dict[str, str],
    mapped: MappedFiles,
    origin: Callable[[int], FileRange] | None = None,
) -> GGUFExperts:
    """The projections of experts of `shape` that are made of whole rows of `tensors`.

    names: the model's parameter names by tensor name. mapped: releases the pages of tensors that were read. origin: the
    file range of data at an offset of the file; None if no caller needs ranges.
    """
    by_layer: dict[str, list[CheckpointTensor]] = {}
    for tensor in tensors:
        if len(tensor.shape) == 3:
            by_layer.setdefault(tensor.name.rpartition("ffn_")[0], []).append(tensor)
    experts: GGUFExperts = {}
    for of_layer in by_layer.values():
        experts |= _layer_experts(of_layer, shape, process, names, mapped, origin)
    return experts


def _layer_experts(
    tensors: list[CheckpointTensor],
    shape: PreTrainedModel,
    process: Process,
    names: dict[str, str],
    mapped: MappedFiles,
    origin: Callable[[int], FileRange] | None,
) -> GGUFExperts:
    merged_by_place: dict[str, torch.Tensor] = {}
    parts: list[ExpertPart] = []
    owners: dict[int, str] = {}
    first = 0
    for tensor in tensors:
        num_experts, num_rows, _ = tensor.shape
        row_ids = row_numbers(first, num_experts * num_rows).view(num_experts, num_rows, -1)
        first += num_experts * num_rows
        form = None
        if tensor.saved_type in GGUF_TYPES:
            form = partial(gguf_form, str(tensor.saved_type), tensor.shape[2])
        of_tensor = [
            ExpertPart(
                num_rows,
                partial(_read, tensor, expert, mapped),
                form,
                partial(_origins, tensor, expert, origin),
            )
            for expert in range(num_experts)
        ]
        parts += of_tensor
        owners |= {id(part): tensor.name for part in of_tensor}
        try:
            result = process(tensor, row_ids.numpy(), merged_by_place)
        except (ValueError, IndexError, RuntimeError):  # the processor relies on the tensor's own columns
            continue
        if result.name in names:
            merged_by_place[names[result.name]] = torch.from_numpy(np.array(result.weights))
    experts_by_place: GGUFExperts = {}
    for place, merged in merged_by_place.items():
        experts = projection_experts(shape, place, merged, parts)
        if experts is not None:
            tensor_names = {owners[id(part)] for expert in experts for part in expert.parts}
            experts_by_place[place] = tensor_names, experts
    return experts_by_place


def _origins(
    tensor: CheckpointTensor, expert: int, origin: Callable[[int], FileRange] | None
) -> tuple[FileRange, ...]:
    return () if origin is None else (origin(tensor.offset + tensor.read()[:expert].nbytes),)


def _read(tensor: CheckpointTensor, expert: int, mapped: MappedFiles) -> QuantizedWeight | torch.Tensor:
    """One expert, quantized; dense if the type is not read as codes."""
    data = tensor.read()[expert]
    if tensor.saved_type in GGUF_TYPES:
        read: QuantizedWeight | torch.Tensor = read_gguf(str(tensor.saved_type), data)
    else:
        read = to_float32(replace(tensor, shape=tensor.shape[1:], read=lambda: data)).clone()
    mapped.release(data)
    return read
