"""Loads a model from a safetensors checkpoint whose weights are quantized, or are rounded as they are read.

transformers maps the names of a checkpoint's tensors to its models and merges some of them; it is given the checkpoint
as if it were dense. Linear layers, heads, embeddings and experts get their codes once the model is made
(`meta_weights`). Weights that transformers merges in other ways, and all weights on request, are dequantized to the
model's dtype, one at a time, when transformers reads them. transformers' own quantizers would need the package of each
tool, and most of them a GPU.

A dense checkpoint of experts is loaded here too if its weights are rounded: transformers would stack all experts in 16
bits first. Here they are rounded expert by expert; all else is loaded as usual.

Not here: GGUF files (`load_gguf`), models that a quantizer of transformers has loaded (`load.why_not_dense`), and the
rounding of linear layers (`quantized`).

Invariants
    W1  a weight is the format's own dequantization, rounded once from float32 if it is dequantized.
    W2  every tensor of the checkpoint is dense, a part of a quantized weight, or refused by name.

Cost: the codes in the kernels' layout, and during the load those of one weight or expert more. For dequantized weights,
the weights in `dtype`, and the float32 form of one weight, or of one expert.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel

from quire.errors import LoadError
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding, WeightFormats
from quire.weights.codes import CodeForm, QuantizedWeight, readers
from quire.weights.codes.readers import (
    CheckpointModule,
    CheckpointWeight,
    CheckpointWeights,
    checkpoint_weights,
    method_of,
)
from quire.weights.expert_layout import (
    CheckpointExpert,
    CheckpointNames,
    ExpertPart,
    merged_experts,
    projection_shape,
)
from quire.weights.file_ranges import FileRange, MappedFiles
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
from quire.weights.sources import SafetensorsSource

__all__ = ["dense_config", "load_quantized", "planned_codes", "quantization_of", "refuse_other_shapes"]


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a model's config; None if its weights are dense.

    *raises:* LoadError: it is not an object of fields.
    """
    settings = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping) and callable(to_dict := getattr(settings, "to_dict", None)):
        settings = to_dict()
    if not isinstance(settings, Mapping):
        raise LoadError(
            f"expected quantization_config as an object of fields, got {settings!r}; in config.json"
        )
    return dict(settings)


def load_quantized(
    kind: Any,
    where: str,
    source: SafetensorsSource | None,
    config: Any,
    dtype: torch.dtype,
    *,
    is_dense: bool = False,
    rounded: WeightFormats | None = None,
    saved_folder: SavedFolder | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any], tuple[SavedWeights, ...]]:
    """The model in `dtype`, transformers' report of the loading, and the files of its saved codes (`saved_codes`).

    kind: the class of transformers that makes it, an auto class or a model's. where: the folder or Hub id, for its
    generation config. config: of the model; not changed. is_dense: all weights are dequantized. rounded: the formats to
    round experts to, with `is_dense`; the caller rounds the other weights. saved_folder: a folder for codes. backend:
    the back end that computes from codes. options: as `from_pretrained` takes them.

    *raises:* LoadError: its weights are not safetensors files, or not understood; ArgumentError: a pattern of `rounded`
    matches no weight; the errors of transformers.
    """
    quantization, source = quantization_of(config) or {}, _required(source, where, config)
    config = dense_config(config)
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            trusted = {"trust_remote_code": options.get("trust_remote_code", False)}
            shape = kind.from_config(config, dtype=dtype, **trusted)
        else:
            shape = kind(config)
    tensors = {tensor.name: tensor for tensor in source}
    with ExitStack() as files:
        reading = _CheckpointReader(files, source)
        names = CheckpointNames(shape, options.get("key_mapping"))
        quantized = CheckpointWeights(())
        if quantization:
            quantized = checkpoint_weights(quantization, tensors, reading.tensor, partial(_module_of, names))
        dense_names = tensors.keys() - quantized.names
        places = _places(names, quantized.weights)
        meta_weights = MetaWeights(backend)
        forms = None if rounded is None else _forms(shape, rounded)
        experts = {}
        if forms is not None or not is_dense:
            dense_shapes = {name: tensors[name].shape for name in dense_names} if forms else {}
            experts = _experts(names, quantized, places, dense_shapes, reading)
            experts = {place: entry for place, entry in experts.items() if forms is None or place in forms}
        read_later = {name for tensor_names, _ in experts.values() for name in tensor_names}
        state = {name: reading.slice(name) for name in sorted(dense_names - read_later)}
        for place, (_, of_place) in experts.items():
            rounding = None if forms is None else forms[place]
            model_shape = shape.get_parameter(place).shape
            state[place] = meta_weights.experts_stand_in(place, model_shape, dtype, of_place, rounding)
        for weight in quantized.weights:
            if weight.name in read_later:
                continue
            place = places.get(weight.name)
            if place is None or len(weight.shape) != 2:
                if not is_dense:
                    meta_weights.note_dense(
                        weight.name, "in the model it has another form, or is a part of another weight"
                    )
                state[weight.name] = _DequantizedTensor(weight, reading, dtype)
            elif is_dense:
                transposed = is_transposed(shape.get_submodule(place.rpartition(".")[0]))
                state[weight.name] = _DequantizedTensor(weight, reading, dtype, transposed)
            else:
                model_shape = shape.get_parameter(place).shape
                linear = CheckpointLinear(
                    partial(reading.in_parts, weight),
                    partial(weight.form, reading.tensor),
                    partial(reading.origins, weight.parts),
                )
                state[weight.name] = meta_weights.stand_in(place, model_shape, dtype, linear)
        loaded: Any = type(shape)
        model, report = loaded.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_passed_on(options),
        )
        refuse_other_shapes(report, where)
        by = f"readers {readers.VERSION}, {json.dumps(quantization, sort_keys=True, default=str)}"
        saved_weights = meta_weights.read_into(model, SaveTarget.if_possible(saved_folder, by, backend))
    model.config.name_or_path = where
    _read_generation_config(model, where, options)
    return model, report, saved_weights


