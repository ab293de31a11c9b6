"""How the rows of a checkpoint's expert tensors map to the rows of the model's expert parameters.

A checkpoint has a tensor for each expert and projection, or one for all experts; transformers has one parameter of all
experts, with gate and up merged. transformers only merges values and does not describe the merge, so this module merges
row numbers instead. If whole rows come out, each expert is read from the codes; any other result is not understood, and
None.

    ExpertPart         rows that are stored together, at most the rows of one expert in the parameter
    row_numbers        the stand-in for a part while transformers merges
    experts_from_rows  the parts of each expert, from the merged row numbers

Not here: reading a checkpoint (`load_quantized`, `load_gguf`), and computing (`quantized_experts`).

Cost: a few bytes for each row of a projection of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from quire.errors import ArgumentError
from quire.spec.weight_formats import Rounding
from quire.weights.codes import CodeForm, QuantizedWeight, join_forms, join_weights, round_to_codes
from quire.weights.experts import projections_of
from quire.weights.file_ranges import FileRange

__all__ = [
    "CheckpointExpert",
    "CheckpointNames",
    "ExpertPart",
    "experts_from_rows",
    "merged_experts",
    "projection_experts",
    "projection_shape",
    "row_numbers",
]

_COLUMNS = 2  # more than one, so that a change of columns is visible


@dataclass(frozen=True)
class ExpertPart:
    """num_rows: outputs. read: reads them, quantized or dense, at each call. form: the form of the codes, from headers;
    None: the part is dense. origins: the file ranges that the part is made from; empty if that is not certain."""

    num_rows: int
    read: Callable[[], QuantizedWeight | torch.Tensor]
    form: Callable[[], CodeForm] | None = None
    origins: Callable[[], tuple[FileRange, ...]] = tuple


@dataclass(frozen=True)
class CheckpointExpert:
    """One expert of a projection. order: of the rows of its parts, one after the other; None: as stored."""

    parts: tuple[ExpertPart, ...]
    order: torch.Tensor | None

    def read(self) -> QuantizedWeight:
        """Its quantized weight.

        *raises:* ArgumentError: its parts are quantized in different ways, or dense.
        """
        codes: list[QuantizedWeight] = []
        for part in self.parts:
            read = part.read()
            if not isinstance(read, QuantizedWeight):
                raise ArgumentError(f"expected a quantized expert, got a part in {read.dtype}")
            codes.append(read)
        weight = join_weights(codes)
        return weight if self.order is None else weight.select_outputs(self.order)

    def form(self) -> CodeForm:
        """The form of the result of `read`, without reading. *raises:* ArgumentError: as `read`, as far as headers
        tell."""
        forms: list[CodeForm] = []
        for part in self.parts:
            if part.form is None:
                raise ArgumentError("expected a quantized expert, got a dense part")
            forms.append(part.form())
        return join_forms(forms)

    def origins(self) -> tuple[FileRange, ...]:
        """The file ranges that it and `order` are made from; empty if that is not certain."""
        of_parts = [part.origins() for part in self.parts]
        return tuple(origin for part in of_parts for origin in part) if all(of_parts) else ()

    def quantize(self, rounding: Rounding) -> QuantizedWeight:
        """Its values, rounded to new codes."""
        return round_to_codes(self.dense(), rounding)

    def dense(self) -> torch.Tensor:
        """Its values [num_outputs, num_inputs], in float32 or in the dtype of the checkpoint."""
        parts = [part.read() for part in self.parts]
        dense = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
        values = dense[0] if len(dense) == 1 else torch.cat(dense)
        return values if self.order is None else values[self.order]


def projection_shape(model: nn.Module, place: str) -> tuple[int, int, int, bool] | None:
    """(experts, num_outputs, num_inputs, whether it lies as [E, num_inputs, num_outputs]) of the parameter `place`;
    None if it is not a projection of experts."""
    module_name, _, name = place.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        return None
    names = projections_of(module)
    if names is None or name not in names:
        return None
    experts, rows, columns = module.get_parameter(name).shape
    transposed = bool(module.is_transposed)
    return (experts, columns, rows, True) if transposed else (experts, rows, columns, False)


def row_numbers(first: int, num_rows: int) -> torch.Tensor:
    """int32 [num_rows, 2]: row numbers from `first` on, in place of the values of a part."""
    return torch.arange(first * _COLUMNS, (first + num_rows) * _COLUMNS, dtype=torch.int32).view(-1, _COLUMNS)


def experts_from_rows(merged: torch.Tensor, parts: Sequence[ExpertPart]) -> list[CheckpointExpert] | None:
    """The parts of each expert. merged: [E, num_outputs, 2], made from `row_numbers` of all parts in turn.

    None if the experts are not made of whole rows, each used once, or not of whole parts.
    """
    if merged.dim() != 3 or merged.shape[2] != _COLUMNS:
        return None
    rows = merged[:, :, 0].to(torch.int64) // _COLUMNS
    if not torch.equal(merged.to(torch.int64), rows[:, :, None] * _COLUMNS + torch.arange(_COLUMNS)):
        return None
    sizes = torch.tensor([part.num_rows for part in parts])
    ends = sizes.cumsum(0)
    owners = torch.searchsorted(ends, rows, right=True)
    if int(rows.min()) < 0 or int(rows.max()) >= int(ends[-1]):
        return None
    experts = []
    for numbers, owner in zip(rows, owners, strict=True):
        used = owner.unique()
        if int(sizes[used].sum()) != len(numbers) or len(numbers.unique()) != len(numbers):
            return None
        before = torch.zeros(len(parts), dtype=torch.int64)
        before[used] = sizes[used].cumsum(0) - sizes[used]
        order = before[owner] + numbers - (ends - sizes)[owner]
        is_in_order = torch.equal(order, torch.arange(len(order)))
        expert_parts = tuple(parts[index] for index in used.tolist())
        experts.append(CheckpointExpert(expert_parts, None if is_in_order else order))
    return experts


def projection_experts(
    shape: PreTrainedModel, place: str, merged: torch.Tensor, parts: Sequence[ExpertPart]
) -> list[CheckpointExpert] | None:
    """`experts_from_rows`, if `merged` has as many experts and outputs as the projection `place`; else None."""
    expected = projection_shape(shape, place)
    if expected is None or merged.dim() != 3:
        return None
    num_experts, num_outputs, _, transposed = expected
    merged = merged.transpose(1, 2) if transposed else merged
    return experts_from_rows(merged, parts) if merged.shape[:2] == (num_experts, num_outputs) else None


class CheckpointNames:
    """Maps the tensors of a checkpoint to the parameters of `shape`, by transformers' own renamings."""

    def __init__(self, shape: PreTrainedModel, key_mapping: Any) -> None:
        entries = get_model_conversion_mapping(shape, key_mapping)
        self.shape = shape
        self.parameters = shape.state_dict()
        self.converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]

    def place_of(self, name: str) -> tuple[str, str | None]:
        """The parameter, and the pattern of the converter that makes it from this tensor and others; None: from this
        tensor alone."""
        prefix = self.shape.base_model_prefix
        return rename_source_key(name, self._renamings, self.converters, prefix, self.parameters)


