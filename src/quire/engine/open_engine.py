"""`open_engine`: opens a model, its storage and tiers, and starts an engine over them: `OpenEngine`, which is whole.

    model     the weights with Quire's attention and products, their tokenizer, the shape of their KV
    storage   the memory of keys and values, and the cache that assigns it
    tiers     storage for content that memory gives up
    engine    the step loop over all of them, and the driver: its thread

`LLM` and `AsyncEngine` have the public calls. Invariant: if opening fails, all parts opened before are closed and the
model is restored; the end of the driver's thread does the same.

Cost: loading and preparing the model, and address space for the cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.backends import extension, is_host_backend
from quire.cache.event_dispatcher import EventDispatcher
from quire.cache.prefix_key import PrefixKey
from quire.cache.protocol import KVCache, shares_prefixes
from quire.config import EngineConfig
from quire.engine.driver import Driver
from quire.engine.driver_proxy import in_driver
from quire.engine.engine import Engine
from quire.engine.engine_monitor import EngineMonitor
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.engine.idle_trim import IdleTrim
from quire.engine.kv_budget import KVBudget
from quire.engine.kv_capacity import kv_memory_bytes
from quire.engine.monitor import CacheMonitor
from quire.engine.open_storage import OpenStorage, open_storage
from quire.engine.profile import Profile
from quire.engine.prompt_pins import PromptPins
from quire.engine.serving_plan import refuse_if_none_fits, require_room
from quire.errors import ArgumentError, UnsupportedModelError
from quire.memory.device_memory import HOST
from quire.offload.offloaded_sequence import InEngine
from quire.offload.open_tiers import OpenTiers, open_swap, open_tiers
from quire.offload.throughputs import Throughputs
from quire.saved_folder import SavedFolder
from quire.scheduler.request_validator import ServedModel
from quire.scheduler.tenants import Tenants
from quire.sessions.snapshots import Snapshot, SnapshotLimits, Snapshots
from quire.sessions.transcript import Transcript, TranscriptReader
from quire.sizes import format_size, parse_size
from quire.spec import KVSpec
from quire.spec.kv_dtype import layers_left, with_kv_dtype

if TYPE_CHECKING:
    from quire.engine.model_changes import ModelChanges
    from quire.engine.runner import Runner
    from quire.memory.storage import Storage
    from quire.model.prepare import PreparedModel
    from quire.weights.huge_pages import HugePageMove
    from quire.weights.load import LoadedModel

__all__ = ["OpenEngine", "open_engine"]

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


@dataclass(frozen=True, eq=False)
class OpenEngine:
    """See the module's text. tenants, pins, monitor: for any thread; the other parts for the driver's thread alone.

    profile: None without `profile=True`. huge_page_move: None if no saved weights are moved.
    """

    config: EngineConfig
    model: OpenModel
    storage_name: str
    storage: Storage
    cache: KVCache
    runner: Runner
    profile: Profile | None
    engine: Engine
    budget: KVBudget
    idle_trim: IdleTrim
    changes: ModelChanges
    huge_page_move: HugePageMove | None
    driver: Driver
    tenants: Tenants
    pins: PromptPins
    monitor: EngineMonitor
    _tiers: OpenTiers | None
    _is_closed: threading.Event

    @property
    def prepared(self) -> PreparedModel:
        return self.model.prepared

    @property
    def tiers(self) -> OpenTiers | None:
        """None without tiers, or once closed."""
        return None if self._is_closed.is_set() else self._tiers

    @property
    def bytes_committed(self) -> int:
        """Memory that the cache has taken from the system; 0 once closed."""
        return 0 if self._is_closed.is_set() else _bytes_committed(self.storage)

    def require_ready(self) -> None:
        """*raises:* ArgumentError, OtherProcessError: the calling thread cannot have a request computed now."""
        self.driver.require_open()
        self.changes.refuse_autocast()

    def prefault(self) -> bool:
        """See `LLM.prefault`. *raises:* ArgumentError: another storage than "paged"."""
        done = self.budget.prefault()
        if self.huge_page_move is not None:
            self.huge_page_move.join()
        return done

    # -- conversations; for any thread -----------------------------------------------------------------

    @property
    def reader(self) -> TranscriptReader:
        """Turns text into this model's tokens."""
        return TranscriptReader(self.model.loaded.tokenizer, self.engine.check_tokens)

    def snapshots(self) -> Snapshots:
        """The snapshots of the disk cache. *raises:* ArgumentError: there is no disk cache."""
        return Snapshots(self.tiers, model=self.model.loaded.name)

    def load_snapshot(self, name: str, key: PrefixKey, *, recompute: bool = False) -> Transcript:
        """See `LLM.resume`."""
        empty = Transcript.with_prompt(self.reader, key)
        namespace = self.engine.tenants.namespace_of(key)
        return self.snapshots().resume(name, namespace, empty, recompute=recompute)

    def save_snapshot(
        self,
        name: str,
        transcript: Transcript,
        in_engine: InEngine,
        *,
        overwrite: bool,
        limits: SnapshotLimits | None = None,
    ) -> Snapshot:
        """See `Conversation.snapshot`. limits: of all snapshots of its tenant."""
        tenants, key = self.engine.tenants, transcript.key
        return self.snapshots().save(
            name,
            transcript,
            tenants.namespace_of(key),
            overwrite=overwrite,
            in_engine=in_engine,
            owner=tenants.owner_tag(key.tenant),
            limits=limits,
        )


