"""A model and its tokenizer out of one GGUF file, its weights as the file's codes, or widened.

`quire.model.gguf` says what the header's keys and the tensors of each architecture mean; transformers says how the
parameters of its models are called in a file. Its own way (`gguf_file=`) reads the whole vocabulary three times and
holds the largest tensor in float32 three times: 50 s and 3.1 GB for Gemma 3 270M.

Invariants:
    L1  A key of the header or a tensor that nothing here reads refuses the file by its name.

Codes are kept of linear layers, heads, embeddings and experts whose type has a reader (`quire.quantized.readers`), each
in its own, if all that the writer did to them was to order their rows: that is undone on the rows of codes.

Cost: the codes as the kernels take them, and while it is loaded a byte for each of some million values, or for each of
one expert's. Of what is widened the weights in `dtype`, and while it is loaded once more its largest tensor in float32.
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
from quire.model.file_ranges import FileRange, MappedFiles
from quire.model.gguf import ARCHITECTURES, GGUFHeader
from quire.model.gguf.names import tensor_names
from quire.model.gguf_experts import gguf_experts
from quire.model.linear import is_transposed
from quire.model.meta_weights import CheckpointLinear, MetaWeights, SaveTarget, may_hold, quantized_forms
from quire.model.quantized import expert_forms, planned_forms
from quire.model.quantized_experts import ExpertForms
from quire.model.saved_codes import can_save
from quire.model.saved_weights import SavedWeights
from quire.model.sources import CheckpointTensor, GGUFSource, dequantizer_versions, to_float32
from quire.quantized import PANEL, CodeForm, QuantizedWeight, readers
from quire.quantized.readers import GGUF_TYPES, gguf_form, read_gguf
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding, WeightFormats

__all__ = [
    "DenseWeights",
    "end_ids",
    "gguf_config",
    "load_gguf_model",
    "load_gguf_tokenizer",
    "planned_gguf_codes",
]

_log = logging.getLogger("quire")
_READ_AT_ONCE = 1 << 22  # values of a weight whose codes are unpacked
_COLUMNS = (
    8  # of the weight that tells what a processor does: more than one, so that a change of columns shows
)


class DenseWeights:
    """Which tensor of a GGUF file each weight of a model was widened from, for `saved_weights`.

    The counterpart of `MappedFiles` for weights that are no bytes of a file but follow from some.
    """

    def __init__(self, source: GGUFSource) -> None:
        status = source.path.stat()
        self._path = str(source.path.resolve())
        self._stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        self._offsets: dict[tuple[int, torch.Size], int] = {}

    def origin(self, offset: int) -> FileRange:
        """Of codes that stand there in the file."""
        return FileRange(self._path, self._stamp, offset, dequantizer_versions())

    def add(self, weight: torch.Tensor, offset: int) -> None:
        """`weight` has been widened from the tensor at `offset`."""
        self._offsets[weight.data_ptr(), weight.shape] = offset

    def release(self, weight: torch.Tensor) -> None:
        """Nothing: its memory is the model's own and goes with it."""

    def release_read(self, kept: Iterable[torch.Tensor]) -> None:
        """Nothing, as `release`."""

    def origins(self, weights: Sequence[torch.Tensor]) -> list[FileRange | None]:
        """As of `MappedFiles`; None where it is in no tensor of the file alone."""
        offsets = [self._offsets.get((weight.data_ptr(), weight.shape)) for weight in weights]
        by = dequantizer_versions()
        return [
            None if offset is None else FileRange(self._path, self._stamp, offset, by) for offset in offsets
        ]


def gguf_config(source: GGUFSource) -> Any:
    """The config of the file's model.

    *raises:* LoadError: the architecture is not known, or a key of the header is not read.
    """
    return _config(source)[0]


