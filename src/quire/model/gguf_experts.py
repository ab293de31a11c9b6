"""Experts of a GGUF file, one 3-D tensor a projection: which rows of which tensors are which expert's, read one by one.

transformers' processor of the architecture is asked with numbers of rows, layer by layer (`expert_layout`).

Not here: other tensors, and what becomes of those that are not understood (`load_gguf`).

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

from quire.model.expert_layout import CheckpointExpert, ExpertPart, experts_at, numbered
from quire.model.file_ranges import FileRange, MappedFiles
from quire.model.sources import CheckpointTensor, to_float32
from quire.quantized import QuantizedWeight
from quire.quantized.readers import GGUF_TYPES, gguf_form, read_gguf

__all__ = ["GGUFExperts", "gguf_experts"]

Process = Callable[[CheckpointTensor, np.ndarray, dict[str, torch.Tensor]], Any]
"""What transformers makes of a tensor's values: the name and the values as the model has them. A processor of experts
puts these into the given tensors itself, and gives no name."""

GGUFExperts = dict[str, tuple[set[str], list[CheckpointExpert]]]
"""By the model's parameter: the names of the file's tensors that it is made of, and each expert."""


def gguf_experts(
    tensors: Iterable[CheckpointTensor],
    shape: PreTrainedModel,
    process: Process,
    names: dict[str, str],
    mapped: MappedFiles,
    origin: Callable[[int], FileRange] | None = None,
) -> GGUFExperts:
    """The projections of experts of `shape` that are made of whole rows of `tensors`.

    names: of the model's parameters by those of the tensors. mapped: where the pages of what was read are given back.
    origin: tells what follows from bytes at an offset of the file; None where nobody will ask.
    """
    by_layer: dict[str, list[CheckpointTensor]] = {}
    for tensor in tensors:
        if len(tensor.shape) == 3:
            by_layer.setdefault(tensor.name.rpartition("ffn_")[0], []).append(tensor)
    found: GGUFExperts = {}
    for of_layer in by_layer.values():
        found |= _of_layer(of_layer, shape, process, names, mapped, origin)
    return found


def _of_layer(
    tensors: list[CheckpointTensor],
    shape: PreTrainedModel,
    process: Process,
    names: dict[str, str],
    mapped: MappedFiles,
    origin: Callable[[int], FileRange] | None,
) -> GGUFExperts:
    answer: dict[str, torch.Tensor] = {}
    parts: list[ExpertPart] = []
    owners: dict[int, str] = {}
    first = 0
    for tensor in tensors:
        num_experts, num_rows, _ = tensor.shape
        asked = numbered(first, num_experts * num_rows).view(num_experts, num_rows, -1)
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
            result = process(tensor, asked.numpy(), answer)
        except (ValueError, IndexError, RuntimeError):  # it counts on the tensor's own columns
            continue
        if result.name in names:
            answer[names[result.name]] = torch.from_numpy(np.array(result.weights))
    found: GGUFExperts = {}
    for place, merged in answer.items():
        experts = experts_at(shape, place, merged, parts)
        if experts is not None:
            found[place] = {owners[id(part)] for expert in experts for part in expert.parts}, experts
    return found


def _origins(
    tensor: CheckpointTensor, expert: int, origin: Callable[[int], FileRange] | None
) -> tuple[FileRange, ...]:
    return () if origin is None else (origin(tensor.offset + tensor.read()[:expert].nbytes),)


def _read(tensor: CheckpointTensor, expert: int, mapped: MappedFiles) -> QuantizedWeight | torch.Tensor:
    """One expert; its values where the type is not read as codes."""
    data = tensor.read()[expert]
    if tensor.saved_type in GGUF_TYPES:
        read: QuantizedWeight | torch.Tensor = read_gguf(str(tensor.saved_type), data)
    else:
        read = to_float32(replace(tensor, shape=tensor.shape[1:], read=lambda: data)).clone()
    mapped.release(data)
    return read