def open_engine(config: EngineConfig) -> OpenEngine:
    """Opens an engine and starts its driver, which closes all parts at its end.

    *raises:* ArgumentError, LoadError, UnsupportedModelError, CapacityError: no part stays open.
    """
    with ExitStack() as resources:
        model = _open_model(config, resources)
        opened = open_storage(config, model.spec, model.max_model_len)
        resources.callback(opened.storage.close)
        return _start(config, model, opened, resources)


def _start(config: EngineConfig, model: OpenModel, opened: OpenStorage, resources: ExitStack) -> OpenEngine:
    """The engine of an open model and storage. Takes the resources once nothing can fail any more."""
    from quire.engine.model_changes import ModelChanges
    from quire.engine.runner import Runner

    prepared, cache, storage = model.prepared, opened.cache, opened.storage
    profile = Profile(config.backend) if config.profile else None
    runner = Runner(prepared, storage, num_threads=config.num_threads, profile=profile)
    engine, tiers = _open_step_loop(config, model, opened, runner, profile, resources)
    budget = KVBudget(opened, engine, config, max_model_len=model.max_model_len)
    refuse_if_none_fits(budget.fit, config, model.max_model_len)
    changes = ModelChanges(prepared, engine, opened, tiers, config.backend)
    engine.on_work = changes.follow
    move = None
    if model.packed_folder is not None:
        move = prepared.move_to_huge_pages(HOST.free_bytes() - budget.num_bytes)
    idle_trim = IdleTrim(budget, tiers)
    is_closed = threading.Event()
    resources.callback(is_closed.set)  # called first
    monitor = EngineMonitor(
        engine,
        cache,
        model.loaded.tokenizer,
        lambda: None if is_closed.is_set() else tiers,
        lambda: _memory_stats(budget, storage, model),
    )
    closing = ExitStack()
    driver = Driver(
        engine,
        closing.close,
        num_threads=_num_threads(config),
        on_idle=idle_trim if budget.idle_trim_s else None,
        idle_s=budget.idle_trim_s,
    )
    closing.callback(monitor.stop_publishing)  # called last
    closing.push(resources.pop_all())
    pins = PromptPins(
        engine, cache, model.loaded.tokenizer, lambda prompt, options: driver.run([(prompt, options)])[0]
    )
    return OpenEngine(
        config, model, opened.name, storage, cache, runner, profile, engine, budget, idle_trim, changes, move,
        driver, in_driver(engine.tenants, driver), in_driver(pins, driver), in_driver(monitor, driver),
        tiers, is_closed,
    )  # fmt: skip


# -- the model -----------------------------------------------------------------------------------------


def _open_model(config: EngineConfig, resources: ExitStack) -> OpenModel:
    """Loads and prepares the model; `resources` restores it."""
    if is_host_backend(config.backend):  # refused now, not after minutes of loading
        kv_memory_bytes(config.kv_memory, most_useful_bytes=2**62)
    folder = _packed_folder(config)

    from quire.devices import device_of
    from quire.memory.heap import give_back_freed
    from quire.model.fingerprint import engine_fingerprint, stored_fingerprint
    from quire.weights.dense_weights import dense_parameters
    from quire.weights.quantized_modules import bytes_by_format, quantized_weights

    device_of(config.backend)  # an unknown one is refused here
    require_room(config)
    native = extension(config.backend)
    if config.num_threads is not None and native is not None:
        native.set_num_threads(config.num_threads)
    loaded = _load(config, folder)
    spec = with_kv_dtype(loaded.spec, config.kv_dtype)
    _check_formats(spec, config.backend)
    fingerprint = engine_fingerprint(loaded, config.backend) if config.has_tiers else b""
    weight_bytes, is_quantized = bytes_by_format(loaded.model), bool(quantized_weights(loaded.model))
    prepared = _prepare(config, loaded, folder)
    resources.callback(prepared.restore)
    if loaded.file_ranges is not None:
        loaded.file_ranges.release_files(dense_parameters(loaded.model))
    give_back_freed()  # the proof's memory, before the budget is made
    _check_kept(config, loaded, prepared, spec)
    spec = _with_key_offsets(config, prepared, spec)
    if fingerprint:
        fingerprint = stored_fingerprint(fingerprint, spec, prepared.key_offsets)
    max_model_len = config.max_model_len or prepared.max_model_len
    return OpenModel(loaded, prepared, spec, max_model_len, fingerprint, folder, weight_bytes, is_quantized)


def _packed_folder(config: EngineConfig) -> SavedFolder | None:
    """The folder of packed weights; by default None without the extension, which packs them."""
    if config.packed_weights == "auto" and extension(config.backend) is None:
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
            backend=config.backend,
            generation_config=config.generation_config,
        )


