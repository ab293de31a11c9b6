"""Metrics of the tiers: the figures of `LLM.stats`, under documented names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from support import tiny_llm
from support.damage import verify

from quire import SamplingParams
from quire.cli.generate import figures as figures_of_command
from quire.server.metrics import Metrics

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
DOCS = Path(__file__).parents[2] / "docs" / "server.md"


def figures(page: bytes) -> dict[str, dict[str, float]]:
    """By name, of what has a tier; "" where it has none."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels.get("tier", "")] = sample.value
    return found


def test_every_tier_is_told_of_as_the_stats_do(tmp_path: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(5, 90, 100).tolist() for seed in range(8)]
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "host_cache": "256KiB"}
    with tiny_llm.llm(kv_memory="192KiB", cache_write="through", **options) as llm:
        hits = {"memory": 0, "host": 0, "disk": 0}
        for prompt in [*prompts, prompts[-1], "forget", prompts[-1], *prompts]:
            if prompt == "forget":  # in memory only: the next one is in the host tier, as the newest there
                llm.cache.drop([])
                continue
            [output] = llm.generate([prompt], ONE)
            for tier, count in output.num_tier_tokens.items():
                hits[tier] += count
            hits["memory"] += output.num_cached_tokens - sum(output.num_tier_tokens.values())
            llm.tiers.stack.flush()  # type: ignore[union-attr]
        stats = llm.stats()
        report = llm.monitor.report()
    assert stats["hit_tokens_by_tier"] == hits
    assert all(hits.values())
    tiers = stats["tiers"]
    assert list(tiers) == ["host", "disk"]
    for tier in tiers.values():
        assert tier["hits"] > 0
        assert tier["stored_bytes"] > 0
        assert tier["failures"] == 0
    assert tiers["host"]["evicted"] > 0
    page = figures(Metrics("tiny").render(stats))
    assert page["quire:hit_tokens_total"] == hits
    counters = ("hits", "misses", "loaded_bytes", "stored", "stored_bytes", "promoted", "evicted", "refused")
    counters += ("dropped", "damaged", "failures", "skipped", "not_asked", "not_loaded")
    for name in counters:
        assert page[f"quire:tier_{name}_total"] == {tier: tiers[tier][name] for tier in tiers}
    for name in ("segments", "bytes", "waiting_bytes"):
        assert page[f"quire:tier_{name}"] == {tier: tiers[tier][name] for tier in tiers}
    assert stats["num_evictions"] == stats["evicted_blocks"] > 0
    assert 0 <= stats["eviction_idle_s"] <= stats["eviction_age_s"]
    assert re.search(r"^host +\d+ .* 0 +0$", report, re.MULTILINE)
    told = DOCS.read_text()
    for name in page:
        shown = re.sub(r"_(bucket|sum|count|created)$", "", name)
        assert not shown.startswith("quire:") or shown in told, f"{shown} is in no table of docs/server.md"


def test_a_tier_that_cannot_say_what_it_holds_is_left_out() -> None:
    counts = dict.fromkeys(
        ("hits", "misses", "loaded_bytes", "stored", "stored_bytes", "promoted", "evicted", "refused", "dropped",
         "damaged", "failures", "skipped", "not_asked", "not_loaded", "waiting_bytes"), 3
    ) | {"segments": -1, "bytes": -1}  # fmt: skip
    stats = {"tiers": {"remote": counts}, "held": 0, "in_flight": 0, "pinned": 0, "num_blocks": 1}
    page = figures(Metrics("tiny").render(stats))
    assert page["quire:tier_failures_total"] == {"remote": 3}
    assert "quire:tier_bytes" not in page


def test_verified_hits_are_told_by_outcome() -> None:
    prompt = np.random.default_rng(1).integers(5, 90, 100).tolist()
    with tiny_llm.llm(verify_hits=1) as llm:
        for _ in range(3):
            llm.generate([prompt], ONE)
            verify(llm)
        stats = llm.stats()
    page = Metrics("tiny").render(stats).decode()
    assert 'quire:verified_hits_total{model_name="tiny",outcome="equal"} 2.0' in page
    assert 'quire:verified_hits_total{model_name="tiny",outcome="different"} 0.0' in page
    assert f'quire:verified_tokens_total{{model_name="tiny"}} {2.0 * 99}' in page
    assert figures_of_command(stats)["hits verified"] == "2 equal"
    assert "quire:verified_hits_total{outcome}" in DOCS.read_text()


def test_drafts_have_the_names_of_vllms_dashboards() -> None:
    stats = {
        "num_drafts": 4,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 5,
        "num_accepted_by_position": [3, 2],
    }
    page = Metrics("tiny").render(stats)
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found[sample.name + sample.labels.get("position", "")] = sample.value
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    assert [found[f"vllm:spec_decode_{name}"] for name in names] == [4, 9, 5]
    assert [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{at}"] for at in (0, 1)] == [3, 2]
    assert b"spec_decode" not in Metrics("tiny").render({"num_preemptions": 0})