def load_gguf_model(
    source: GGUFSource,
    dtype: torch.dtype,
    *,
    widened: bool = False,
    rounded: WeightFormats | None = None,
    keep: SavedFolder | None = None,
    backend: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any], DenseWeights, tuple[SavedWeights, ...]]:
    """The model in `dtype`, transformers' report of the loading, where its weights come from, and what codes are read
    from (`saved_codes`).

    widened: no codes are kept. rounded: as what the experts are held, beside `widened`; the caller rounds the rest.
    keep: a folder for codes. backend: what computes from codes.

    *raises:* LoadError: as `gguf_config`; ArgumentError: a pattern of `rounded` fits nothing; others as transformers
    raises them.
    """
    weights = DenseWeights(source)
    config, fields, header = _config(source)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, dtype=dtype)
    forms = None if widened else {}
    if rounded is not None:
        planned_forms(shape, rounded)  # a pattern that fits nothing is refused
        forms = expert_forms(shape, rounded) or None
    unread = MetaWeights(backend)
    tensors = _tensors(header, shape, fields, dtype, weights, unread, widened, forms)
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
            f"that transformers {transformers_version} makes of it: the first, {name}, is {list(stored)} instead "
            f"of {list(expected)}"
        )
    # Of a file that was just written each page comes with up to 2 MiB around it: norms bring a part of the codes.
    MappedFiles(str(source.path.resolve())).release_read(tensor.read() for tensor in source)
    by = f"readers {readers.VERSION}"
    kept = unread.read_into(
        model, SaveTarget(keep, by) if keep is not None and can_save(keep, backend) else None
    )
    model.config.name_or_path = str(source.path)
    return model, report, weights, kept


def planned_gguf_codes(source: GGUFSource, shape: PreTrainedModel) -> dict[str, CodeForm | ExpertForms]:
    """Which parameters of `shape`, the model on torch's meta device, `load_gguf_model` would leave as codes, and of
    what form. The header is read."""
    _, fields, header = _config(source)
    processor, names = _processing(header, shape, fields)
    process, mapped = partial(_process, processor, names, fields), MappedFiles(str(source.path.resolve()))
    of_codes = [tensor for tensor in header.weights if tensor.saved_type in GGUF_TYPES]
    found = gguf_experts(of_codes, shape, process, names, mapped)
    forms = {}
    for tensor in header.weights:
        place = names.get(tensor.name)
        if place is not None and _rows(tensor, place, shape, processor, names) is not None:
            forms[place] = gguf_form(str(tensor.saved_type), tensor.shape[1])
    return quantized_forms(shape, forms, {place: experts for place, (_, experts) in found.items()})


def load_gguf_tokenizer(source: GGUFSource, config: Any) -> Any:
    """The tokenizer and its chat template; None where the file has no vocabulary."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    if not source.num_words:
        return None
    # The class is chosen here: `AutoTokenizer` would make a config of the file in its own way.
    named = TOKENIZER_MAPPING_NAMES.get(config.model_type)
    kind: Any = tokenizer_class_from_name(named) if named else None
    if kind is None or not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast
    with _alone(source) as (folder, name):
        tokenizer: Any = kind.from_pretrained(folder, gguf_file=name)
    tokenizer.name_or_path = str(source.path)
    return tokenizer


def end_ids(source: GGUFSource) -> tuple[int, ...]:
    """Ids that end an answer beside the end of a text: of a turn, of a message."""
    found = [source.field(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    return tuple(int(token) for token in found if token is not None)


def _config(source: GGUFSource) -> tuple[Any, dict[str, Any], GGUFHeader]:
    """The config, the fields that it was made of, and the header that they were taken from."""
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
    weights: DenseWeights,
    unread: MetaWeights,
    widened: bool,
    forms: dict[str, Rounding] | None,
) -> dict[str, torch.Tensor]:
    """The state dict of the model `shape`, with stand-ins for what `unread` takes.

    widened: of linear layers, heads and embeddings no codes are kept. forms: as what experts are rounded; none: they
    are as the file has them; None: no codes are kept of them.
    """
    source = header.source
    processor, names = _processing(header, shape, fields)
    tensors: dict[str, torch.Tensor] = {}
    unknown = []
    mapped = MappedFiles(str(source.path.resolve()))
    process = partial(_process, processor, names, fields)
    read_later: set[str] = set()
    if forms is not None:
        of_codes = [tensor for tensor in header.weights if forms or tensor.saved_type in GGUF_TYPES]
        found = gguf_experts(of_codes, shape, process, names, mapped, weights.origin)
        for place, (of_place, experts) in found.items():
            if not forms or place in forms:
                of_model = shape.get_parameter(place).shape
                tensors[place] = unread.experts_stand_in(place, of_model, dtype, experts, forms.get(place))
                read_later |= of_place
    for tensor in header.weights:
        if tensor.name in read_later:
            continue
        place = names.get(tensor.name)
        rows = None if widened or place is None else _rows(tensor, place, shape, processor, names)
        if place is not None and rows is not None:
            form = partial(gguf_form, str(tensor.saved_type), tensor.shape[1])
            origins = partial(_origins, weights, tensor)
            linear = CheckpointLinear(
                partial(_read, tensor, rows, mapped, unread.takes_parts), form, origins, rows
            )
            tensors[place] = unread.stand_in(place, shape.get_parameter(place).shape, dtype, linear)
            continue
        if tensor.is_quantized and not widened:
            unread.widen(
                tensor.name, f"{tensor.saved_type} is not read as codes, or not for what the model has there"
            )
        try:
            result = process(tensor, to_float32(tensor).numpy(), tensors)
        except (ValueError, IndexError, RuntimeError) as error:
            raise LoadError(
                f"expected tensors that fit the header, {tensor.name} of {source.path} is {list(tensor.shape)}: {error}"
            ) from error
        observer().has_read(tensor.read().nbytes)
        if result.name in names:
            # What was not widened may lie in the file's mapping still.
            weight = torch.from_numpy(np.ascontiguousarray(result.weights))
            weight = weight.to(dtype, copy=not tensor.is_quantized)
            tensors[names[result.name]] = weight
            weights.add(weight, tensor.offset or 0)
        elif result.name is not None:
            unknown.append(tensor.name)
    _refuse_unread(header, unknown)
    return tensors


def _refuse_unread(header: GGUFHeader, names: Sequence[str]) -> None:
    """Refuse the file if there are any tensors that the model has no place for."""
    if names:
        raise LoadError(
            f"expected tensors of the architecture {header.architecture} that are read here, got {names[0]}"
            f"{f' and {len(names) - 1} more' if len(names) > 1 else ''} - in {header.source.path}; answers would "
            "differ from the model's. Take the model as safetensors."
        )


def _processing(
    header: GGUFHeader, shape: PreTrainedModel, fields: dict[str, Any]
) -> tuple[Any, dict[str, str]]:
    """The processor of the file's tensors, and which parameter of the model each tensor becomes."""
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
    """What transformers makes of a tensor's values. A processor of experts puts it into `parsed` itself."""
    return processor.process(
        weights=values,
        name=tensor.name,
        tensor_key_mapping=names,
        parsed_parameters={"tensors": parsed, "config": fields},
    )


