"""The calls of `LLM` that show what its cache does and why: explain, subscribe, publish_events, report, figures.

A part of `LLM`, which has the lock and the engine; kept apart for the reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache.report import aligned, report
from quire.engine.explain import Explanation, OnDisk, Question, explain
from quire.engine.kv_events import EventBatch
from quire.engine.kv_publisher import KVEventPublisher
from quire.engine.prompts import encode
from quire.engine.sampling_params import SamplingParams
from quire.engine.tiering import world_tag
from quire.errors import ArgumentError
from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.snapshots import InEngine
    from quire.engine.tiering import OpenTiers
    from quire.engine.watch import Watch
    from quire.tiers.guarded import TierCounts

__all__ = ["Visibility", "check_endpoints"]


def check_endpoints(kv_events: str | None, kv_events_replay: str | None, shares_prefixes: bool) -> None:
    """*raises:* ArgumentError for what cannot be, before a model is loaded."""
    if kv_events_replay is not None and kv_events is None:
        raise ArgumentError(
            f"expected kv_events with kv_events_replay, got {kv_events_replay!r} alone; there is nothing to replay"
        )
    if kv_events is not None and not shares_prefixes:
        raise ArgumentError(
            "expected a cache that shares prefixes for kv_events, got one that does not; use storage paged or "
            "virtual, with prefix_caching"
        )


class Visibility:
    """See the module's text."""

    _lock: threading.RLock  # pyright: ignore[reportGeneralTypeIssues]
    _publishers: list[tuple[KVEventPublisher, Callable[[], None]]]
    _require_open: Callable[[], Any]
    _in_engine: Callable[[Callable[[], Any]], Any]
    engine: Engine
    cache: Any
    tokenizer: Any
    tiers: OpenTiers | None
    watch: Watch | None

    def explain(
        self,
        prompt: Any,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        as_administrator: bool | None = None,
    ) -> Explanation:
        """How much of a prompt is known, where, and why no more; `str` of it is text to read. Changes nothing.

        as_administrator: whether to tell of others than this tenant; if not given, where no tenant is named. Tiers are
        waited for, 5 s at most; steps of other threads go on meanwhile.
        *raises:* PromptError, ArgumentError.
        """
        return self._explain(prompt, tenant, cache_salt, as_administrator, self._in_engine)

    def _explain(
        self,
        prompt: Any,
        tenant: str | None,
        cache_salt: str | None,
        as_administrator: bool | None,
        in_engine: InEngine,
    ) -> Explanation:
        """For any thread but the one that computes the steps."""
        watch, tiers = self._require_watch(), self.tiers
        tokens = encode(prompt, self.tokenizer).token_ids
        is_administrator = tenant is None if as_administrator is None else as_administrator

        def ask() -> Question:
            params = SamplingParams(max_tokens=1)
            checked, _, _, place = self.engine.check(tokens, params, tenant=tenant, cache_salt=cache_salt)
            return Question(checked, place, tenant, is_administrator)

        return explain(
            self.cache,
            watch,
            self.engine.tenants,
            ask,
            in_engine,
            loads=None if tiers is None else tiers.loads,
            on_disk=lambda question, reached: self._on_disk(tiers, question, reached),
        )

    def _on_disk(self, tiers: OpenTiers | None, question: Question, reached: int) -> OnDisk:
        """What the disk cache has under the place's own root, and more of under others: all, or those of the tenant."""
        tokens, place, tenant = question.tokens, question.place, question.tenant
        if tiers is None or tiers.disk is None or place.num_published:
            return OnDisk()
        from quire.tiers.keys import root_key
        from quire.tiers.stored_prefix import stored_prefixes
        from quire.tiers.tier import TierError

        own = root_key(tiers.fingerprint, place.namespace)
        try:
            found = stored_prefixes(tiers.disk, tokens, place.extra_keys)
        except TierError:
            return OnDisk()
        elsewhere, differs_at, behind = None, 0, np.empty(0, np.int32)
        for prefix in found:
            root = prefix.root
            if root.root == own:
                differs_at, behind = prefix.num_common, prefix.behind
                continue
            is_told = question.is_administrator or (tenant is not None and tenant in root.owners)
            if elsewhere is None and prefix.num_tokens > reached and is_told:
                name = root.description or f"root {root.root.hex()[:12]}"
                is_ours = world_tag(tiers.fingerprint) in root.description
                elsewhere = "other namespace" if is_ours else "other fingerprint", f"on disk: {name}"
        return OnDisk(elsewhere, differs_at, behind)

    def subscribe(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Has `callback(batch)` told which blocks memory and tiers have: at once all, then what comes and goes.

        It runs between two steps, and should be quick; one that raises is told no more. Returns what ends it.
        """
        with self._lock:
            watch = self._require_watch()
            watch.collect()
            return watch.subscribers.add(callback)

    def publish_events(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        max_batches: int = 10_000,
    ) -> KVEventPublisher:
        """The same over ZeroMQ, in the shape of vLLM's KV events; ends with `close`. See `KVEventPublisher`."""
        with self._lock:
            self._require_watch()
            publisher = KVEventPublisher(endpoint, replay_endpoint, topic=topic, max_batches=max_batches)
            self._publishers.append((publisher, self.subscribe(publisher)))
            return publisher

    def _stop_publishing(self) -> None:
        for publisher, unsubscribe in self._publishers:
            unsubscribe()
            publisher.close()
        self._publishers.clear()

    def tier_counts(self) -> tuple[TierCounts, ...]:
        """What each tier holds and has done, top down. May wait for a disk: no step of another thread waits for it."""
        tiers = self.tiers
        return () if tiers is None else tiers.stack.stats().tiers

    def report(self) -> str:
        """The cache as a table: states of its blocks, who has them, the largest prefixes, pins, tenants, tiers."""
        return self._report(self.tier_counts())

    def _report(self, tiers: Sequence[TierCounts]) -> str:
        with self._lock:
            self._require_open()
            tenants = self.engine.tenants
            names = {tenant.account: tenant.name for tenant in tenants}
            if self.watch is not None:
                self.watch.feed.collect()
            parts = [
                report(
                    self.cache,
                    mirror=None if self.watch is None else self.watch.mirror,
                    owner_of=tenants.owner_of,
                    name_of=lambda account: names.get(
                        account, "nobody" if account == 0 else f"account {account}"
                    ),
                ),
                self._tenants_table(),
                self._pins_table(),
                _tiers_table(tiers),
            ]
            return "\n\n".join(part for part in parts if part)

    def _tenants_table(self) -> str:
        size = self.cache.unit_bytes
        rows: list[tuple[object, ...]] = [("tenant", "held", "cached", "floor", "quota", "priority")]
        for tenant in self.engine.tenants:
            counts = self.cache.account_counts(tenant.account)
            quota = "-" if tenant.quota_bytes is None else format_size(tenant.quota_bytes)
            rows.append((
                tenant.name, format_size((counts.held + counts.leased) * size), format_size(counts.cached * size),
                format_size(tenant.floor_bytes), quota, tenant.priority,
            ))  # fmt: skip
        return aligned(rows) if len(rows) > 1 else ""

    def _pins_table(self) -> str:
        pins = self.engine.pins
        pins.expire()
        now = pins.now()
        rows: list[tuple[object, ...]] = [("pin of", "tokens", "bytes", "hits", "ends in")]
        for pin in pins:
            left = "-" if pin.expires_at is None else f"{pin.expires_at - now:.1f} s"
            size = format_size(len(pin.units) * self.cache.unit_bytes)
            rows.append((pin.owner or "-", len(pin.tokens), size, pin.num_hits, left))
        return aligned(rows) if len(rows) > 1 else ""

    def _visible_stats(self, stats: dict[str, Any], tiers: Sequence[TierCounts]) -> dict[str, Any]:
        """Hit tokens and bytes by tier, what the tiers did, losses and uses, pins. stats: the engine's."""
        found = stats["hit_tokens_by_tier"]
        by_tier = {"memory": found["memory"]} | {tier.name: found.get(tier.name, 0) for tier in tiers}
        size = self.cache.unit_bytes
        num_bytes = {"memory": (stats["cached"] + stats["held"] + stats["leased"] + stats["pinned"]) * size}
        num_bytes |= {tier.name: tier.bytes for tier in tiers}
        return {
            "hit_tokens_by_tier": by_tier,
            "bytes_by_tier": num_bytes,
            "tiers": {tier.name: _counts(tier) for tier in tiers},
            "num_pins": len(self.engine.pins),
            "pinned_bytes": stats["pinned"] * size,
            "num_tenants": len(self.engine.tenants),
            **({} if self.watch is None else self.watch.stats()),
        }

    def _require_watch(self) -> Watch:
        self._require_open()
        if self.watch is None:
            raise ArgumentError(
                "expected a cache that shares prefixes, got one that does not; use storage paged or virtual, with "
                "prefix_caching"
            )
        return self.watch


def _counts(tier: TierCounts) -> dict[str, Any]:
    """All but its name."""
    return {name: value for name, value in asdict(tier).items() if name != "name"}


def _tiers_table(tiers: Sequence[TierCounts]) -> str:
    """What they hold, gave, took and lost; "" where there are none."""
    if not tiers:
        return ""
    names = ("hits", "misses", "loaded_bytes", "stored", "stored_bytes", "evicted", "damaged", "failures")
    rows: list[tuple[object, ...]] = [
        ("tier", "segments", "bytes", *(name.replace("_", " ") for name in names))
    ]
    for tier in tiers:
        size = "?" if tier.bytes < 0 else format_size(tier.bytes)
        counts = _counts(tier)
        shown = [format_size(counts[name]) if name.endswith("bytes") else counts[name] for name in names]
        rows.append((tier.name, "?" if tier.segments < 0 else tier.segments, size, *shown))
    return aligned(rows)
