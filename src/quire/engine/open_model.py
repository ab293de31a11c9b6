"""`OpenModel`: a model made ready to serve, and all that it is served with; opened together, closed together.

    loaded    the weights, their tokenizer, the shape of their KV
    prepared  the same model, its attention and products replaced by ours
    storage   the memory of keys and values, and the cache that says what lies where
    tiers     where content goes that memory gives up; watch: who is told of it
    engine    the step loop over all of them

Not the calls that people make: those are `LLM`'s. Invariant: where opening fails, everything opened before is closed,
and the model is as it was.

Cost: loading and preparing the model, and address space for the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.backends import native_module
from quire.cache.feed import EventFeed
from quire.engine.capacity import free_memory_bytes
from quire.engine.engine import Engine
from quire.engine.kv_budget import KVBudget
from quire.engine.profile import Profile
from quire.engine.snapshots import Snapshots
from quire.engine.speeds import Speeds
from quire.engine.storages import StorageOptions
from quire.engine.tiering import OpenTiers, TierOptions
from quire.engine.watch import Watch

if TYPE_CHECKING:
    from quire.memory.storage import Storage
    from quire.model.huge_pages import HugePageMove

__all__ = ["ModelOptions", "OpenModel"]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it computes; each as in `LLM`. packed_weights: a folder that is there."""

    model: Any
    dtype: str
    revision: str | None
    trust_remote_code: bool
    backend: str | None
    num_threads: int | None
    packed_weights: Path | None


class OpenModel:
    """See the module's text. options, storage_options, tier_options: checked already; the rest as in `LLM`.

    storage: None once closed; tiers: None where there are none, or once closed. watch: None where prefixes are not
    shared. profile: None where none is asked for.

    *raises:* ArgumentError, LoadError, UnsupportedModelError, CapacityError: nothing is kept.
    """

    def __init__(
        self,
        options: ModelOptions,
        storage_options: StorageOptions,
        tier_options: TierOptions,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        max_model_len: int | None,
        seed: int,
        pin_memory: str | int,
        tenant_secret: bytes | None,
        profile: bool,
    ) -> None:
        import torch

        from quire.engine.runner import Runner
        from quire.model.fingerprint import world
        from quire.model.load import load
        from quire.model.prepare import PreparedModel

        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
            if (native := native_module()) is not None:
                native.set_num_threads(options.num_threads)
        loaded = load(
            options.model,
            dtype=options.dtype,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        fingerprint = world(loaded, options.backend) if tier_options.has_tiers else b""
        self.name: str = loaded.name
        self.tokenizer: Any = loaded.tokenizer
        self.spec = loaded.spec
        self.vocab_size: int = loaded.vocab_size
        self.prepared = PreparedModel(
            loaded,
            backend=options.backend,
            max_model_len=max_model_len,
            packed_weights=options.packed_weights,
        )
        self.storage: Storage | None = None
        self.tiers: OpenTiers | None = None
        self.watch: Watch | None = None
        self._move: HugePageMove | None = None
        try:
            self.max_model_len: int = max_model_len or self.prepared.max_model_len
            opened = storage_options.open(
                loaded.spec,
                max_model_len=self.max_model_len,
                max_num_seqs=max_num_seqs,
                step_tokens=max_batch_tokens,
            )
            self.storage_name = opened.name
            self.storage = opened.storage
            self.cache = opened.cache
            self.profile = Profile() if profile else None
            self.runner = Runner(
                self.prepared, opened.storage, num_threads=options.num_threads, profile=self.profile
            )
            speeds = Speeds()
            parking = tier_options.parking(opened.cache, opened.storage, speeds)
            feed = EventFeed(opened.cache)
            if tier_options.has_tiers:
                self.tiers = tier_options.open(opened.cache, opened.storage, fingerprint, speeds, feed)
            if opened.cache.prefix_caching:
                tier_events = None if self.tiers is None else self.tiers.events()
                self.watch = Watch(opened.cache, feed, tier_events=tier_events)
            self.engine = Engine(
                self.runner,
                opened.cache,
                vocab_size=loaded.vocab_size,
                max_model_len=self.max_model_len,
                tokenizer=loaded.tokenizer,
                eos_token_ids=loaded.eos_token_ids,
                sampling_defaults=loaded.sampling_defaults,
                max_batch_tokens=max_batch_tokens,
                max_num_seqs=max_num_seqs,
                seed=seed,
                profile=self.profile,
                speeds=speeds,
                parking=parking,
                loads=None if self.tiers is None else self.tiers.loads,
                stores=None if self.tiers is None else self.tiers.stores,
                tenant_secret=tenant_secret,
                watch=self.watch,
            )
            if self.tiers is not None:
                self.tiers.stores.owner_of = self.engine.tenants.owner_of
                if self.tiers.disk is not None:
                    snapshots = Snapshots(self.tiers, model=loaded.name)
                    self.tiers.describe_roots(loaded.name, snapshots.settle)
            self.budget = KVBudget(
                opened,
                self.engine,
                storage_options,
                max_model_len=self.max_model_len,
                max_num_seqs=max_num_seqs,
                pin_memory=pin_memory,
            )
            if options.packed_weights is not None:
                spare_bytes = free_memory_bytes() - self.budget.num_bytes
                self._move = self.prepared.move_to_huge_pages(spare_bytes)
        except BaseException:
            self.close()
            raise

    def prefault(self) -> bool:
        """See `LLM.prefault`. *raises:* ArgumentError: another storage than "paged"."""
        done = self.budget.prefault()
        if self._move is not None:
            self._move.join()
        return done

    def close(self) -> None:
        """Ends all requests, stores in the tiers what they lack, gives the cache's memory back and the model as it was.

        Twice does nothing.
        """
        engine: Engine | None = getattr(self, "engine", None)
        if engine is not None:
            engine.abort_all()
        try:
            if self.tiers is not None:
                self.tiers.close()
                self.tiers = None
                if self.watch is not None:
                    self.watch.subscribers.collect()  # what has been stored, and what ends with this process
        finally:
            self.prepared.restore()
            if self.storage is not None:
                self.storage.close()
                self.storage = None
