"""A model out of a checkpoint in safetensors files whose weights are quantized, or are rounded as they are read.

transformers knows how a checkpoint's tensors are called in its models and which of them it merges; here it is given
the checkpoint as if it were plain. Linear layers, heads, embeddings and experts get their codes once the model is made
(`meta_weights`). Weights that transformers merges in other ways, and all where that is asked for, are widened to the
dtype that the model computes in, one at a time, when transformers asks for them. transformers' own quantizers would
want the package of each tool, and most of them a GPU.

A plain checkpoint of experts comes here too where its weights are rounded: transformers would stack all experts in 16
bits first. Here they are rounded expert by expert; all else is as it would be without this.

Not here: GGUF files (`load_gguf`), models that a quantizer of transformers' has loaded (`load.not_plain`), and the
rounding of linear layers (`quantized`).

Invariants
    W1  a weight is the format's own dequantization, rounded once from float32 where it is widened.
    W2  every tensor of the checkpoint is plain, a part of a quantized weight, or refused by name.

Cost: the codes as the kernels take them, and while it is loaded those of one weight or expert more. Of what is widened
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
from quire.model.expert_layout import (
    CheckpointExpert,
    CheckpointNames,
    ExpertPart,
    merged_experts,
    projection_shape,
)
from quire.model.file_ranges import FileRange, MappedFiles
from quire.model.linear import is_transposed
from quire.model.meta_weights import CheckpointLinear, MetaWeights, SaveTarget, may_hold, quantized_forms
from quire.model.quantized import expert_forms, planned_forms
from quire.model.quantized_experts import ExpertForms
from quire.model.saved_codes import can_save
from quire.model.saved_weights import SavedWeights
from quire.model.sources import SafetensorsSource
from quire.quantized import CodeForm, QuantizedWeight, readers
from quire.quantized.readers import (
    CheckpointModule,
    CheckpointWeight,
    CheckpointWeights,
    checkpoint_weights,
    method_of,
)
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding, WeightFormats

__all__ = ["load_quantized", "plain_config", "planned_codes", "quantization_of", "refuse_other_shapes"]


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a model's config; None where its weights are plain.

    *raises:* LoadError: it is no object of fields.
    """
    said = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if said is None:
        return None
    if not isinstance(said, Mapping) and callable(to_dict := getattr(said, "to_dict", None)):
        said = to_dict()
    if not isinstance(said, Mapping):
        raise LoadError(f"expected quantization_config as an object of fields, got {said!r}; in config.json")
    return dict(said)


def load_quantized(
    kind: Any,
    where: str,
    source: SafetensorsSource | None,
    config: Any,
    dtype: torch.dtype,
    *,
    widened: bool = False,
    rounded: WeightFormats | None = None,
    keep: SavedFolder | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any], tuple[SavedWeights, ...]]:
    """The model in `dtype`, transformers' report of the loading, and what codes are read from (`saved_codes`).

    kind: the class of transformers that makes it, an auto class or a model's. where: the folder or Hub id, for what is
    said of generation there. config: of the model; not changed. widened: no codes are kept. rounded: as what
    the experts are held, beside `widened`; the caller rounds the rest. keep: a folder for codes. backend: what
    computes from codes. options: as `from_pretrained` takes them.

    *raises:* LoadError: its weights are no safetensors files, or not understood; ArgumentError: a pattern of `rounded`
    fits nothing; others as transformers raises them.
    """
    quantization, source = quantization_of(config) or {}, _required(source, where, config)
    config = plain_config(config)
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            trusted = {"trust_remote_code": options.get("trust_remote_code", False)}
            shape = kind.from_config(config, dtype=dtype, **trusted)
        else:
            shape = kind(config)
    tensors = {tensor.name: tensor for tensor in source}
    with ExitStack() as files:
        reading = _Reading(files, source)
        names = CheckpointNames(shape, options.get("key_mapping"))
        found = CheckpointWeights(())
        if quantization:
            found = checkpoint_weights(quantization, tensors, reading.tensor, partial(_module_of, names))
        plain = tensors.keys() - found.names
        places = _places(names, found.weights)
        unread = MetaWeights(backend)
        forms = None if rounded is None else _forms(shape, rounded)
        experts = {}
        if forms is not None or not widened:
            stored = {name: tensors[name].shape for name in plain} if forms else {}
            experts = _experts(names, found, places, stored, reading)
            experts = {place: made for place, made in experts.items() if forms is None or place in forms}
        read_later = {name for stored, _ in experts.values() for name in stored}
        state = {name: reading.slice(name) for name in sorted(plain - read_later)}
        for place, (_, of_place) in experts.items():
            rounding = None if forms is None else forms[place]
            of_model = shape.get_parameter(place).shape
            state[place] = unread.experts_stand_in(place, of_model, dtype, of_place, rounding)
        for weight in found.weights:
            if weight.name in read_later:
                continue
            place = places.get(weight.name)
            if place is None or len(weight.shape) != 2:
                if not widened:
                    unread.widen(
                        weight.name, "the model has it in another form, or as a part of another weight"
                    )
                state[weight.name] = _Widened(weight, reading, dtype)
            elif widened:
                transposed = is_transposed(shape.get_submodule(place.rpartition(".")[0]))
                state[weight.name] = _Widened(weight, reading, dtype, transposed)
            else:
                of_place = shape.get_parameter(place).shape
                linear = CheckpointLinear(
                    partial(reading.in_parts, weight),
                    partial(weight.form, reading.tensor),
                    partial(reading.origins, weight.parts),
                )
                state[weight.name] = unread.stand_in(place, of_place, dtype, linear)
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
        kept = unread.read_into(
            model, SaveTarget(keep, by) if keep is not None and can_save(keep, backend) else None
        )
    model.config.name_or_path = where
    _read_generation_config(model, where, options)
    return model, report, kept