def _rows(
    tensor: CheckpointTensor, place: str, shape: PreTrainedModel, processor: Any, names: dict[str, str]
) -> torch.Tensor | None:
    """In which order the model wants the tensor's rows, if its codes can be the weight at `place`; else None.

    transformers says what the file's writer did to a tensor only by undoing it to values: here to numbers of rows.
    """
    if (
        tensor.saved_type not in GGUF_TYPES
        or len(tensor.shape) != 2
        or not may_hold(shape, place, *tensor.shape)
    ):
        return None
    asked = np.arange(tensor.shape[0] * _COLUMNS, dtype=np.float64).reshape(-1, _COLUMNS)
    try:
        found = processor.process(
            weights=asked.copy(),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": {}, "config": {}},
        )
    except (ValueError, IndexError):  # it counts on the weight's own columns
        return None
    values = found.weights
    if found.name != tensor.name or values is None:
        return None
    if is_transposed(shape.get_submodule(place.rpartition(".")[0])):
        values = values.T
    if values.shape != asked.shape:
        return None
    rows = values[:, 0] // _COLUMNS
    if not np.array_equal(values, asked[rows.astype(np.int64)]) or len(np.unique(rows)) != len(rows):
        return None
    return torch.from_numpy(rows.astype(np.int64))


def _origins(weights: DenseWeights, tensor: CheckpointTensor) -> tuple[FileRange, ...]:
    return (weights.origin(tensor.offset),)


def _read(
    tensor: CheckpointTensor, rows: torch.Tensor, mapped: MappedFiles, in_parts: bool
) -> Iterator[QuantizedWeight]:
    """The weight, or some of its outputs at a time. Pages of the file are given back once they are read."""
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
    finally:  # who has the whole weight asks for no more
        mapped.release(data)


@contextmanager
def _alone(source: GGUFSource) -> Iterator[tuple[str, str]]:
    """(folder, name) of the file, in a folder with nothing else: transformers prefers what lies beside a file."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        (Path(folder) / "model.gguf").symlink_to(source.path.resolve())
        yield folder, "model.gguf"
