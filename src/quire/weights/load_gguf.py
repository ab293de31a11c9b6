"""Loads a model and its tokenizer from one GGUF file, with its weights quantized as in the file, or dequantized.

`quire.weights.gguf` interprets the header's keys and the tensors of each architecture; transformers maps the names of
its models' parameters to tensor names. Its own loader (`gguf_file=`) reads the whole vocabulary three times and keeps
the largest tensor in float32 three times: 50 s and 3.1 GB for Gemma 3 270M.

Invariants:
    L1  A key of the header or a tensor that is not read here refuses the file by its name.

Linear layers, heads, embeddings and experts stay quantized if their type has a reader (`quire.weights.codes.readers`),
each in its own type, and if the writer only reordered their rows: that is undone on the rows of codes.

Cost: the codes in the kernels' layout, and during the load a byte for each of some million values, or for each value of
one expert. For dequantized weights, the weights in `dtype`, and during the load the largest tensor in float32.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from quire.errors import LoadError
from quire.load_progress import observer
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding, WeightFormats
from quire.weights.codes import PANEL, CodeForm, QuantizedWeight, readers
from quire.weights.codes.readers import GGUF_TYPES, gguf_form, read_gguf
from quire.weights.file_ranges import FileRange, MappedFiles
from quire.weights.gguf import ARCHITECTURES, GGUFHeader
from quire.weights.gguf.names import tensor_names
from quire.weights.gguf_experts import gguf_experts
from quire.weights.linear import is_transposed
from quire.weights.meta_weights import (
    CheckpointLinear,
    MetaWeights,
    SaveTarget,
    can_be_quantized,
    quantized_forms,
)
from quire.weights.quantized_experts import ExpertForms
from quire.weights.quantized_modules import expert_forms, planned_forms
from quire.weights.saved_weights import SavedWeights
from quire.weights.sources import CheckpointTensor, GGUFSource, dequantizer_versions, to_float32

__all__ = [
    "GGUFRanges",
    "end_ids",
    "gguf_config",
    "load_gguf_model",
    "load_gguf_tokenizer",
    "planned_gguf_codes",
]

_log = logging.getLogger("quire")
_READ_AT_ONCE = 1 << 22  # values of a weight whose codes are unpacked
_COLUMNS = 8  # of the row numbers given to a processor: more than one, so that a change of columns is visible


class GGUFRanges:
    """The tensor of a GGUF file that each weight of a model was dequantized from, for `saved_weights`.

    The counterpart of `MappedFiles` for weights that are computed from bytes of a file.
    """

    def __init__(self, source: GGUFSource) -> None:
        status = source.path.stat()
        self._path = str(source.path.resolve())
        self._stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        self._offsets: dict[tuple[int, torch.Size], int] = {}

    def origin(self, offset: int) -> FileRange:
        """The file range of codes at this offset."""
        return FileRange(self._path, self._stamp, offset, dequantizer_versions())

    def add(self, weight: torch.Tensor, offset: int) -> None:
        """Records that `weight` was dequantized from the tensor at `offset`."""
        self._offsets[weight.data_ptr(), weight.shape] = offset

    def release(self, weight: torch.Tensor) -> None:
        """Does nothing: the weight has memory of its own."""

    def release_files(self, remaining: Iterable[torch.Tensor]) -> None:
        """Does nothing, as `release`."""

    def origins(self, weights: Sequence[torch.Tensor]) -> list[FileRange | None]:
        """As of `MappedFiles`; None if the weight is not made from a single tensor of the file."""
        offsets = [self._offsets.get((weight.data_ptr(), weight.shape)) for weight in weights]
        by = dequantizer_versions()
        return [
            None if offset is None else FileRange(self._path, self._stamp, offset, by) for offset in offsets
        ]


def gguf_config(source: GGUFSource) -> Any:
    """The config of the file's model.

    *raises:* LoadError: the architecture is unknown, or a key of the header is not read.
    """
    return _config(source)[0]


def load_gguf_model(
    source: GGUFSource,
    dtype: torch.dtype,
    *,
    is_dense: bool = False,
    rounded: WeightFormats | None = None,
    saved_folder: SavedFolder | None = None,
    backend: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any], GGUFRanges, tuple[SavedWeights, ...]]:
    """The model in `dtype`, transformers' report of the loading, the file ranges of its weights, and the files of its
    saved codes (`saved_codes`).

    is_dense: all weights are dequantized. rounded: the formats to round experts to, with `is_dense`; the caller rounds
    the other weights. saved_folder: a folder for codes. backend: the back end that computes from codes.

    *raises:* LoadError: as `gguf_config`; ArgumentError: a pattern of `rounded` matches no weight; the errors of
    transformers.
    """
    weights = GGUFRanges(source)
    config, fields, header = _config(source)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, dtype=dtype)
    forms = None if is_dense else {}
    if rounded is not None:
        planned_forms(shape, rounded)  # refuses a pattern without a match
        forms = expert_forms(shape, rounded) or None
    meta_weights = MetaWeights(backend)
    tensors = _tensors(header, shape, fields, dtype, weights, meta_weights, is_dense, forms)
    loaded: Any = type(shape).from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, report = loaded
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise LoadError(
            f"cannot load the model {source.path}: {len(wrong)} of its tensors have other shapes than the config "
            f"that transformers {transformers_version} derives from it: the first, {name}, is {list(stored)} instead "
            f"of {list(expected)}"
        )
    # In a file that was just written each page maps up to 2 MiB around it: norms bring in a part of the codes.
    MappedFiles(str(source.path.resolve())).release_files(tensor.read() for tensor in source)
    by = f"readers {readers.VERSION}"
    saved_weights = meta_weights.read_into(model, SaveTarget.if_possible(saved_folder, by, backend))
    model.config.name_or_path = str(source.path)
    return model, report, weights, saved_weights


def planned_gguf_codes(source: GGUFSource, shape: PreTrainedModel) -> dict[str, CodeForm | ExpertForms]:
    """The parameters of `shape`, the model on torch's meta device, that `load_gguf_model` would leave quantized, with
    their forms. Reads the header."""
    _, fields, header = _config(source)
    processor, names = _processing(header, shape, fields)
    process, mapped = partial(_process, processor, names, fields), MappedFiles(str(source.path.resolve()))
    quantized = [tensor for tensor in header.weights if tensor.saved_type in GGUF_TYPES]
    experts_by_place = gguf_experts(quantized, shape, process, names, mapped)
    forms = {}
    for tensor in header.weights:
        place = names.get(tensor.name)
        if place is not None and _row_order(tensor, place, shape, processor, names) is not None:
            forms[place] = gguf_form(str(tensor.saved_type), tensor.shape[1])
    return quantized_forms(shape, forms, {place: experts for place, (_, experts) in experts_by_place.items()})


def load_gguf_tokenizer(source: GGUFSource, config: Any) -> Any:
    """The tokenizer and its chat template; None if the file has no vocabulary."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    if not source.num_words:
        return None
    # The class is chosen here: `AutoTokenizer` would derive a config from the file in its own way.
    class_name = TOKENIZER_MAPPING_NAMES.get(config.model_type)
    kind: Any = tokenizer_class_from_name(class_name) if class_name else None
    if kind is None or not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast
    with _only_file(source) as (folder, name):
        tokenizer: Any = kind.from_pretrained(folder, gguf_file=name)
    tokenizer.name_or_path = str(source.path)
    return tokenizer


