"""`EngineMonitor`: explanations, events and reports of an engine's cache: `llm.monitor.report()`.

Not here: the records of the cache (`quire.engine.monitor.CacheMonitor`), which this class reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np

from quire.cache.prefix_key import PrefixKey, PrefixKeywords
from quire.cache.protocol import KVCache
from quire.cache.report import aligned, report
from quire.engine.driver_proxy import in_caller
from quire.engine.engine import Engine
from quire.engine.prompt_explanation import OnDisk, PromptExplanation, Question, explain
from quire.errors import ArgumentError
from quire.observe.kv_events import EventBatch
from quire.observe.prefixes import prefix_table
from quire.observe.publisher import KVEventPublisher
from quire.offload.open_tiers import OpenTiers, fingerprint_tag
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import encode
from quire.scheduler.request_options import RequestOptions
from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.engine.monitor import CacheMonitor
    from quire.tiers.tier_worker import TierCounts

__all__ = ["EngineMonitor"]

Result = TypeVar("Result")


class EngineMonitor:
    """See the module's text.

    open_tiers: the tiers; None if there are none, or once closed. memory_stats: the counts of memory and weights.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        tokenizer: Any,
        open_tiers: Callable[[], OpenTiers | None],
        memory_stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._engine, self._cache, self._tokenizer = engine, cache, tokenizer
        self._open_tiers = open_tiers
        self._memory_stats = memory_stats
        self._publishers: list[tuple[KVEventPublisher, Callable[[], None]]] = []

    @in_caller
    def explain(
        self,
        prompt: Any,
        *,
        as_administrator: bool | None = None,
        with_tiers: bool = True,
        **key: Unpack[PrefixKeywords],
    ) -> PromptExplanation:
        """How much of a prompt is cached, where, and why no more; `str` gives readable text. Changes nothing.

        prompt, key: as for `LLM.generate`. as_administrator: include other tenants' content; None: only if no tenant is
        named. with_tiers: waits for the tiers, 5 s at most, while steps of other threads go on; without, the tiers and
        the disk cache are not looked at.
        *raises:* PromptError, ArgumentError.
        """
        prefix_key, tiers = PrefixKey.of(**key), self._open_tiers() if with_tiers else None
        monitor = self._require_monitor()
        tokens = encode(prompt, self._tokenizer).token_ids
        is_administrator = prefix_key.tenant is None if as_administrator is None else as_administrator

        def ask() -> Question:
            request = self._engine.check(tokens, RequestOptions(SamplingParams(max_tokens=1), prefix_key))
            return Question(request.prompt_token_ids, request.key, prefix_key.tenant, is_administrator)

        return explain(
            self._cache,
            monitor,
            self._engine.tenants,
            ask,
            self._in_engine,
            loads=None if tiers is None else tiers.loads,
            on_disk=self._on_disk if with_tiers else lambda question, reached: OnDisk(),
        )

    def _in_engine(self, function: Callable[[], Result]) -> Result:
        """Calls a function; through a proxy, in the driver's thread."""
        return function()

    @in_caller
    def _on_disk(self, question: Question, reached: int) -> OnDisk:
        """The disk cache's content under the key's root, and a longer prefix under another root, if visible."""
        tiers, tokens, key, tenant = self._open_tiers(), question.tokens, question.key, question.tenant
        if tiers is None or tiers.disk is None or key.num_published:
            return OnDisk()
        from quire.cache.block_hash import root_key
        from quire.tiers.stored_prefix import stored_prefixes
        from quire.tiers.tier import TierError

        own_root = root_key(tiers.fingerprint, key.namespace)
        try:
            found = stored_prefixes(tiers.disk, tokens, key.extra_keys)
        except TierError:
            return OnDisk()
        elsewhere, differs_at, behind = None, 0, np.empty(0, np.int32)
        for prefix in found:
            root = prefix.root
            if root.root == own_root:
                differs_at, behind = prefix.num_common, prefix.behind
                continue
            is_visible = question.is_administrator or (tenant is not None and tenant in root.owners)
            if elsewhere is None and prefix.num_tokens > reached and is_visible:
                name = root.description or f"root {root.root.hex()[:12]}"
                is_ours = fingerprint_tag(tiers.fingerprint) in root.description
                elsewhere = "other namespace" if is_ours else "other fingerprint", f"on disk: {name}"
        return OnDisk(elsewhere, differs_at, behind)

    def subscribe(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Calls `callback(batch)` with KV events: first all blocks of memory and tiers, then each change.

        It runs between two steps and should be quick; one that raises is unsubscribed. Returns a function that
        unsubscribes.
        """
        monitor = self._require_monitor()
        monitor.collect()
        return monitor.subscribers.add(callback)

    def publish_events(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        max_batches: int = 10_000,
    ) -> KVEventPublisher:
        """The same over ZeroMQ, in the shape of vLLM's KV events; ends with `close`. See `KVEventPublisher`."""
        self._require_monitor()
        publisher = KVEventPublisher(endpoint, replay_endpoint, topic=topic, max_batches=max_batches)
        self._publishers.append((publisher, self.subscribe(publisher)))
        return publisher

    def stop_publishing(self) -> None:
        """Ends the publishers of `publish_events`."""
        with ExitStack() as ended:  # all of them, also if one fails to close
            while self._publishers:
                publisher, unsubscribe = self._publishers.pop()
                ended.callback(publisher.close)
                ended.callback(unsubscribe)

    @in_caller
    def tier_counts(self) -> tuple[TierCounts, ...]:
        """The counts of each tier, top down. May wait for a disk, without delaying steps of other threads."""
        tiers = self._open_tiers()
        return () if tiers is None else tiers.stack.stats().tiers

    @in_caller
    def report(self) -> str:
        """The cache as tables: states and owners of its blocks, the largest prefixes, pins, tenants, tiers."""
        return self._report(self.tier_counts())

    def _report(self, tiers: Sequence[TierCounts]) -> str:
        tenants, monitor = self._engine.tenants, self._engine.monitor
        names = {0: "no tenant", **{tenant.owner_id: tenant.name for tenant in tenants}}
        prefixes = ""
        if monitor is not None:
            monitor.feed.collect()
            prefixes = prefix_table(monitor.mirror, tenants.owner_of)
        states = report(
            self._cache,
            owner_of=tenants.owner_of,
            name_of=lambda owner_id: names.get(owner_id, f"owner {owner_id}"),
        )
        parts = [states, prefixes, self._tenants_table(), self._pins_table(), _tiers_table(tiers)]
        return "\n\n".join(part for part in parts if part)

    def _tenants_table(self) -> str:
        size = self._cache.block_bytes
        rows: list[tuple[object, ...]] = [
            ("tenant", "held", "cached", "floor", "quota", "priority", "weight")
        ]
        for tenant in self._engine.tenants:
            counts = self._cache.owner_counts(tenant.owner_id)
            quota = "-" if tenant.quota_bytes is None else format_size(tenant.quota_bytes)
            rows.append((
                tenant.name, format_size((counts.held + counts.in_flight) * size), format_size(counts.cached * size),
                format_size(tenant.floor_bytes), quota, tenant.priority, f"{tenant.weight:g}",
            ))  # fmt: skip
        return aligned(rows) if len(rows) > 1 else ""

    def _pins_table(self) -> str:
        pins = self._engine.pins
        pins.expire()
        now = pins.now()
        rows: list[tuple[object, ...]] = [("pin of", "tokens", "bytes", "hits", "ends in")]
        for pin in pins:
            left = "-" if pin.expires_at is None else f"{pin.expires_at - now:.1f} s"
            size = format_size(len(pin.block_ids) * self._cache.block_bytes)
            rows.append((pin.owner or "-", len(pin.tokens), size, pin.num_hits, left))
        return aligned(rows) if len(rows) > 1 else ""

    @in_caller
    def stats(self) -> dict[str, Any]:
        """See `LLM.stats`."""
        return self._stats(self.tier_counts())

    def _stats(self, tiers: Sequence[TierCounts]) -> dict[str, Any]:
        stats, use, monitor = self._engine.stats(), self._cache.memory_use(), self._engine.monitor
        found, size = stats["hit_tokens_by_tier"], self._cache.block_bytes
        by_tier = {"memory": found["memory"]} | {tier.name: found.get(tier.name, 0) for tier in tiers}
        num_bytes = {
            "memory": (stats["cached"] + stats["held"] + stats["in_flight"] + stats["pinned"]) * size
        }
        num_bytes |= {tier.name: tier.bytes for tier in tiers}
        return {
            **stats,
            "hit_tokens_by_tier": by_tier,
            "bytes_by_tier": num_bytes,
            "tiers": {tier.name: _counts(tier) for tier in tiers},
            **self._peer_stats(),
            "num_pins": len(self._engine.pins),
            "pinned_bytes": stats["pinned"] * size,
            "num_tenants": len(self._engine.tenants),
            **({} if monitor is None else monitor.stats()),
            "kv_reserved_bytes": use.reserved,
            "kv_used_bytes": use.used,
            "kv_peak_bytes": use.peak,
            **self._memory_stats(),
        }

    def _peer_stats(self) -> dict[str, int]:
        """The counts of the server for peers, `PeerServer.stats`."""
        tiers = self._open_tiers()
        return {} if tiers is None or tiers.peer_server is None else tiers.peer_server.stats()

    @in_caller
    def _require_monitor(self) -> CacheMonitor:
        if self._engine.monitor is None:
            raise ArgumentError(
                "expected a cache that shares prefixes, got one that does not; use storage paged or virtual, with "
                "prefix_caching"
            )
        return self._engine.monitor


def _counts(tier: TierCounts) -> dict[str, Any]:
    """The counts of a tier, without its name."""
    return {name: value for name, value in asdict(tier).items() if name != "name"}


def _tiers_table(tiers: Sequence[TierCounts]) -> str:
    """A table of the tiers' counts; "" if there are none."""
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