def planned_codes(
    shape: PreTrainedModel, where: str, source: SafetensorsSource | None, config: Any, key_mapping: Any = None
) -> dict[str, CodeForm | ExpertForms]:
    """The parameters of `shape`, the model on torch's meta device, that `load_quantized` would leave quantized, with
    their forms. Reads headers, and some scales.

    *raises:* LoadError: as `load_quantized`.
    """
    source = _required(source, where, config)
    tensors = {tensor.name: tensor for tensor in source}
    with ExitStack() as files:
        reading = _CheckpointReader(files, source)
        names = CheckpointNames(shape, key_mapping)
        quantization, module_of = quantization_of(config) or {}, partial(_module_of, names)
        quantized = checkpoint_weights(quantization, tensors, reading.tensor, module_of)
        places = _places(names, quantized.weights)
        experts = _experts(names, quantized, places, {}, reading)
        read_later = {name for tensor_names, _ in experts.values() for name in tensor_names}
        forms = {
            places[weight.name]: weight.form(reading.tensor)
            for weight in quantized.weights
            if weight.name in places and weight.name not in read_later
        }
        return quantized_forms(shape, forms, {place: of_place for place, (_, of_place) in experts.items()})


def _module_of(names: CheckpointNames, module: str) -> CheckpointModule:
    """The model's module for the checkpoint's `module`. Experts are separate linear layers in a checkpoint."""
    place, pattern = names.place_of(module + ".weight")
    if pattern is not None or place not in names.parameters:
        return CheckpointModule(module)
    name = place.rpartition(".")[0]
    kinds = type(names.shape.get_submodule(name)).__mro__
    return CheckpointModule(name, tuple(kind.__name__ for kind in kinds if issubclass(kind, torch.nn.Module)))


def _required(source: SafetensorsSource | None, where: str, config: Any) -> SafetensorsSource:
    if source is None:
        method = method_of(quantization_of(config) or {})
        raise LoadError(
            f"expected weights that are quantized by {method} in safetensors files, got none in {where}"
        )
    return source


