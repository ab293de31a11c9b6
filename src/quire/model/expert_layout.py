"""Experts as a checkpoint stores them, and which of its rows are which of the model's: asked of whoever merges them.

A checkpoint has a tensor for each expert and projection, or one for all experts; transformers has one parameter of all
experts, with gate and up merged. How they are merged transformers says only by doing it to values: here it does it to
numbers of rows. What comes back in whole rows is read from the codes, expert by expert; all else is not understood, and
None.

    Part       some rows that are stored together, as many as the parameter has of one expert or fewer
    numbered   stands for a part while the merging is asked
    experts_in what each expert is made of, by the answer

Not here: how a checkpoint is read (`load_quantized`, `load_gguf`), and what computes (`quantized_experts`).

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
from quire.model.experts import projections_of
from quire.model.file_ranges import FileRange
from quire.quantized import CodeForm, QuantizedWeight, join_forms, join_weights, round_to_codes
from quire.spec.weight_formats import Rounding

__all__ = [
    "CheckpointExpert",
    "CheckpointNames",
    "ExpertPart",
    "experts_at",
    "experts_in",
    "merged_experts",
    "numbered",
    "projection_shape",
]

_COLUMNS = 2  # more than one, so that a change of columns shows


@dataclass(frozen=True)
class ExpertPart:
    """num_rows: outputs. read: gives them, as codes or as they are, each time it is called. form: tells what the codes
    will be, by headers; None: they are no codes. origins: tells the bytes of files they follow from; none where that is
    not certain."""

    num_rows: int
    read: Callable[[], QuantizedWeight | torch.Tensor]
    form: Callable[[], CodeForm] | None = None
    origins: Callable[[], tuple[FileRange, ...]] = tuple


@dataclass(frozen=True)
class CheckpointExpert:
    """One expert of a projection. order: of the rows of its parts, one after the other; None: as they come."""

    parts: tuple[ExpertPart, ...]
    order: torch.Tensor | None

    def read(self) -> QuantizedWeight:
        """Its codes.

        *raises:* ArgumentError: its parts are coded in different ways, or not at all.
        """
        codes: list[QuantizedWeight] = []
        for part in self.parts:
            read = part.read()
            if not isinstance(read, QuantizedWeight):
                raise ArgumentError(f"expected an expert of codes, got a part in {read.dtype}")
            codes.append(read)
        weight = join_weights(codes)
        return weight if self.order is None else weight.select_outputs(self.order)

    def form(self) -> CodeForm:
        """Of what `read` gives, which nobody reads here. *raises:* ArgumentError: as `read`, as far as headers tell."""
        forms: list[CodeForm] = []
        for part in self.parts:
            if part.form is None:
                raise ArgumentError("expected an expert of codes, got a part that is none")
            forms.append(part.form())
        return join_forms(forms)

    def origins(self) -> tuple[FileRange, ...]:
        """The bytes of files that it follows from, and `order`; none where that is not certain."""
        of_parts = [part.origins() for part in self.parts]
        return tuple(origin for part in of_parts for origin in part) if all(of_parts) else ()

    def rounded(self, rounding: Rounding) -> QuantizedWeight:
        """Its values, rounded to codes anew."""
        return round_to_codes(self.dense(), rounding)

    def dense(self) -> torch.Tensor:
        """Its values [num_outputs, num_inputs], in float32 or as they are stored."""
        found = [part.read() for part in self.parts]
        dense = [one.dequantize() if isinstance(one, QuantizedWeight) else one for one in found]
        whole = dense[0] if len(dense) == 1 else torch.cat(dense)
        return whole if self.order is None else whole[self.order]


def projection_shape(model: nn.Module, place: str) -> tuple[int, int, int, bool] | None:
    """(experts, num_outputs, num_inputs, whether it lies as [E, num_inputs, num_outputs]) of the parameter `place`;
    None where it is no projection of experts."""
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


def numbered(first: int, num_rows: int) -> torch.Tensor:
    """int32 [num_rows, 2]: rows from number `first` on, in place of the values of a part."""
    return torch.arange(first * _COLUMNS, (first + num_rows) * _COLUMNS, dtype=torch.int32).view(-1, _COLUMNS)


def experts_in(merged: torch.Tensor, parts: Sequence[ExpertPart]) -> list[CheckpointExpert] | None:
    """What each expert is made of. merged: [E, num_outputs, 2], made of what `numbered` gives for all parts in turn.

    None: not of whole rows, each once, or not of whole parts.
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
    found = []
    for numbers, owner in zip(rows, owners, strict=True):
        used = owner.unique()
        if int(sizes[used].sum()) != len(numbers) or len(numbers.unique()) != len(numbers):
            return None
        before = torch.zeros(len(parts), dtype=torch.int64)
        before[used] = sizes[used].cumsum(0) - sizes[used]
        order = before[owner] + numbers - (ends - sizes)[owner]
        as_they_come = torch.equal(order, torch.arange(len(order)))
        found.append(
            CheckpointExpert(tuple(parts[one] for one in used.tolist()), None if as_they_come else order)
        )
    return found


