"""Prometheus metrics: vLLM's names where vLLM has them, `quire:` for Quire's own.

    vllm:num_requests_running, _waiting      gauges, now
    vllm:kv_cache_usage_perc                 share of the blocks in use, 0 to 1
    vllm:prompt_tokens_total, vllm:generation_tokens_total
    vllm:prefix_cache_queries_total, _hits_total      tokens of prompts, and those found in the cache
    vllm:num_preemptions_total
    vllm:spec_decode_num_drafts_total, _num_draft_tokens_total, _num_accepted_tokens_total
    vllm:spec_decode_num_accepted_tokens_per_pos_total{position}
    vllm:request_success_total{finished_reason}
    vllm:time_to_first_token_seconds, vllm:e2e_request_latency_seconds, vllm:request_time_per_output_token_seconds
    vllm:inter_token_latency_seconds         of every token except a sequence's first; the engine's
    vllm:request_queue_time_seconds, vllm:request_prefill_time_seconds, vllm:request_decode_time_seconds
    vllm:request_prompt_tokens, vllm:request_generation_tokens, vllm:request_max_num_generation_tokens
    quire:...                                the cache's and the engine's other counts
    quire:tier_...{tier}                     each tier's content and calls: `quire.tiers.tier_worker.TierCounts`
    quire:key_read_tokens_total{tenant,key}, _written_, _computed_, _generated_      tokens of requests by API key
    quire:session_receipts_total{action,outcome}      answers to commands for the content of sessions
    quire:tenant_computed_tokens_total{tenant}        tokens computed for a tenant
    quire:tenant_passed_by_tokens_total{tenant}       tokens computed for others in steps in which it waited
    quire:hit_tokens_total{tier}             tokens of prompts found, by place: memory, or a tier
    quire:evicted_blocks_total{reason}       full blocks whose content memory evicted, by reason: `LOSS_REASONS`
    quire:verified_hits_total{outcome}       hits computed again, with `verify_hits`; quire:verified_tokens_total
    quire:eviction_idle_seconds{reason}, quire:eviction_age_seconds{reason}   histograms of the same blocks
    quire:reuse_gap_seconds                  histogram

Each server has one registry. With several tenants, each tenant has a registry of its own requests as well; a tenant
sees those figures, and none of the cache's or the engine's, which would tell of other tenants. The engine's counts
are read at a scrape. Cost: about 20 us for a request, nothing for a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from quire.server.api_keys import name_of_owner

if TYPE_CHECKING:
    from quire.scheduler.request import RequestOutput

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# Key of `LLM.stats` -> (metric, help).
_COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Preemptions."),
    "copied_blocks": ("quire:copied_blocks", "Blocks copied on write."),
    "deduplicated_blocks": (
        "quire:deduplicated_blocks",
        "Blocks whose content was already cached at commit.",
    ),
    "evicted_checkpoints": ("quire:evicted_checkpoints", "Evicted checkpoints of states."),
    "slots_from_blocks": ("quire:slots_from_blocks", "State slots made of blocks."),
    "slots_to_blocks": ("quire:slots_to_blocks", "State slots whose memory became blocks."),
    "short_hits": (
        "quire:short_hits",
        "Prompts whose hit ended before their keys and values did, for lack of a state.",
    ),
    "num_steps": ("quire:steps", "Steps of the engine."),
    "num_prompt_tokens": ("vllm:prompt_tokens", "Tokens of prompts whose prefill began."),
    "num_generated_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "num_cached_tokens": ("quire:cached_prompt_tokens", "Tokens of prompts found in the cache."),
    "num_computed_tokens": ("quire:computed_tokens", "Tokens whose keys and values were computed."),
    "num_withheld_tokens": (
        "quire:withheld_prompt_tokens",
        "Tokens of long prompts that waited for later steps, although a step had room for them.",
    ),
    "num_known_text_characters": (
        "quire:known_text_characters",
        "Characters of long prompts whose tokens were known from an earlier text.",
    ),
    "num_verified_tokens": ("quire:verified_tokens", "Tokens of hits computed again and compared."),
    "num_drafts": ("vllm:spec_decode_num_drafts", "Sequences that had draft tokens, counted each step."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Draft tokens."),
    "num_accepted_tokens": (
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that equalled the drawn token.",
    ),
    "num_peer_values": ("quire:peer_values", "Segments given to peers."),
    "peer_sent_bytes": ("quire:peer_sent_bytes", "Bytes of segments given to peers."),
    "num_refused_peers": ("quire:refused_peers", "Connections of peers without the secret, or too many."),
    "num_swapped": ("quire:swapped", "Preempted sequences whose bytes were copied out."),
    "num_restored_tokens": (
        "quire:restored_tokens",
        "Tokens of swapped out sequences that were copied back.",
    ),
}
_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences in the running batch."),
    "num_waiting": ("vllm:num_requests_waiting", "Waiting sequences."),
    "free": ("quire:free_blocks", "Blocks without known content."),
    "cached": ("quire:cached_blocks", "Unreferenced blocks with known content."),
    "held": ("quire:held_blocks", "Blocks that sequences refer to."),
    "pinned": ("quire:pinned_blocks", "Blocks that pins refer to."),
    "state_slots": ("quire:state_slots", "Slots for states of recurrent layers."),
    "free_state_slots": ("quire:free_state_slots", "Free state slots."),
    "draft_slots": ("quire:draft_slots", "State slots set aside for drafts."),
    "checkpoints": ("quire:checkpoints", "State slots with a checkpoint that a later prompt may start from."),
    "kv_memory_bytes": ("quire:kv_memory_bytes", "Memory the cache may have."),
    "kv_committed_bytes": ("quire:kv_committed_bytes", "Memory the cache has taken from the system."),
    "swapped_bytes": ("quire:swapped_bytes", "Host memory that swapped out sequences take."),
    "kept_score_bytes": ("quire:kept_score_bytes", "Host memory that kept scores of tokens take."),
    "num_loading": ("quire:num_requests_loading", "Sequences whose prefix comes from a tier."),
}
# Each tier's, under `quire:tier_...`.
_TIER_COUNTERS = {
    "hits": "Segments loaded from it.",
    "misses": "Segments looked up that it had not, or not whole.",
    "loaded_bytes": "Bytes of keys and values loaded from it.",
    "stored": "Segments stored in it.",
    "stored_bytes": "Bytes stored in it.",
    "promoted": "Segments stored in it that came from a lower tier.",
    "evicted": "Segments evicted for want of room.",
    "refused": "Segments that it had no room for.",
    "dropped": "Segments dropped because its queue was full.",
    "damaged": "Segments that failed their check.",
    "failures": "Failed calls.",
    "skipped": "Calls not made while it rested after a failure.",
    "not_asked": "Requests that it was not asked for, because its look-ups take too long.",
    "not_loaded": "Prompts that it had and that were computed, because that was expected to be faster.",
}
_TIER_GAUGES = {
    "segments": "Segments it holds.",
    "bytes": "Bytes it holds.",
    "waiting_bytes": "Bytes queued to be stored in it.",
}
# Each tenant's, under `quire:tenant_...`.
_TENANT_COUNTERS = {
    "computed_tokens": "Tokens computed for it.",
    "passed_by_tokens": "Tokens computed for other tenants in steps in which a sequence of it waited.",
}
# Of sessions: `stats()["sessions"]`.
_SESSION_COUNTERS = {
    "num_superseded_branches": ("quire:superseded_branches", "Branches of sessions that newer turns left."),
    "superseded_blocks": ("quire:superseded_blocks", "Blocks of those that were discarded."),
    "superseded_tokens": ("quire:superseded_tokens", "Tokens of those that were discarded."),
    "num_tool_waits": ("quire:tool_waits", "Answers with calls of tools in sessions."),
    "num_tool_waits_over_share": (
        "quire:tool_waits_over_share",
        "Those among them that were not kept, for want of room in the share for tools.",
    ),
}
_SESSION_GAUGES = {
    "num_sessions": ("quire:sessions", "Sessions that the engine knows."),
    "num_held": ("quire:held_sessions", "Sessions that clients hold."),
    "num_kept_for_tools": ("quire:tool_kept_branches", "Branches of sessions that are kept for their tools."),
    "kept_for_tools_blocks": ("quire:tool_kept_blocks", "Blocks of those."),
}
# Each API key's, under `quire:key_...`.
_KEY_COUNTERS = {
    "read": "Tokens of prompts found in the cache.",
    "written": "Tokens of prompts computed, and cached for other requests.",
    "computed": "Tokens of prompts computed.",
    "generated": "Tokens of answers.",
}
_MAX_KEYS = 1024  # with counts of their own; later ones share the name "other"
_EVICTION_SPANS = {
    "idle": "Time since the last use of blocks at their eviction.",
    "age": "Age of blocks at their eviction.",
}


class Metrics:
    """One server's registry, or one tenant's."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._num_tokens = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "num_generated_tokens": 0}
        self._label = model_name
        self._engine_stats: Mapping[str, Any] = {}
        self.finished = Counter(
            "vllm:request_success",
            "Requests that ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.refused = Counter(
            "quire:refused_requests", "Answers of 429.", ["reason"], registry=self.registry
        )
        self.not_kept = Counter(
            "quire:not_kept",
            "Prompts to pin of which nothing could be pinned.",
            registry=self.registry,
        )
        self.prepared_turns = Counter(
            "quire:prepared_turns", "Next turns of sessions.", ["outcome"], registry=self.registry
        )
        self.prepared_tokens = Counter(
            "quire:prepared_tokens", "Tokens computed for next turns.", registry=self.registry
        )
        self._key_tokens = {
            name: Counter(
                f"quire:key_{name}_tokens", text, ["model_name", "tenant", "key"], registry=self.registry
            )
            for name, text in _KEY_COUNTERS.items()
        }
        self._keys: set[tuple[str, str]] = set()
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token."
        )
        self.request_latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time of each request from its first token to its end, divided by the tokens after the first.",
            _TOKEN_SECONDS,
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From arrival in the engine to the first step."
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token."
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last, of finished requests."
        )
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens of all answers to a prompt.", _TOKENS
        )
        self._longest_answer = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.", _TOKENS
        )
        self.registry.register(self)  # type: ignore[arg-type]

    def record_end(
        self, reason: str, seconds: float, output: RequestOutput | None, num_generated: Collection[int]
    ) -> None:
        """Counts a request that ended `seconds` after its arrival. output: its last one, None without any;
        num_generated: tokens of each answer."""
        self.finished.labels(self._label, reason).inc()
        self.request_latency.observe(seconds)
        if output is None:
            return
        num_prompt, num_all = len(output.prompt_token_ids), sum(num_generated)
        self._num_tokens["num_prompt_tokens"] += num_prompt
        self._num_tokens["num_cached_tokens"] += output.num_cached_tokens
        self._num_tokens["num_generated_tokens"] += num_all
        self._prompt_tokens.observe(num_prompt)
        self._generation_tokens.observe(num_all)
        self._longest_answer.observe(max(num_generated, default=0))
        times = output.timings
        if times.queued_s is not None:
            self._queue_time.observe(times.queued_s)
            if times.time_to_first_token_s is not None:
                self._prefill_time.observe(times.time_to_first_token_s - times.queued_s)
        if times.time_to_first_token_s is not None and times.total_s is not None:
            self._decode_time.observe(times.total_s - times.time_to_first_token_s)

    def record_tokens(
        self, tenant: str, key: str, output: RequestOutput, num_generated: int, *, is_kept: bool
    ) -> None:
        """Counts the tokens of a request by its API key. key: the name of `ApiKey`. is_kept: other requests find the
        computed tokens."""
        if len(self._keys) < _MAX_KEYS:
            self._keys.add((tenant, key))
        elif (tenant, key) not in self._keys:
            key = "other"
        num_computed = len(output.prompt_token_ids) - output.num_cached_tokens
        counts = {
            "read": output.num_cached_tokens,
            "written": num_computed if is_kept else 0,
            "computed": num_computed,
            "generated": num_generated,
        }
        for name, count in counts.items():
            self._key_tokens[name].labels(self._label, tenant, key).inc(count)

    def render(self, engine_stats: Mapping[str, Any] | None = None) -> bytes:
        """The metrics page, with the engine's counts (`LLM.stats`); None: with a tenant's counts of `record_end`."""
        self._engine_stats = self._num_tokens if engine_stats is None else engine_stats
        return generate_latest(self.registry)

    def first_tokens(self) -> tuple[float, float]:
        """(seconds from arrival to the first token, summed; how many) since the start."""
        values = {
            sample.name.rpartition("_")[2]: sample.value
            for sample in next(iter(self.time_to_first_token.collect())).samples
        }
        return values["sum"], values["count"]

    def collect(self) -> Iterator[Any]:
        """The engine's metrics, for the registry."""
        stats = self._engine_stats
        for kind, families in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for key, (name, text) in families.items():
                if key in stats:
                    yield self._family(kind, name, text, stats[key])
        if "num_blocks" in stats:
            usage = (stats["held"] + stats["in_flight"] + stats["pinned"]) / stats["num_blocks"]
            yield self._family(
                GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of blocks in use.", usage
            )
            hits = ("query_tokens", "hit_tokens")
            for key, name in zip(hits, ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"), strict=True):
                yield self._family(
                    CounterMetricFamily, name, "Tokens looked up, and found.", stats.get(key, 0)
                )
        if "num_accepted_by_position" in stats:
            family = CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by their place among the drafts of their step.",
                labels=["model_name", "position"],
            )
            for position, count in enumerate(stats["num_accepted_by_position"]):
                family.add_metric([self._label, str(position)], count)
            yield family
        yield from self._tier_families(stats.get("tiers", {}), stats.get("hit_tokens_by_tier", {}))
        yield from self._eviction_families(stats)
        if by_outcome := stats.get("verified_hits"):
            family = CounterMetricFamily(
                "quire:verified_hits", "Hits computed again and compared.", labels=["model_name", "outcome"]
            )
            for outcome, count in by_outcome.items():
                family.add_metric([self._label, outcome], count)
            yield family
        yield from self._session_families(stats.get("sessions", {}))
        if by_tenant := stats.get("tenants"):
            for name, text in _TENANT_COUNTERS.items():
                family = CounterMetricFamily(f"quire:tenant_{name}", text, labels=["model_name", "tenant"])
                for tenant, counts in by_tenant.items():
                    family.add_metric([self._label, name_of_owner(tenant)], counts[name])
                yield family
        if "num_token_gaps" in stats:
            text = "Between two tokens of a sequence."
            family = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=["model_name"])
            self._add_spans(family, [], stats, "token_gap", stats["num_token_gaps"])
            yield family
        if "num_reuses" in stats:
            text = "Time between two uses of a prefix."
            family = HistogramMetricFamily("quire:reuse_gap_seconds", text, labels=["model_name"])
            self._add_spans(family, [], stats, "reuse_gap", stats["num_reuses"])
            yield family

    def _session_families(self, stats: Mapping[str, Any]) -> Iterator[Any]:
        for kind, families in (
            (CounterMetricFamily, _SESSION_COUNTERS),
            (GaugeMetricFamily, _SESSION_GAUGES),
        ):
            for key, (name, text) in families.items():
                if key in stats:
                    yield self._family(kind, name, text, stats[key])
        if by_action := stats.get("receipts"):
            text = "Answers to commands for the content of sessions."
            labels = ["model_name", "action", "outcome"]
            family = CounterMetricFamily("quire:session_receipts", text, labels=labels)
            for action, counts in by_action.items():
                for outcome, count in counts.items():
                    family.add_metric([self._label, action, outcome], count)
            yield family

    def _eviction_families(self, stats: Mapping[str, Any]) -> Iterator[Any]:
        """Counts of evicted blocks, and histograms of the same blocks, by reason."""
        labels = ["model_name", "reason"]
        by_reason = stats.get("evictions_by_reason", {})
        if "evicted_blocks" in stats:
            text = "Full blocks whose content was evicted."
            family = CounterMetricFamily("quire:evicted_blocks", text, labels=labels)
            counts = {reason: figures["count"] for reason, figures in by_reason.items()}
            for reason, count in (counts or {"space": stats["evicted_blocks"]}).items():
                family.add_metric([self._label, reason], count)
            yield family
        for name, text in _EVICTION_SPANS.items():
            family = HistogramMetricFamily(f"quire:eviction_{name}_seconds", text, labels=labels)
            for reason, figures in by_reason.items():
                self._add_spans(family, [reason], figures, name, figures["count"])
            if by_reason:
                yield family

    def _add_spans(
        self, family: Any, labels: list[str], stats: Mapping[str, Any], key: str, count: int
    ) -> None:
        """Adds the lengths of time under `key` in the stats to a histogram."""
        buckets = [(str(bound), below) for bound, below in stats[f"{key}_below_s"].items()]
        family.add_metric([self._label, *labels], [*buckets, ("+Inf", count)], stats[f"{key}_s"] * count)

    def _tier_families(self, tiers: Mapping[str, Any], hit_tokens: Mapping[str, int]) -> Iterator[Any]:
        labels = ["model_name", "tier"]
        hits = CounterMetricFamily("quire:hit_tokens", "Tokens of prompts found, by tier.", labels=labels)
        for tier, count in hit_tokens.items():
            hits.add_metric([self._label, tier], count)
        if hit_tokens:
            yield hits
        for kind, texts in ((CounterMetricFamily, _TIER_COUNTERS), (GaugeMetricFamily, _TIER_GAUGES)):
            for name, text in texts.items():
                known = {tier: counts[name] for tier, counts in tiers.items() if counts[name] >= 0}
                family = kind(f"quire:tier_{name}", text, labels=labels)
                for tier, value in known.items():
                    family.add_metric([self._label, tier], value)
                if known:
                    yield family

    def _family(self, kind: Any, name: str, text: str, value: float) -> Any:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._label)
