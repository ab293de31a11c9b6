"""`EngineCore`: the parts of an open engine, opened and closed together.

    loaded    the weights, their tokenizer, the shape of their KV
    prepared  the same model with Quire's attention and products
    storage   the memory of keys and values, and the cache that assigns it
    tiers     storage for content that memory gives up; monitor: events and counts of the cache
    engine    the step loop over all of them

The public calls are `LLM`'s. Invariant: if opening fails, all parts opened before are closed and the model is restored.

Cost: loading and preparing the model, and address space for the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.backends import extension, is_host_backend
from quire.cache.event_dispatcher import EventDispatcher
from quire.cache.prefix_key import PrefixKey
from quire.cache.protocol import shares_prefixes
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.idle_trim import IdleTrim
from quire.engine.kv_budget import KVBudget
from quire.engine.kv_capacity import kv_memory_bytes
from quire.engine.monitor import CacheMonitor
from quire.engine.open_storage import open_storage
from quire.engine.profile import Profile
from quire.engine.serving_plan import refuse_if_none_fits, require_room
from quire.errors import ArgumentError, UnsupportedModelError
from quire.memory.device_memory import HOST
from quire.offload.offloaded_sequence import InEngine
from quire.offload.open_tiers import OpenTiers, open_swap, open_tiers
from quire.offload.throughputs import Throughputs
from quire.saved_folder import SavedFolder
from quire.sessions.snapshots import Snapshot, SnapshotLimits, Snapshots
from quire.sessions.transcript import Transcript, TranscriptReader
from quire.sizes import format_size, parse_size
from quire.spec import KVSpec
from quire.spec.kv_dtype import layers_left, with_kv_dtype

if TYPE_CHECKING:
    from quire.memory.storage import Storage
    from quire.weights.huge_pages import HugePageMove

__all__ = ["EngineCore"]

_log = logging.getLogger("quire")


@contextmanager
def _with_alternative() -> Iterator[None]:
    """Adds to a refused model's error how it can be run instead."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}; model.generate runs it, on a quire.hf.QuireCache if its forward takes a cache"
        ) from error


def _packed_folder(config: EngineConfig) -> SavedFolder | None:
    """The folder of packed weights; by default None without the extension, which packs them."""
    if config.packed_weights == "auto" and extension(config.backend) is None:
        return None
    size = config.packed_weights_size
    max_bytes = None if size is None else parse_size(size, where="packed_weights_size")
    return SavedFolder.from_option(config.packed_weights, max_bytes)


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