def experts_at(
    shape: PreTrainedModel, place: str, merged: torch.Tensor, parts: Sequence[ExpertPart]
) -> list[CheckpointExpert] | None:
    """`experts_in`, where `merged` has as many experts and outputs as the projection `place`; None where not."""
    wanted = projection_shape(shape, place)
    if wanted is None or merged.dim() != 3:
        return None
    num_experts, num_outputs, _, transposed = wanted
    merged = merged.transpose(1, 2) if transposed else merged
    return experts_in(merged, parts) if merged.shape[:2] == (num_experts, num_outputs) else None


class CheckpointNames:
    """Which parameters of `shape` the tensors of a checkpoint become, by transformers' own renamings."""

    def __init__(self, shape: PreTrainedModel, key_mapping: Any) -> None:
        entries = get_model_conversion_mapping(shape, key_mapping)
        self.shape = shape
        self.parameters = shape.state_dict()
        self.converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]

    def place_of(self, name: str) -> tuple[str, str | None]:
        """The parameter, and the pattern of the converter that makes it of this tensor and others; None: it alone."""
        prefix = self.shape.base_model_prefix
        return rename_source_key(name, self._renamings, self.converters, prefix, self.parameters)


def merged_experts(
    names: CheckpointNames, parts: Mapping[str, ExpertPart]
) -> dict[str, tuple[list[str], list[CheckpointExpert]]]:
    """By the parameters that transformers merges: the tensors of a checkpoint they are made of, and each expert.

    parts: the tensors that may be read so, by their names in the checkpoint.
    Left out are parameters of which something is not among `parts`, and those merged in another way than by rows.
    """
    shape = names.shape
    by_pattern = {pattern: entry for entry in names.converters for pattern in entry.source_patterns}
    by_place: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(parts, key=dot_natural_key):  # as transformers goes over them
        place, pattern = names.place_of(name)
        if pattern is not None and place in names.parameters:
            by_place.setdefault(place, []).append((name, pattern))
    found = {}
    for place, named in by_place.items():
        if projection_shape(shape, place) is None or names.place_of(place) != (place, None):
            continue
        converter = deepcopy(by_pattern[named[0][1]])
        of_place, first = [parts[name] for name, _ in named], 0
        for (name, pattern), part in zip(named, of_place, strict=True):
            converter.add_tensor(place, name, pattern, numbered(first, part.num_rows))  # pyright: ignore
            first += part.num_rows
        try:
            merged = converter.convert(place, model=shape, config=shape.config).get(place)
        except Exception:  # it counts on the columns, or on tensors that are not there
            continue
        if isinstance(merged, list):
            merged = merged[0]
        experts = None if merged is None else experts_at(shape, place, merged, of_place)
        if experts is not None:
            found[place] = ([name for name, _ in named], experts)
    return found
