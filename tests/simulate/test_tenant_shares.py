"""Shares of tenants that compete, by the real scheduler over a runner without a model: computed tokens by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from quire.cache.cache import Cache
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.sampling.params import SamplingParams
from quire.scheduler.client_fairness import WINDOW_TOKENS
from quire.scheduler.request import RequestSequence
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import ServedModel
from quire.spec import KVSpec
from quire.step import Batch

VOCAB = 1 << 20


class CountingRunner:
    """Counts the computed tokens by tenant; every token is 0."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def run(self, step: Batch[RequestSequence], /) -> np.ndarray:
        import torch

        for sequence, n in zip(step.sequences, step.num_new_tokens.tolist(), strict=True):
            self.counts[sequence.request.tenant or ""] += n
        return torch.zeros((len(step.logit_rows), 2))  # type: ignore[return-value]


class Competition:
    """Tenants that always have requests waiting. shapes: (prompt, answer) tokens of each tenant's requests."""

    def __init__(
        self,
        weights: Mapping[str, float],
        shapes: Mapping[str, tuple[int, int]],
        *,
        num_blocks: int = 8192,
        **limits: int,
    ) -> None:
        spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1)
        self.cache = Cache(spec, num_blocks=num_blocks, block_size=16)
        self.runner = CountingRunner()
        self.engine = Engine(
            EngineParts(self.runner, self.cache),
            ServedModel(VOCAB, 40_000),
            limits=StepLimits(**({"max_batch_tokens": 512} | limits)),
        )
        for name, weight in weights.items():
            self.engine.tenants.add(name, weight=weight)
        self._shapes = shapes
        self._draw = np.random.default_rng(5)

    def step(self, num_waiting: int = 4) -> None:
        """Fills up the queues, and computes a step."""
        waiting = Counter(sequence.request.tenant for sequence in self.engine.scheduler.waiting)
        for tenant, (prompt, answer) in self._shapes.items():
            for _ in range(num_waiting - waiting[tenant]):
                self.engine.submit(
                    self._draw.integers(1, VOCAB, prompt),
                    RequestOptions.of(
                        SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0), tenant=tenant
                    ),
                )
        self.engine.step()

    def tokens_of(self, num_tokens: int) -> Counter[str]:
        """The tokens that each tenant gets of the next `num_tokens`."""
        before = self.runner.counts.copy()
        while (self.runner.counts - before).total() < num_tokens:
            self.step()
        return self.runner.counts - before


SHAPES = {
    "equal requests": {"a": (200, 20), "b": (200, 20), "c": (200, 20)},
    "long prompts against short ones": {"a": (6000, 4), "b": (60, 30), "c": (300, 4)},
    "the heaviest has the longest": {"a": (60, 10), "b": (300, 4), "c": (6000, 4)},
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "weights", [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 4}], ids=["even", "1:2:4"]
)
@pytest.mark.parametrize("limits", [{}, {"long_prefill_tokens": 256}, {"num_blocks": 1200}], ids=str)
def test_no_tenant_is_below_nine_tenths_of_its_share(
    shapes: dict[str, tuple[int, int]], weights: dict[str, float], limits: dict[str, int]
) -> None:
    competition = Competition(weights, shapes, **limits)
    competition.tokens_of(2 * WINDOW_TOKENS)
    for _ in range(4):
        counts = competition.tokens_of(2 * WINDOW_TOKENS)
        for tenant, weight in weights.items():
            share = counts.total() * weight / sum(weights.values())
            assert counts[tenant] >= 0.9 * share, (tenant, counts)


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 1, "b": 3}], ids=["even", "1:3"])
def test_tenants_share_the_places_of_a_full_batch(weights: dict[str, float]) -> None:
    shapes = {"a": (100, 10), "b": (100, 10)}
    competition = Competition(weights, shapes, max_num_seqs=8)
    competition.tokens_of(2 * WINDOW_TOKENS)
    counts = competition.tokens_of(2 * WINDOW_TOKENS)
    for tenant, weight in weights.items():
        assert counts[tenant] >= 0.9 * counts.total() * weight / sum(weights.values())


def test_a_tenant_that_asks_for_less_than_its_share_waits_for_no_other() -> None:
    competition = Competition({"a": 1, "b": 1}, {"a": (2000, 10)})
    competition.tokens_of(2 * WINDOW_TOKENS)
    for _ in range(20):
        small = competition.engine.submit(
            competition._draw.integers(1, VOCAB, 40),
            RequestOptions.of(SamplingParams(max_tokens=1), tenant="b"),
        )
        competition.step()
        assert small not in competition.engine.scheduler.requests


def test_a_tenant_alone_has_everything_and_the_cost_to_others_is_counted() -> None:
    competition = Competition({"a": 1, "b": 3}, {"a": (400, 10)})
    assert competition.tokens_of(4000) == {"a": competition.runner.counts["a"]}
    alone = competition.engine.stats()["tenants"]
    assert alone["a"] == {"computed_tokens": competition.runner.counts["a"], "passed_by_tokens": 0}
    competition._shapes = {"a": (400, 10), "b": (400, 10)}
    counts = competition.tokens_of(4 * WINDOW_TOKENS)
    stats = competition.engine.stats()["tenants"]
    assert {tenant: stats[tenant]["computed_tokens"] for tenant in "ab"} == competition.runner.counts
    assert stats["a"]["passed_by_tokens"] > 0.9 * counts["b"], "b's tokens are a's cost"
    assert 0 < stats["b"]["passed_by_tokens"] < counts["a"] + 1