class EngineCore:
    """See the module's text.

    storage: None once closed; tiers: None without tiers, or once closed. monitor: None if prefixes are not shared.
    profile: None without `profile=True`.

    *raises:* ArgumentError, LoadError, UnsupportedModelError, CapacityError: no part stays open.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Refuses now what would be refused after minutes of loading.
        if is_host_backend(config.backend):
            kv_memory_bytes(config.kv_memory, most_useful_bytes=2**62)
        packed_folder = _packed_folder(config)

        import torch

        from quire.devices import device_of
        from quire.engine.model_changes import ModelChanges
        from quire.engine.runner import Runner
        from quire.memory.heap import give_back_freed
        from quire.model.fingerprint import engine_fingerprint, stored_fingerprint
        from quire.model.sequential_model import prepare
        from quire.weights.dense_weights import dense_parameters
        from quire.weights.load import load
        from quire.weights.quantized_modules import bytes_by_format, quantized_weights

        device_of(config.backend)  # an unknown one is refused here
        require_room(config)
        self.num_threads: int = (
            config.num_threads or torch.get_num_threads()
        )  # torch's, of the driver's thread
        native = extension(config.backend)
        if config.num_threads is not None and native is not None:
            native.set_num_threads(config.num_threads)
        with _with_alternative():
            loaded = load(
                config.model,
                dtype=config.dtype,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                weights=config.weight_formats,
                saved_folder=packed_folder,
                backend=config.backend,
                generation_config=config.generation_config,
            )
        spec = with_kv_dtype(loaded.spec, config.kv_dtype)
        _check_formats(spec, config.backend)
        fingerprint = engine_fingerprint(loaded, config.backend) if config.has_tiers else b""
        self.weight_bytes = bytes_by_format(loaded.model)
        self.has_codes = bool(quantized_weights(loaded.model))
        self.name: str = loaded.name
        self.tokenizer: Any = loaded.tokenizer
        self.vocab_size: int = loaded.vocab_size
        with _with_alternative():
            self.prepared = prepare(
                loaded,
                backend=config.backend,
                max_model_len=config.max_model_len,
                packed_weights=packed_folder,
            )
        if self.prepared.rotary_note:
            _log.info("%s: %s", loaded.name, self.prepared.rotary_note)
        if loaded.file_ranges is not None:
            loaded.file_ranges.release_files(dense_parameters(loaded.model))
        give_back_freed()  # the proof's memory, before the budget is made
        self.storage: Storage | None = None
        self.tiers: OpenTiers | None = None
        self.monitor: CacheMonitor | None = None
        self._move: HugePageMove | None = None
        try:
            if self.prepared.by_own_forward and spec.kv_dtype != spec.dtype:
                raise ArgumentError(
                    f"expected K and V in the model's dtype, {spec.dtype}, for a model that runs by its own forward "
                    f"({loaded.model_type}), which reads them as they are stored, got {spec.kv_dtype_by_layers} - in "
                    "`kv_dtype`; take auto"
                )
            spec = self._with_key_offsets(spec, config)
            fingerprint = (
                stored_fingerprint(fingerprint, spec, self.prepared.key_offsets) if fingerprint else b""
            )
            self.spec = spec
            if not loaded.spec.stores_kv and config.has_tiers:
                raise ArgumentError(
                    "expected no tiers (host, disk, remote) for a model of states alone "
                    f"({loaded.model_type}), which has no keys and values that they keep, got some; leave them out"
                )
            self.max_model_len: int = config.max_model_len or self.prepared.max_model_len
            opened = open_storage(config, spec, self.max_model_len)
            self.storage_name = opened.name
            self.storage = opened.storage
            self.cache = opened.cache
            self.profile = Profile(config.backend) if config.profile else None
            self.runner = Runner(
                self.prepared, opened.storage, num_threads=config.num_threads, profile=self.profile
            )
            speeds = Throughputs()
            swap = open_swap(config, opened.cache, opened.storage, speeds)
            if shares_prefixes(opened.cache) and opened.cache.prefix_caching:
                dispatcher = EventDispatcher(opened.cache)
                if config.has_tiers:
                    self.tiers = open_tiers(
                        config, opened.cache, opened.storage, fingerprint, speeds, dispatcher
                    )
                tier_events = None if self.tiers is None else self.tiers.open_events()
                mirror = None if self.tiers is None else self.tiers.stores.mirror
                self.monitor = CacheMonitor(opened.cache, dispatcher, mirror=mirror, tier_events=tier_events)
            self.engine = Engine(
                self.runner,
                opened.cache,
                vocab_size=loaded.vocab_size,
                max_model_len=self.max_model_len,
                tokenizer=loaded.tokenizer,
                eos_token_ids=loaded.eos_token_ids,
                sampling_defaults=loaded.sampling_defaults,
                max_batch_tokens=config.max_batch_tokens,
                max_num_seqs=config.max_num_seqs,
                seed=config.seed,
                profile=self.profile,
                speeds=speeds,
                swap=swap,
                loads=None if self.tiers is None else self.tiers.loads,
                stores=None if self.tiers is None else self.tiers.stores,
                tenant_secret=config.tenant_secret,
                monitor=self.monitor,
                native=native,
            )
            if self.tiers is not None:
                self.tiers.stores.owner_of = self.engine.tenants.owner_of
                if (check := self.prepared.packed_check) is not None:
                    self.tiers.stores.is_trusted = check.is_right
                if self.tiers.disk is not None:
                    snapshots = self.snapshots()
                    snapshots.count_files()
                    self.tiers.describe_roots(loaded.name, snapshots.settle)
            self.budget = KVBudget(opened, self.engine, config, max_model_len=self.max_model_len)
            self.idle_trim = IdleTrim(self.budget, self.tiers)
            refuse_if_none_fits(self.budget.fit, config, self.max_model_len)
            self.changes = ModelChanges(self.prepared, self.engine, opened, self.tiers, config.backend)
            self.engine.on_work = self.changes.follow
            if packed_folder is not None:
                spare_bytes = HOST.free_bytes() - self.budget.num_bytes
                self._move = self.prepared.move_to_huge_pages(spare_bytes)
        except BaseException:
            self.close()
            raise

    def _with_key_offsets(self, spec: KVSpec, config: EngineConfig) -> KVSpec:
        """`spec` with the key offsets that its codes need; layers whose offsets cannot be applied have no codes."""
        if spec.in_model_dtype is spec:
            return spec
        from quire.model.key_offsets import measure_key_offsets

        self.prepared.key_offsets, left_out = measure_key_offsets(self.prepared, spec)
        if left_out:
            _log.warning(
                "%s: layers %s keep K and V in %s: their keys have channels far from zero, which cannot be taken off "
                "beside sinks or a soft cap",
                *(self.name, ", ".join(map(str, sorted(left_out))), spec.dtype),
            )
        for reason in layers_left(spec.in_model_dtype, config.kv_dtype).values():
            _log.warning("%s: keeps K and V in %s where a layer has %s", self.name, spec.dtype, reason)
        return with_kv_dtype(spec.in_model_dtype, config.kv_dtype, exclude=left_out)

    @property
    def bytes_committed(self) -> int:
        """Memory that the cache has taken from the system; 0 once closed."""
        if self.storage is None:
            return 0
        states = self.storage.states
        return self.storage.bytes_committed + (0 if states is None else states.bytes_committed)

    @property
    def weights(self) -> str:
        """Formats and sizes if some weights are quantized: "weights int4:128 201 MiB, ..."; else ""."""
        if not self.has_codes:
            return ""
        return "weights " + ", ".join(
            f"{name} {format_size(size)}" for name, size in self.weight_bytes.items()
        )

    @property
    def reader(self) -> TranscriptReader:
        """Turns text into this model's tokens."""
        return TranscriptReader(self.tokenizer, self.engine.check_tokens)

    def snapshots(self) -> Snapshots:
        """The snapshots of the disk cache. *raises:* ArgumentError: there is no disk cache."""
        return Snapshots(self.tiers, model=self.name)

    def load_snapshot(self, name: str, key: PrefixKey, *, recompute: bool = False) -> Transcript:
        """See `LLM.resume`. For any thread."""
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
        """See `Conversation.snapshot`. limits: of all snapshots of its tenant. For any thread."""
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

    def prefault(self) -> bool:
        """See `LLM.prefault`. *raises:* ArgumentError: another storage than "paged"."""
        done = self.budget.prefault()
        if self._move is not None:
            self._move.join()
        return done

    def close(self) -> None:
        """Ends all requests, stores missing content in the tiers, frees the cache's memory, restores the model.

        A second call does nothing.
        """
        engine: Engine | None = getattr(self, "engine", None)
        if engine is not None:
            engine.abort_all()
        try:
            if self.tiers is not None:
                self.tiers.close()
                self.tiers = None
                if self.monitor is not None:
                    self.monitor.subscribers.collect()  # the last stores, and tiers that end with this process
        finally:
            self.prepared.restore()
            if self.storage is not None:
                self.storage.close()
                self.storage = None