def _prepare(config: EngineConfig, loaded: LoadedModel, folder: SavedFolder | None) -> PreparedModel:
    from quire.model.sequential_model import prepare

    with _with_alternative():
        prepared = prepare(
            loaded, backend=config.backend, max_model_len=config.max_model_len, packed_weights=folder
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


def _check_kept(config: EngineConfig, loaded: LoadedModel, prepared: PreparedModel, spec: KVSpec) -> None:
    """*raises:* ArgumentError: this model's content cannot be kept as the config says."""
    if prepared.by_own_forward and spec.kv_dtype != spec.dtype:
        raise ArgumentError(
            f"expected K and V in the model's dtype, {spec.dtype}, for a model that runs by its own forward "
            f"({loaded.model_type}), which reads them as they are stored, got {spec.kv_dtype_by_layers} - in "
            "`kv_dtype`; take auto"
        )
    if not loaded.spec.stores_kv and config.has_tiers:
        raise ArgumentError(
            "expected no tiers (host, disk, remote) for a model of states alone "
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
            "beside sinks or a soft cap",
            *(name, ", ".join(map(str, sorted(left_out))), spec.dtype),
        )
    for reason in layers_left(spec.in_model_dtype, config.kv_dtype).values():
        _log.warning("%s: keeps K and V in %s where a layer has %s", name, spec.dtype, reason)
    return with_kv_dtype(spec.in_model_dtype, config.kv_dtype, exclude=left_out)


# -- the step loop -------------------------------------------------------------------------------------


def _open_step_loop(
    config: EngineConfig,
    model: OpenModel,
    opened: OpenStorage,
    runner: Runner,
    profile: Profile | None,
    resources: ExitStack,
) -> tuple[Engine, OpenTiers | None]:
    """The engine, and the tiers below its cache; `resources` closes those."""
    loaded, speeds = model.loaded, Throughputs()
    swap = open_swap(config, opened.cache, opened.storage, speeds)
    tiers, monitor = _open_tiers(config, model, opened, speeds, resources)
    engine = Engine(
        EngineParts(
            runner,
            opened.cache,
            swap,
            speeds,
            loads=None if tiers is None else tiers.loads,
            stores=None if tiers is None else tiers.stores,
            monitor=monitor,
            profile=profile,
            native=extension(config.backend),
        ),
        ServedModel(
            loaded.vocab_size,
            model.max_model_len,
            loaded.tokenizer,
            loaded.eos_token_ids,
            loaded.sampling_defaults,
        ),
        limits=StepLimits(config.max_batch_tokens, config.max_num_seqs),
        seed=config.seed,
        tenant_secret=config.tenant_secret,
    )
    if tiers is not None:
        _connect_tiers(tiers, engine, model)
    return engine, tiers


def _open_tiers(
    config: EngineConfig,
    model: OpenModel,
    opened: OpenStorage,
    speeds: Throughputs,
    resources: ExitStack,
) -> tuple[OpenTiers | None, CacheMonitor | None]:
    """The tiers and the records of a cache that shares prefixes; of another one neither."""
    cache = opened.cache
    if not shares_prefixes(cache) or not cache.prefix_caching:
        return None, None
    dispatcher = EventDispatcher(cache)
    tiers = None
    if config.has_tiers:
        tiers = open_tiers(config, cache, opened.storage, model.fingerprint, speeds, dispatcher)
    if tiers is None:
        return None, CacheMonitor(cache, dispatcher)
    last_events = resources.enter_context(
        ExitStack()
    )  # of the last stores, and of tiers that end with this process
    resources.callback(tiers.close)
    monitor = CacheMonitor(cache, dispatcher, mirror=tiers.stores.mirror, tier_events=tiers.open_events())
    last_events.callback(monitor.subscribers.collect)
    return tiers, monitor


def _connect_tiers(tiers: OpenTiers, engine: Engine, model: OpenModel) -> None:
    tiers.stores.owner_of = engine.tenants.owner_of
    if (check := model.prepared.packed_check) is not None:
        tiers.stores.is_trusted = check.is_right
    if tiers.disk is not None:
        snapshots = Snapshots(tiers, model=model.loaded.name)
        snapshots.count_files()
        tiers.describe_roots(model.loaded.name, snapshots.settle)


def _num_threads(config: EngineConfig) -> int:
    """Threads of torch in the driver's thread."""
    import torch

    return config.num_threads or torch.get_num_threads()


# -- counts --------------------------------------------------------------------------------------------


def _bytes_committed(storage: Storage) -> int:
    states = storage.states
    return storage.bytes_committed + (0 if states is None else states.bytes_committed)


def _memory_stats(budget: KVBudget, storage: Storage, model: OpenModel) -> dict[str, Any]:
    """The fields of `LLM.stats` about memory and weights."""
    return {
        "kv_memory_bytes": budget.num_bytes,
        "kv_committed_bytes": _bytes_committed(storage),
        "weight_bytes": dict(model.weight_bytes),
        "kv_dtype": model.spec.kv_dtype_by_layers,
        "by_own_forward": model.prepared.by_own_forward,
    }