def planned_codes(
    shape: PreTrainedModel, where: str, source: SafetensorsSource | None, config: Any, key_mapping: Any = None
) -> dict[str, CodeForm | ExpertForms]:
    """Which parameters of `shape`, the model on torch's meta device, `load_quantized` would leave as codes, and of what
    form. Headers are read, and some scales.

    *raises:* LoadError: as `load_quantized`.
    """
    source = _required(source, where, config)
    tensors = {tensor.name: tensor for tensor in source}
    with ExitStack() as files:
        reading = _Reading(files, source)
        names = CheckpointNames(shape, key_mapping)
        quantization, module_of = quantization_of(config) or {}, partial(_module_of, names)
        found = checkpoint_weights(quantization, tensors, reading.tensor, module_of)
        places = _places(names, found.weights)
        experts = _experts(names, found, places, {}, reading)
        read_later = {name for stored, _ in experts.values() for name in stored}
        forms = {
            places[weight.name]: weight.form(reading.tensor)
            for weight in found.weights
            if weight.name in places and weight.name not in read_later
        }
        return quantized_forms(shape, forms, {place: of_place for place, (_, of_place) in experts.items()})


def _module_of(names: CheckpointNames, module: str) -> CheckpointModule:
    """Whose weights a checkpoint has under `module`. Experts are linear layers there, one by one."""
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
            f"expected weights that are quantized by {method} in safetensors files, {where} has none"
        )
    return source


class _Reading:
    """The tensors of a source's files by name, opened in `files`, one reader at a time."""

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
        """That of one module. Pages of its tensors are given back."""
        (read,) = weight.read(self.tensor)
        self.release(weight.parts)
        return read

    def in_parts(self, weight: CheckpointWeight) -> Iterator[QuantizedWeight]:
        """The same as `MetaWeights` takes it, in one part."""
        yield self.weight(weight)

    def expert(self, weight: CheckpointWeight, expert: int) -> QuantizedWeight:
        """The same of one of the experts that are stored together."""
        read = weight.read_expert(self.tensor, expert)
        for name in weight.parts.values():
            self._mapped.release(self.tensor(name)[expert])
        return read

    def plain(self, name: str) -> torch.Tensor:
        """A copy of a tensor that is as it is. Its pages are given back."""
        copy = self.tensor(name).clone()
        self.release({"weight": name})
        return copy

    def origins(self, names: Mapping[str, str], expert: int | None = None) -> tuple[FileRange, ...]:
        """Where the tensors stand in their files, or one expert's part of each; none where that is not certain."""
        if self._origins is None:
            tensors = {name: self.tensor(name) for name in self._paths}
            self._origins = dict(zip(tensors, self._mapped.origins(list(tensors.values())), strict=True))
        found: list[FileRange] = []
        for name in names.values():
            if (origin := self._origins[name]) is None:
                return ()
            if expert is not None:
                of_all = self.tensor(name)
                origin = replace(origin, offset=origin.offset + of_all[:expert].nbytes)
            found.append(origin)
        return tuple(found)

    def release(self, names: Mapping[str, str]) -> None:
        """Give back the pages of tensors that are not read again."""
        for name in names.values():
            self._mapped.release(self.tensor(name))