def end_ids(source: GGUFSource) -> tuple[int, ...]:
    """Ids that end an answer, in addition to the end of the text: of a turn, of a message."""
    ids = [source.field(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    return tuple(int(token) for token in ids if token is not None)


def _config(source: GGUFSource) -> tuple[Any, dict[str, Any], GGUFHeader]:
    """The config, the fields that it is made from, and their header."""
    architecture = ARCHITECTURES.get(source.architecture)
    if architecture is None:
        raise LoadError(
            f"expected a GGUF file of a known architecture ({', '.join(sorted(ARCHITECTURES))}), {source.path} is of "
            f"architecture {source.architecture!r}. Take the model as safetensors."
        )
    header = GGUFHeader(source)
    try:
        fields = architecture.config(header)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise LoadError(
            f"cannot read the header of {source.path}: {source.architecture}.{header.last_key} = "
            f"{header.read(header.last_key, None)!r}: {error}"
        ) from error
    header.refuse_unread(architecture.no_effect)
    try:
        return AutoConfig.for_model(**fields), fields, header
    except Exception as error:  # configs check their fields in many ways
        raise LoadError(
            f"expected a header that fits a {fields['model_type']} of transformers {transformers_version}, "
            f"{source.path} has one that does not: {' '.join(str(error).split())}"
        ) from error


def _tensors(
    header: GGUFHeader,
    shape: PreTrainedModel,
    fields: dict[str, Any],
    dtype: torch.dtype,
    weights: GGUFRanges,
    meta_weights: MetaWeights,
    is_dense: bool,
    forms: dict[str, Rounding] | None,
) -> dict[str, torch.Tensor]:
    """The state dict of the model `shape`, with stand-ins for the weights of `meta_weights`.

    is_dense: linear layers, heads and embeddings are dequantized. forms: the formats to round experts to; empty:
    experts stay quantized as in the file; None: they are dequantized.
    """
    source = header.source
    processor, names = _processing(header, shape, fields)
    tensors: dict[str, torch.Tensor] = {}
    unknown = []
    mapped = MappedFiles(str(source.path.resolve()))
    process = partial(_process, processor, names, fields)
    read_later: set[str] = set()
    if forms is not None:
        candidates = [tensor for tensor in header.weights if forms or tensor.saved_type in GGUF_TYPES]
        experts_by_place = gguf_experts(candidates, shape, process, names, mapped, weights.origin)
        for place, (tensor_names, experts) in experts_by_place.items():
            if not forms or place in forms:
                model_shape = shape.get_parameter(place).shape
                tensors[place] = meta_weights.experts_stand_in(
                    place, model_shape, dtype, experts, forms.get(place)
                )
                read_later |= tensor_names
    for tensor in header.weights:
        if tensor.name in read_later:
            continue
        place = names.get(tensor.name)
        rows = None if is_dense or place is None else _row_order(tensor, place, shape, processor, names)
        if place is not None and rows is not None:
            form = partial(gguf_form, str(tensor.saved_type), tensor.shape[1])
            origins = partial(_origins, weights, tensor)
            linear = CheckpointLinear(
                partial(_read, tensor, rows, mapped, meta_weights.takes_parts), form, origins, rows
            )
            tensors[place] = meta_weights.stand_in(place, shape.get_parameter(place).shape, dtype, linear)
            continue
        if tensor.is_quantized and not is_dense:
            meta_weights.note_dense(
                tensor.name, f"{tensor.saved_type} is not read as codes, or not for what the model has there"
            )
        try:
            result = process(tensor, to_float32(tensor).numpy(), tensors)
        except (ValueError, IndexError, RuntimeError) as error:
            raise LoadError(
                f"expected tensors that fit the header, {tensor.name} of {source.path} is {list(tensor.shape)}: {error}"
            ) from error
        observer().add_read(tensor.read().nbytes)
        if result.name in names:
            # A tensor that was not dequantized may still lie in the file's mapping.
            weight = torch.from_numpy(np.ascontiguousarray(result.weights))
            weight = weight.to(dtype, copy=not tensor.is_quantized)
            tensors[names[result.name]] = weight
            weights.add(weight, tensor.offset or 0)
        elif result.name is not None:
            unknown.append(tensor.name)
    _refuse_unread(header, unknown)
    return tensors


def _refuse_unread(header: GGUFHeader, names: Sequence[str]) -> None:
    """Refuse the file if it has tensors without a place in the model."""
    if names:
        raise LoadError(
            f"expected known tensors of the architecture {header.architecture}, got {names[0]}"
            f"{f' and {len(names) - 1} more' if len(names) > 1 else ''} - in {header.source.path}; answers would "
            "differ from the model's. Take the model as safetensors."
        )


def _processing(
    header: GGUFHeader, shape: PreTrainedModel, fields: dict[str, Any]
) -> tuple[Any, dict[str, str]]:
    """The processor of the file's tensors, and the model's parameter name of each tensor."""
    processor = ARCHITECTURES[header.architecture].tensors(config=fields)
    return processor, tensor_names(header.architecture, shape, processor)


def _process(
    processor: Any,
    names: dict[str, str],
    fields: dict[str, Any],
    tensor: CheckpointTensor,
    values: np.ndarray,
    parsed: dict[str, torch.Tensor],
) -> Any:
    """transformers' processing of a tensor's values. A processor of experts puts them into `parsed` itself."""
    return processor.process(
        weights=values,
        name=tensor.name,
        tensor_key_mapping=names,
        parsed_parameters={"tensors": parsed, "config": fields},
    )


def _row_order(
    tensor: CheckpointTensor, place: str, shape: PreTrainedModel, processor: Any, names: dict[str, str]
) -> torch.Tensor | None:
    """The model's order of the tensor's rows, if the weight at `place` can stay quantized; else None.

    transformers undoes the file writer's reordering on values only: this runs it on row numbers.
    """
    if (
        tensor.saved_type not in GGUF_TYPES
        or len(tensor.shape) != 2
        or not can_be_quantized(shape, place, *tensor.shape)
    ):
        return None
    row_ids = np.arange(tensor.shape[0] * _COLUMNS, dtype=np.float64).reshape(-1, _COLUMNS)
    try:
        result = processor.process(
            weights=row_ids.copy(),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": {}, "config": {}},
        )
    except (ValueError, IndexError):  # the processor relies on the weight's own columns
        return None
    values = result.weights
    if result.name != tensor.name or values is None:
        return None
    if is_transposed(shape.get_submodule(place.rpartition(".")[0])):
        values = values.T
    if values.shape != row_ids.shape:
        return None
    rows = values[:, 0] // _COLUMNS
    if not np.array_equal(values, row_ids[rows.astype(np.int64)]) or len(np.unique(rows)) != len(rows):
        return None
    return torch.from_numpy(rows.astype(np.int64))


def _origins(weights: GGUFRanges, tensor: CheckpointTensor) -> tuple[FileRange, ...]:
    return (weights.origin(tensor.offset),)


def _read(
    tensor: CheckpointTensor, rows: torch.Tensor, mapped: MappedFiles, in_parts: bool
) -> Iterator[QuantizedWeight]:
    """The weight, or some of its outputs at a time. Pages of the file are released once they are read."""
    data = tensor.read()
    data = data.reshape(-1, data.shape[-1])
    is_ordered = torch.equal(rows, torch.arange(len(rows)))
    step = len(rows)
    if in_parts:
        step = max(PANEL, _READ_AT_ONCE // tensor.shape[1] // PANEL * PANEL)
    try:
        for start in range(0, len(rows), step):
            part = data[start : start + step] if is_ordered else data[rows[start : start + step]]
            yield read_gguf(str(tensor.saved_type), part)
            if is_ordered:
                mapped.release_pages(part)
    finally:  # a reader with the whole weight stops early
        mapped.release(data)


@contextmanager
def _only_file(source: GGUFSource) -> Iterator[tuple[str, str]]:
    """(folder, name) of the file, alone in a temporary folder: transformers prefers other files in a GGUF file's
    folder."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        (Path(folder) / "model.gguf").symlink_to(source.path.resolve())
        yield folder, "model.gguf"
