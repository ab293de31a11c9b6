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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.backends import extension, is_host_backend
from quire.cache.event_dispatcher import EventDispatcher
from quire.cache.prefix_key import PrefixKey
from quire.cache.protocol import KVCache, shares_prefixes
from quire.cache.states.state_cache import StateCache
from quire.config import PROPOSERS, EngineConfig, draft_model_of, parse_speculation
from quire.engine.draft_memory import with_possible_drafts
from quire.engine.driver import Driver
from quire.engine.driver_proxy import in_driver
from quire.engine.engine import Engine
from quire.engine.engine_monitor import EngineMonitor
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.engine.idle_trim import IdleTrim
from quire.engine.kv_budget import KVBudget
from quire.engine.monitor import CacheMonitor
from quire.engine.open_model import OpenModel, open_model
from quire.engine.open_storage import OpenStorage, open_storage
from quire.engine.profile import Profile
from quire.engine.prompt_pins import PromptPins
from quire.engine.serving_plan import refuse_if_none_fits
from quire.engine.session_calls import Sessions
from quire.errors import ArgumentError
from quire.memory.device_memory import HOST
from quire.offload.kept_scores import KeptScores
from quire.offload.offloaded_sequence import InEngine
from quire.offload.open_tiers import OpenTiers, open_swap, open_tiers
from quire.offload.throughputs import Throughputs
from quire.sampling.proposers.proposer import make_proposer
from quire.scheduler.known_texts import KnownTexts
from quire.scheduler.request_validator import ServedModel
from quire.scheduler.speculation import Speculation
from quire.scheduler.tenants import Tenants
from quire.sessions.snapshots import Snapshot, SnapshotLimits, Snapshots
from quire.sessions.transcript import Transcript, TranscriptReader

if TYPE_CHECKING:
    from quire.engine.draft_model import DraftModel
    from quire.engine.hit_verifier import HitVerifier
    from quire.engine.launch_ahead import LaunchAhead
    from quire.engine.model_changes import ModelChanges
    from quire.engine.runner import Runner
    from quire.memory.storage import Storage
    from quire.model.prepare import PreparedModel
    from quire.weights.huge_pages import HugePageMove

__all__ = ["OpenEngine", "open_engine"]

_log = logging.getLogger("quire")


@dataclass(frozen=True, eq=False)
class OpenEngine:
    """See the module's text. tenants, pins, sessions, monitor: for any thread; the other parts for the driver's thread.

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
    sessions: Sessions
    monitor: EngineMonitor
    _tiers: OpenTiers | None
    _is_closed: threading.Event

    @cached_property
    def texts(self) -> KnownTexts:
        """Encodes long texts; for any thread."""
        return KnownTexts(self.model.loaded.tokenizer)

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
        """The snapshots of the disk cache. *raises:* ArgumentError: there is no disk cache, or it is closed."""
        self.driver.require_open()
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
        model = open_model(config, resources)
        possible = with_possible_drafts(config, model.prepared.by_own_forward)
        if possible.speculation != config.speculation:
            _log.info("speculation=auto is off: the model runs by its own forward")
        config = possible
        draft = None
        if draft_model_of(config.speculation) is not None:
            from quire.engine.draft_model import open_draft_model

            draft, config = open_draft_model(config, model, resources)
        opened = open_storage(config, model.spec, model.max_model_len)
        resources.callback(opened.storage.close)
        return _start(config, model, opened, draft, resources)


def _start(
    config: EngineConfig,
    model: OpenModel,
    opened: OpenStorage,
    draft: DraftModel | None,
    resources: ExitStack,
) -> OpenEngine:
    """The engine of an open model and storage. Its driver takes the resources: nothing can fail after its start."""
    from quire.engine.launch_ahead import launch_ahead_of
    from quire.engine.model_changes import ModelChanges
    from quire.engine.runner import Runner

    prepared, cache, storage = model.prepared, opened.cache, opened.storage
    profile = Profile(config.device_name) if config.profile else None
    launch_ahead = launch_ahead_of(prepared, storage)
    if launch_ahead is not None:
        resources.callback(launch_ahead.close)
    runner = Runner(
        prepared, storage, num_threads=config.num_threads, profile=profile, launch_ahead=launch_ahead
    )
    engine, tiers = _open_step_loop(config, model, opened, draft, runner, profile, launch_ahead, resources)
    budget = KVBudget(opened, engine, config, max_model_len=model.max_model_len)
    draft_bytes = 0 if draft is None else draft.kv_bytes
    refuse_if_none_fits(budget.fit, config, model.max_model_len, draft_bytes)
    changes = ModelChanges(prepared, engine, opened, tiers, config.device_name)
    engine.on_work = changes.follow
    move = None
    if model.packed_folder is not None:
        move = prepared.move_to_huge_pages(HOST.free_bytes() - budget.num_bytes)
    idle_trim = IdleTrim(budget, tiers)
    is_closed = threading.Event()
    tokenizer = model.loaded.tokenizer
    pins = PromptPins(engine, cache, tokenizer, lambda *request: driver.run([request])[0])

    def open_tiers_now() -> OpenTiers | None:
        return None if is_closed.is_set() else tiers

    sessions = Sessions(engine, cache, open_tiers_now, lambda *request: driver.run([request])[0])
    monitor = EngineMonitor(
        engine,
        cache,
        tokenizer,
        open_tiers_now,
        lambda: _memory_stats(budget, storage, model),
    )
    verifier = _hit_verifier(config, model, opened, engine, runner, tiers, budget)
    driver, closing = _start_driver(config, engine, budget, idle_trim, verifier)
    closing.callback(monitor.stop_publishing)  # from last to first, in the driver's thread
    closing.push(resources.pop_all())
    closing.callback(is_closed.set)
    if verifier is not None:
        closing.callback(verifier.release)
    return OpenEngine(
        config=config,
        model=model,
        storage_name=opened.name,
        storage=storage,
        cache=cache,
        runner=runner,
        profile=profile,
        engine=engine,
        budget=budget,
        idle_trim=idle_trim,
        changes=changes,
        huge_page_move=move,
        driver=driver,
        tenants=in_driver(engine.tenants, driver),
        pins=in_driver(pins, driver),
        sessions=in_driver(sessions, driver),
        monitor=in_driver(monitor, driver),
        _tiers=tiers,
        _is_closed=is_closed,
    )


def _hit_verifier(
    config: EngineConfig,
    model: OpenModel,
    opened: OpenStorage,
    engine: Engine,
    runner: Runner,
    tiers: OpenTiers | None,
    budget: KVBudget,
) -> HitVerifier | None:
    """*raises:* ArgumentError: the model's bits depend on the steps, so that equal content can have other bits."""
    from quire.engine.hit_verifier import HitVerifier

    if not config.verify_hits:
        return None
    prepared = model.prepared
    name, reason = prepared.device.name, ""
    if prepared.by_own_forward:
        reason = f"got {model.loaded.name}, which runs by its own forward"
    elif not (prepared.device.is_native or name.startswith("triton@")):
        reason = f"got backend {name!r}"
    if reason:
        raise ArgumentError(
            f"expected with verify_hits a model whose bits do not depend on the division into steps, {reason} "
            "(docs/exactness.md); leave verify_hits out - in `verify_hits`"
        )
    assert shares_prefixes(opened.cache)  # `EngineConfig` has checked it
    verifier = HitVerifier(
        engine,
        opened.cache,
        opened.storage,
        runner,
        tiers,
        budget,
        one_in=config.verify_hits,
        seed=config.seed,
    )
    engine.verifier = verifier
    return verifier