class _CheckpointReader:
    """Reads the tensors of a source's files by name, opened in `files`; `lock` admits one reader at a time."""

    def __init__(self, files: ExitStack, source: SafetensorsSource) -> None:
        self._opened: dict[Path, Any] = {
            path: files.enter_context(safe_open(path, framework="pt")) for path in source.files
        }
        self._paths = {tensor.name: tensor.path for tensor in source if tensor.path}
        self._mapped = MappedFiles()
        self._origins: dict[str, FileRange | None] | None = None
        self.lock = threading.Lock()

    def slice(self, name: str) -> Any:
        return self._opened[self._paths[name]].get_slice(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._opened[self._paths[name]].get_tensor(name)

    def weight(self, weight: CheckpointWeight) -> QuantizedWeight:
        """The quantized weight of one module. Releases the pages of its tensors."""
        (read,) = weight.read(self.tensor)
        self.release(weight.parts)
        return read

    def in_parts(self, weight: CheckpointWeight) -> Iterator[QuantizedWeight]:
        """`weight` as `MetaWeights` takes it, in one part."""
        yield self.weight(weight)

    def expert(self, weight: CheckpointWeight, expert: int) -> QuantizedWeight:
        """The quantized weight of one of the experts that share a checkpoint tensor."""
        read = weight.read_expert(self.tensor, expert)
        for name in weight.parts.values():
            self._mapped.release(self.tensor(name)[expert])
        return read

    def dense(self, name: str) -> torch.Tensor:
        """A copy of a dense tensor. Releases its pages."""
        copy = self.tensor(name).clone()
        self.release({"weight": name})
        return copy

    def origins(self, names: Mapping[str, str], expert: int | None = None) -> tuple[FileRange, ...]:
        """The file ranges of the tensors, or of one expert's part of each; empty if one is not certain."""
        if self._origins is None:
            tensors = {name: self.tensor(name) for name in self._paths}
            self._origins = dict(zip(tensors, self._mapped.origins(list(tensors.values())), strict=True))
        ranges: list[FileRange] = []
        for name in names.values():
            if (origin := self._origins[name]) is None:
                return ()
            if expert is not None:
                experts = self.tensor(name)
                origin = replace(origin, offset=origin.offset + experts[:expert].nbytes)
            ranges.append(origin)
        return tuple(ranges)

    def release(self, names: Mapping[str, str]) -> None:
        """Release the pages of tensors that are not read again."""
        for name in names.values():
            self._mapped.release(self.tensor(name))


class _DequantizedTensor:
    """A quantized weight in place of a lazy tensor of transformers: `[...]` reads and dequantizes it."""

    def __init__(
        self,
        weight: CheckpointWeight,
        reading: _CheckpointReader,
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> None:
        self._weight, self._reading, self._dtype, self._transposed = weight, reading, dtype, transposed

    def __getitem__(self, _: Any) -> torch.Tensor:
        # transformers reads from several threads; the lock bounds the weights in float32 to one.
        with self._reading.lock:
            dense = self._weight.dequantize(self._reading.tensor, self._dtype)
            self._reading.release(self._weight.parts)
        return dense.t().contiguous() if self._transposed else dense


def _forms(shape: PreTrainedModel, rounded: WeightFormats) -> dict[str, Rounding]:
    """The formats of the experts. *raises:* ArgumentError: a pattern matches no weight."""
    planned_forms(shape, rounded)
    return expert_forms(shape, rounded)


def _experts(
    names: CheckpointNames,
    quantized: CheckpointWeights,
    places: Mapping[str, str],
    dense_shapes: Mapping[str, tuple[int, ...]],
    reading: _CheckpointReader,
) -> dict[str, tuple[list[str], list[CheckpointExpert]]]:
    """For each expert parameter: the names of the tensors that it is made from, and each expert.

    dense_shapes: the shapes of dense tensors that may be read as experts too.
    """
    parts = {
        name: ExpertPart(
            sizes[0], partial(reading.dense, name), None, partial(reading.origins, {"weight": name})
        )
        for name, sizes in dense_shapes.items()
        if len(sizes) == 2
    }
    experts: dict[str, tuple[list[str], list[CheckpointExpert]]] = {}
    for weight in quantized.weights:
        form = partial(weight.form, reading.tensor)
        if len(weight.shape) == 2:
            origins = partial(reading.origins, weight.parts)
            parts[weight.name] = ExpertPart(weight.shape[0], partial(reading.weight, weight), form, origins)
            continue
        if (place := places.get(weight.name)) is not None:
            num_experts, num_outputs, _ = weight.shape
            together = [
                CheckpointExpert(
                    (
                        ExpertPart(
                            num_outputs,
                            partial(reading.expert, weight, expert),
                            form,
                            partial(reading.origins, weight.parts, expert),
                        ),
                    ),
                    None,
                )
                for expert in range(num_experts)
            ]
            experts[place] = [weight.name], together
    return experts | merged_experts(names, parts)


def _places(names: CheckpointNames, weights: Iterable[CheckpointWeight]) -> dict[str, str]:
    """The parameters that may stay quantized, by the names of their weights in the checkpoint: of modules, and of
    experts that share a checkpoint tensor; without those that transformers merges or splits."""
    places: dict[str, str] = {}
    for weight in weights:
        place, pattern = names.place_of(weight.name)
        if pattern is not None or place not in names.parameters:
            continue
        if len(weight.shape) == 2:
            fits = can_be_quantized(names.shape, place, *weight.shape)
        else:
            projection = projection_shape(names.shape, place)
            fits = projection is not None and projection[:3] == weight.shape
        if fits:
            places[weight.name] = place
    return places


def refuse_other_shapes(report: Mapping[str, Any], where: str) -> None:
    """*raises:* LoadError: transformers' report of the loading, which ignores mismatched shapes, has one."""
    if others := sorted(report.get("mismatched_keys", ())):
        name, saved_shape, model_shape = others[0]
        raise LoadError(
            f"cannot load the model {where!r}: expected {name} of {list(model_shape)} by its config.json, got "
            f"{list(saved_shape)}, {len(others)} such tensors in all"
        )


def dense_config(config: Any) -> Any:
    """A copy of the config without the settings of quantization."""
    copy = type(config).from_dict(config.to_dict())
    for name in ("quantization_config", "compression_config"):
        if hasattr(copy, name):
            delattr(copy, name)
    copy._attn_implementation = config._attn_implementation
    return copy


def _passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that apply to a model without a folder."""
    return {name: options[name] for name in ("attn_implementation", "key_mapping") if name in options}


def _read_generation_config(model: PreTrainedModel, where: str, options: Mapping[str, Any]) -> None:
    """As `from_pretrained` does it for a model with a folder or Hub id."""
    location = {name: options[name] for name in ("revision", "local_files_only") if name in options}
    try:
        model.generation_config = GenerationConfig.from_pretrained(where, **location)
    except OSError:  # there is none; old models have its fields in config.json
        model.generation_config = GenerationConfig.from_pretrained(
            where, config_file_name="config.json", _from_model_config=True, **location
        )
