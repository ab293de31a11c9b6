"""`open_model`: loads a config's model and prepares it to run on Quire's attention: `OpenModel`.

Not here: the storage of its keys and values (`open_storage`), the engine (`open_engine`). Cost: loading, packing or
mapping the weights, and the proof of the modules that Quire computes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.backends import extension, is_host_backend
from quire.config import EngineConfig
from quire.engine.kv_capacity import kv_memory_bytes
from quire.engine.serving_plan import require_room
from quire.errors import ArgumentError, UnsupportedModelError
from quire.saved_folder import SavedFolder
from quire.sizes import format_size, parse_size
from quire.spec import KVSpec
from quire.spec.kv_dtype import layers_left, with_kv_dtype

if TYPE_CHECKING:
    from quire.model.prepare import PreparedModel
    from quire.weights.load import LoadedModel

__all__ = ["OpenModel", "open_model"]

_log = logging.getLogger("quire")


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model on Quire's attention. spec: of its keys and values as they are stored. fingerprint: b"" without tiers.

    weight_bytes: by format. is_quantized: some weights are.
    """

    loaded: LoadedModel
    prepared: PreparedModel
    spec: KVSpec
    max_model_len: int
    fingerprint: bytes
    packed_folder: SavedFolder | None
    weight_bytes: dict[str, int]
    is_quantized: bool

    @property
    def weights(self) -> str:
        """Formats and sizes if some weights are quantized: "weights int4:128 201 MiB, ..."; else ""."""
        if not self.is_quantized:
            return ""
        return "weights " + ", ".join(
            f"{name} {format_size(size)}" for name, size in self.weight_bytes.items()
        )


def open_model(config: EngineConfig, resources: ExitStack) -> OpenModel:
    """Loads and prepares the model; `resources` restores it."""
    if is_host_backend(config.device_name):  # refused now, not after minutes of loading
        kv_memory_bytes(config.kv_memory, most_useful_bytes=2**62)
    folder = _packed_folder(config)

    from quire.devices import device_of
    from quire.memory.heap import give_back_freed
    from quire.model.fingerprint import engine_fingerprint, stored_fingerprint
    from quire.model.placement import free_weights
    from quire.weights.dense_weights import dense_parameters
    from quire.weights.quantized_modules import bytes_by_format, quantized_weights

    device_of(config.device_name)  # an unknown one is refused here
    require_room(config)
    native = extension(config.device_name)
    if config.num_threads is not None and native is not None:
        native.set_num_threads(config.num_threads)
    loaded = _load(config, folder)
    spec = with_kv_dtype(loaded.spec, config.kv_dtype)
    _check_formats(spec, config.device_name)
    fingerprint = engine_fingerprint(loaded, config.device_name) if config.has_tiers else b""
    weight_bytes, is_quantized = bytes_by_format(loaded.model), bool(quantized_weights(loaded.model))
    prepared = _prepare(config, loaded, folder)
    if loaded.file_ranges is not None and not prepared.device.is_host:  # no caller has this model
        resources.callback(free_weights, loaded.model, prepared.device.torch_device)
    resources.callback(prepared.restore)
    if loaded.file_ranges is not None:
        loaded.file_ranges.release_files(dense_parameters(loaded.model))
    give_back_freed()  # the proof's memory, before the budget is made
    _refuse_unfit_storage(config, loaded, prepared, spec)
    spec = _with_key_offsets(config, prepared, spec)
    if fingerprint:
        fingerprint = stored_fingerprint(fingerprint, spec, prepared.key_offsets)
    max_model_len = config.max_model_len or prepared.max_model_len
    return OpenModel(loaded, prepared, spec, max_model_len, fingerprint, folder, weight_bytes, is_quantized)


def _packed_folder(config: EngineConfig) -> SavedFolder | None:
    """The folder of packed weights; by default None unless the extension packs them."""
    if config.packed_weights == "auto":
        from quire.weights.codes import code_extension

        if code_extension(config.device_name) is None:
            return None
    size = config.packed_weights_size
    max_bytes = None if size is None else parse_size(size, where="packed_weights_size")
    return SavedFolder.from_option(config.packed_weights, max_bytes)


@contextmanager
def _with_alternative() -> Iterator[None]:
    """Adds to a refused model's error how it can be run instead."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}; model.generate runs it, on a quire.hf.QuireCache if its forward takes a cache"
        ) from error


def _load(config: EngineConfig, folder: SavedFolder | None) -> LoadedModel:
    from quire.weights.load import load

    with _with_alternative():
        return load(
            config.model,
            dtype=config.dtype,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            weights=config.weight_formats,
            saved_folder=folder,
            backend=config.device_name,
            generation_config=config.generation_config,
        )


def _prepare(config: EngineConfig, loaded: LoadedModel, folder: SavedFolder | None) -> PreparedModel:
    from quire.model.sequential_model import prepare

    with _with_alternative():
        prepared = prepare(
            loaded, backend=config.device_name, max_model_len=config.max_model_len, packed_weights=folder
        )
    if prepared.rotary_note:
        _log.info("%s: %s", loaded.name, prepared.rotary_note)
    return prepared


def _check_formats(spec: KVSpec, name: str | None) -> None:
    """*raises:* ArgumentError: the back end cannot attend to the formats of K and V."""
    from quire.devices import device_of

    device = device_of(name)
    wanted = {name for layer in spec.layers for name in (layer.k_format, layer.v_format) if name}
    for kv_format in sorted(wanted):
        if kv_format not in device.kv_formats:
            raise ArgumentError(
                f"expected a format of K and V that backend {device.name!r} attends to, "
                f"{', '.join(device.kv_formats) or 'the model dtype alone'}, got {kv_format} - in `kv_dtype`; take "
                'auto, or backend="python", slow, which has them all'
            )


def _refuse_unfit_storage(
    config: EngineConfig, loaded: LoadedModel, prepared: PreparedModel, spec: KVSpec
) -> None:
    """*raises:* ArgumentError: this model's content cannot be kept as the config says."""
    if prepared.by_own_forward and spec.kv_dtype != spec.dtype:
        raise ArgumentError(
            f"expected K and V in the model's dtype, {spec.dtype}, for a model that runs by its own forward "
            f"({loaded.model_type}), which reads them as they are stored, got {spec.kv_dtype_by_layers} - in "
            "`kv_dtype`; take auto"
        )
    if not loaded.spec.stores_kv and config.has_tiers:
        raise ArgumentError(
            "expected no tiers (host, disk, peers, remote) for a model of states alone "
            f"({loaded.model_type}), which has no keys and values that they keep, got some; leave them out"
        )


def _with_key_offsets(config: EngineConfig, prepared: PreparedModel, spec: KVSpec) -> KVSpec:
    """`spec` with the key offsets that its codes need; layers whose offsets cannot be applied have no codes."""
    if spec.in_model_dtype is spec:
        return spec
    from quire.model.key_offsets import measure_key_offsets

    name = prepared.loaded.name
    prepared.key_offsets, left_out = measure_key_offsets(prepared, spec)
    if left_out:
        _log.warning(
            "%s: layers %s keep K and V in %s: their keys have channels far from zero, which cannot be taken off "
            "with sinks or a soft cap",
            *(name, ", ".join(map(str, sorted(left_out))), spec.dtype),
        )
    for reason in layers_left(spec.in_model_dtype, config.kv_dtype).values():
        _log.warning("%s: keeps K and V in %s where a layer has %s", name, spec.dtype, reason)
    return with_kv_dtype(spec.in_model_dtype, config.kv_dtype, exclude=left_out)