class _Widened:
    """A quantized weight as transformers takes tensors that are not read yet: `[...]` reads it."""

    def __init__(
        self, weight: CheckpointWeight, reading: _Reading, dtype: torch.dtype, transposed: bool = False
    ) -> None:
        self._weight, self._reading, self._dtype, self._transposed = weight, reading, dtype, transposed

    def __getitem__(self, _: Any) -> torch.Tensor:
        with (
            self._reading.lock
        ):  # transformers asks from several threads, and would have several weights in float32
            widened = self._weight.dequantize(self._reading.tensor, self._dtype)
            self._reading.release(self._weight.parts)
        return widened.t().contiguous() if self._transposed else widened


def _forms(shape: PreTrainedModel, rounded: WeightFormats) -> dict[str, Rounding]:
    """Of the experts. *raises:* ArgumentError: a pattern fits nothing."""
    planned_forms(shape, rounded)
    return expert_forms(shape, rounded)


def _experts(
    names: CheckpointNames,
    found: CheckpointWeights,
    places: Mapping[str, str],
    plain: Mapping[str, tuple[int, ...]],
    reading: _Reading,
) -> dict[str, tuple[list[str], list[CheckpointExpert]]]:
    """By the parameters that are experts: the names of what they are made of, and each expert.

    plain: the shapes of tensors that are not quantized and may be read so too.
    """
    parts = {
        name: ExpertPart(
            sizes[0], partial(reading.plain, name), None, partial(reading.origins, {"weight": name})
        )
        for name, sizes in plain.items()
        if len(sizes) == 2
    }
    experts: dict[str, tuple[list[str], list[CheckpointExpert]]] = {}
    for weight in found.weights:
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
    """The parameters that may have weights of a checkpoint as codes, by the weights' names: of modules, and of all
    experts that are stored together; none for those that transformers merges or splits."""
    found: dict[str, str] = {}
    for weight in weights:
        place, pattern = names.place_of(weight.name)
        if pattern is not None or place not in names.parameters:
            continue
        if len(weight.shape) == 2:
            fits = may_hold(names.shape, place, *weight.shape)
        else:
            of_model = projection_shape(names.shape, place)
            fits = of_model is not None and of_model[:3] == weight.shape
        if fits:
            found[weight.name] = place
    return found


def refuse_other_shapes(report: Mapping[str, Any], where: str) -> None:
    """*raises:* LoadError: by transformers' report of the loading, which was told to go on, a tensor has another shape
    than the model's."""
    if others := sorted(report.get("mismatched_keys", ())):
        name, stored, of_model = others[0]
        raise LoadError(
            f"cannot load the model {where!r}: expected {name} of {list(of_model)} by its config.json, got "
            f"{list(stored)}, {len(others)} such tensors in all"
        )


def plain_config(config: Any) -> Any:
    """A copy that says nothing of quantized weights."""
    plain = type(config).from_dict(config.to_dict())
    for name in ("quantization_config", "compression_config"):
        if hasattr(plain, name):
            delattr(plain, name)
    plain._attn_implementation = config._attn_implementation
    return plain


def _passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something of a model without a place."""
    return {name: options[name] for name in ("attn_implementation", "key_mapping") if name in options}


def _read_generation_config(model: PreTrainedModel, where: str, options: Mapping[str, Any]) -> None:
    """As `from_pretrained` does it for a model that has a place."""
    named = {name: options[name] for name in ("revision", "local_files_only") if name in options}
    try:
        model.generation_config = GenerationConfig.from_pretrained(where, **named)
    except OSError:  # there is none; old models have its fields in config.json
        model.generation_config = GenerationConfig.from_pretrained(
            where, config_file_name="config.json", _from_model_config=True, **named
        )