def merged_experts(
    names: CheckpointNames, parts: Mapping[str, ExpertPart]
) -> dict[str, tuple[list[str], list[CheckpointExpert]]]:
    """For each parameter that transformers merges: the checkpoint tensors that it is made from, and each expert.

    parts: the tensors that may be read as parts, by their names in the checkpoint. A parameter is left out if one of
    its tensors is not among `parts`, or if it is not merged by rows.
    """
    shape = names.shape
    by_pattern = {pattern: entry for entry in names.converters for pattern in entry.source_patterns}
    by_place: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(parts, key=dot_natural_key):  # the order of transformers
        place, pattern = names.place_of(name)
        if pattern is not None and place in names.parameters:
            by_place.setdefault(place, []).append((name, pattern))
    experts_by_place = {}
    for place, named in by_place.items():
        if projection_shape(shape, place) is None or names.place_of(place) != (place, None):
            continue
        converter = deepcopy(by_pattern[named[0][1]])
        of_place, first = [parts[name] for name, _ in named], 0
        for (name, pattern), part in zip(named, of_place, strict=True):
            converter.add_tensor(place, name, pattern, row_numbers(first, part.num_rows))  # pyright: ignore
            first += part.num_rows
        try:
            merged = converter.convert(place, model=shape, config=shape.config).get(place)
        except Exception:  # the converter relies on the columns, or on missing tensors
            continue
        if isinstance(merged, list):
            merged = merged[0]
        experts = None if merged is None else projection_experts(shape, place, merged, of_place)
        if experts is not None:
            experts_by_place[place] = ([name for name, _ in named], experts)
    return experts_by_place
