"""What Prometheus scrapes: the names that vLLM's users know, with `quire:` for what is ours.

    vllm:num_requests_running, _waiting      gauges, now
    vllm:kv_cache_usage_perc                 share of the blocks in use, 0 to 1
    vllm:prompt_tokens_total, vllm:generation_tokens_total
    vllm:prefix_cache_queries_total, _hits_total      tokens of prompts, and those found in the cache
    vllm:num_preemptions_total
    vllm:request_success_total{finished_reason}
    vllm:time_to_first_token_seconds, vllm:e2e_request_latency_seconds, vllm:request_time_per_output_token_seconds
    quire:...                                the cache's and the engine's other counts

Each server has a registry of its own; counts of the engine are read when scraped. Cost: nothing for a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

# Ours -> (name, help) of counts since the start and of figures now.
_COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Preemptions."),
    "evicted_blocks": ("quire:evicted_blocks", "Blocks whose content was given up."),
    "copied_blocks": ("quire:copied_blocks", "Blocks copied on write."),
    "deduplicated_blocks": ("quire:deduplicated_blocks", "Blocks found to be there already at commit."),
    "num_steps": ("quire:steps", "Steps of the engine."),
    "num_prompt_tokens": ("vllm:prompt_tokens", "Tokens of prompts that were begun."),
    "num_generated_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "num_cached_tokens": ("quire:cached_prompt_tokens", "Tokens of prompts found in the cache."),
    "num_computed_tokens": ("quire:computed_tokens", "Tokens whose keys and values were computed."),
}
_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences in the running batch."),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences that wait."),
    "free": ("quire:free_blocks", "Blocks without known content."),
    "cached": ("quire:cached_blocks", "Blocks with known content that nobody refers to."),
    "held": ("quire:held_blocks", "Blocks that sequences refer to."),
    "pinned": ("quire:pinned_blocks", "Blocks that pins refer to."),
    "kv_memory_bytes": ("quire:kv_memory_bytes", "Memory the cache may have."),
    "kv_committed_bytes": ("quire:kv_committed_bytes", "Memory the cache has taken from the system."),
}


class Metrics:
    """One server's registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
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
            "quire:not_kept", "Prompts with keep_for for which there was no room.", registry=self.registry
        )
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token."
        )
        self.request_latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Of each request, from its first token to its end, by tokens after the first.",
            _TOKEN_SECONDS,
        )
        self.registry.register(self)  # type: ignore[arg-type]

    def ended(self, reason: str) -> None:
        """A request has."""
        self.finished.labels(self._label, reason).inc()

    def render(self, engine_stats: Mapping[str, Any]) -> bytes:
        """The page, with the engine's counts as given (`LLM.stats`)."""
        self._engine_stats = engine_stats
        return generate_latest(self.registry)

    def first_tokens(self) -> tuple[float, float]:
        """(seconds from arrival to the first token, summed; how many) since the start."""
        values = {
            sample.name.rpartition("_")[2]: sample.value
            for sample in next(iter(self.time_to_first_token.collect())).samples
        }
        return values["sum"], values["count"]

    def collect(self) -> Iterator[Any]:
        """The engine's part, for the registry."""
        stats = self._engine_stats
        for key, (name, text) in _COUNTERS.items():
            if key in stats:
                yield self._family(CounterMetricFamily, name, text, stats[key])
        for key, (name, text) in _GAUGES.items():
            if key in stats:
                yield self._family(GaugeMetricFamily, name, text, stats[key])
        if stats:
            usage = (stats["held"] + stats["leased"] + stats["pinned"]) / stats["num_blocks"]
            yield self._family(
                GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of blocks in use.", usage
            )
            hits = ("query_tokens", "hit_tokens")
            for key, name in zip(hits, ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"), strict=True):
                yield self._family(
                    CounterMetricFamily, name, "Tokens looked up, and found.", stats.get(key, 0)
                )

    def _family(self, kind: Any, name: str, text: str, value: float) -> Any:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._label)
