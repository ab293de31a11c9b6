"""The door's own metrics, and its page: those of all replicas, each sample with the replica's name, and the door's.

Cost: a counter or two for each request; a page parses each replica's page once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = ["FALLBACKS", "PREFILL_OUTCOMES", "RouterMetrics"]

FALLBACKS = {
    "no_tokens": "the prompt's tokens are not known at the door: a suffix, or a model without a tokenizer",
    "unreadable": "the door could not read the body or render the chat; the replica answers it",
    "no_digest": "no replica has reported its size of a block yet",
    "loaded": "the cheapest replica is beyond the bound of a load",
    "queue_full": "Serve passed over the best replica, which took no more requests or was gone",
}

PREFILL_OUTCOMES = {
    "computed": "a prefill replica has computed it",
    "refused": "the prefill replica refused it",
    "lost": "the prefill replica was lost, or hung",
    "late": "it took too long, and was ended there",
    "absent": "no prefill replica runs, or all hang",
}


class RouterMetrics:
    """`render` gives the page. Counters have the label `replica`, `reason` (`FALLBACKS`) or `outcome`
    (`PREFILL_OUTCOMES`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by_replica = ["replica"]
        self.requests = self._counter("requests", "Requests sent to a replica.", by_replica)
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts whose tokens the door knew.", by_replica
        )
        self.predicted_tokens = self._counter(
            "predicted_hit_tokens", "Tokens of those prompts that the replica was taken to have.", by_replica
        )
        self.hit_tokens = self._counter(
            "hit_tokens", "Tokens of those prompts that the replica found.", by_replica
        )
        self.fallbacks = self._counter(
            "fallbacks", "Requests routed without all facts, by reason.", ["reason"]
        )
        for reason in FALLBACKS:
            self.fallbacks.labels(reason)
        self.retries = self._counter(
            "retries", "Requests sent to another replica because theirs was lost.", []
        )
        self.broken = self._counter(
            "broken_streams", "Streams that ended with an error because their replica was lost.", []
        )
        self.continued = self._counter(
            "continued_streams", "Streams that went on at another replica because theirs was lost.", []
        )
        self.prefills = self._counter(
            "prefills",
            "Prompts for a prefill replica, by outcome.",
            ["outcome"],
        )
        for outcome in PREFILL_OUTCOMES:
            self.prefills.labels(outcome)
        self.digest_age = Gauge(
            "quire:router_digest_age_seconds",
            "Time since the replica's newest digest.",
            by_replica,
            registry=self.registry,
        )
        self.num_replicas = Gauge("quire:router_replicas", "Running replicas.", registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"quire:router_{name}", text, labels, registry=self.registry)

    def count_sent(self, replica: str, num_tokens: int, num_predicted: int) -> None:
        """Counts a request. num_tokens: of its prompt, 0 where they are not known."""
        self.requests.labels(replica).inc()
        self.prompt_tokens.labels(replica).inc(num_tokens)
        self.predicted_tokens.labels(replica).inc(num_predicted)

    def forget(self, replica: str) -> None:
        """Drops the age of a replica that has gone; its counts stay."""
        with suppress(KeyError):
            self.digest_age.remove(replica)

    def render(self, pages: Mapping[str, str], digest_ages: Mapping[str, float]) -> bytes:
        """The page. pages: of the replicas, by name."""
        self.num_replicas.set(len(pages))
        for replica, age_s in digest_ages.items():
            self.digest_age.labels(replica).set(age_s)
        merged = CollectorRegistry()
        merged.register(_ReplicaPages(pages))
        return generate_latest(self.registry) + generate_latest(merged)


class _ReplicaPages(Collector):
    """The families of several pages, each sample with the label `replica`."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        yield from merged.values()