def _start_driver(
    config: EngineConfig,
    engine: Engine,
    budget: KVBudget,
    idle_trim: IdleTrim,
    verifier: HitVerifier | None,
) -> tuple[Driver, ExitStack]:
    """The engine's thread, and the stack of what it closes at its end."""
    import torch

    closing, idle_s = ExitStack(), budget.idle_trim_s
    driver = Driver(
        engine,
        closing.close,
        num_threads=config.num_threads or torch.get_num_threads(),
        on_idle=idle_trim if idle_s else None,
        idle_s=idle_s,
        idle_steps=verifier,
    )
    return driver, closing


# -- the step loop -------------------------------------------------------------------------------------


def _open_step_loop(
    config: EngineConfig,
    model: OpenModel,
    opened: OpenStorage,
    draft: DraftModel | None,
    runner: Runner,
    profile: Profile | None,
    launch_ahead: LaunchAhead | None,
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
            native=extension(config.device_name) if is_host_backend(config.device_name) else None,
            is_lost=model.prepared.device.is_lost,
            launch_ahead=launch_ahead,
            kept_scores=_kept_scores(config, tiers, monitor),
            speculation=_speculation(config, opened.cache, draft),
        ),
        ServedModel(
            loaded.vocab_size,
            model.max_model_len,
            loaded.tokenizer,
            loaded.eos_token_ids,
            loaded.sampling_defaults,
        ),
        limits=StepLimits(
            config.max_batch_tokens,
            config.max_num_seqs,
            long_prefill_tokens=config.long_prompt_limit,
        ),
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


def _kept_scores(
    config: EngineConfig, tiers: OpenTiers | None, monitor: CacheMonitor | None
) -> KeptScores | None:
    if monitor is None or not config.keep_scores:
        return None
    return KeptScores(monitor.mirror, monitor.collect, None if tiers is None else tiers.scores)


def _speculation(config: EngineConfig, cache: KVCache, draft: DraftModel | None) -> Speculation | None:
    parsed = parse_speculation(config.speculation)
    if parsed is None:
        return None
    name, max_drafts = parsed
    proposer = draft or make_proposer(PROPOSERS[-1] if name == "auto" else name)
    if isinstance(cache, StateCache):
        return Speculation(proposer, max_drafts, cache.num_draft_slots)
    return Speculation(proposer, max_drafts)


def _connect_tiers(tiers: OpenTiers, engine: Engine, model: OpenModel) -> None:
    tiers.stores.owner_of = engine.tenants.owner_of
    if (check := model.prepared.packed_check) is not None:
        tiers.stores.is_trusted = check.is_right
    if tiers.disk is not None:
        snapshots = Snapshots(tiers, model=model.loaded.name)
        snapshots.count_files()
        tiers.describe_roots(model.loaded.name, snapshots.settle)


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
