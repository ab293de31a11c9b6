"""vLLM's own Grafana dashboard on a Quire server: each panel's figures exist and are right.

The panels and what they ask for are those of examples/observability/prometheus_grafana/grafana.json of vLLM 0.11 on.
"""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import tiny_llm
from support.running_server import running

from quire.server.settings import ServerSettings

# A panel's title, and the samples that its expressions name.
PANELS = {
    "E2E Request Latency": ["e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"],
    "Token Throughput": ["prompt_tokens_total", "generation_tokens_total"],
    "Inter Token Latency": ["inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum"],
    "Scheduler State": ["num_requests_running", "num_requests_waiting"],
    "Time To First Token Latency": ["time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"],
    "Cache Utilization": ["kv_cache_usage_perc"],
    "Request Prompt Length": ["request_prompt_tokens_bucket"],
    "Request Generation Length": ["request_generation_tokens_bucket"],
    "Finish Reason": ["request_success_total"],
    "Queue Time": ["request_queue_time_seconds_sum"],
    "Requests Prefill and Decode Time": [
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
    ],
    "Max Generation Token in Sequence Group": ["request_max_num_generation_tokens_sum"],
}
# Tokens of a prompt, answers to it, and tokens of each: one of all is the prompt's last.
REQUESTS = ((3, 1, 5), (12, 1, 1), (40, 2, 7))


def samples(page: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


@pytest.fixture(scope="module")
def page() -> list[Any]:
    """What is scraped once the requests have been answered, one after another."""
    with (
        tiny_llm.llm(kv_memory="2MiB") as llm,
        running(llm, ServerSettings(served_model_name="m")) as (url, _),
    ):
        for num_prompt, n, num_tokens in REQUESTS:
            prompt = np.random.default_rng(num_prompt).integers(5, 90, num_prompt).tolist()
            body = {"prompt": prompt, "n": n, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        return samples(httpx.get(f"{url}/metrics").text)


@pytest.mark.parametrize("panel", PANELS)
def test_each_panel_has_data(page: list[Any], panel: str) -> None:
    for name in PANELS[panel]:
        found = [one for one in page if one.name == f"vllm:{name}"]
        assert found, f"{name} is not there"
        assert all(one.labels["model_name"] == "m" for one in found)  # the expressions choose by it


def test_the_figures_are_those_of_the_requests(page: list[Any]) -> None:
    values = {one.name.removeprefix("vllm:"): one.value for one in page if "le" not in one.labels}
    num_prompt = sum(prompt for prompt, _, _ in REQUESTS)
    num_generated = sum(n * tokens for _, n, tokens in REQUESTS)
    assert (values["prompt_tokens_total"], values["generation_tokens_total"]) == (num_prompt, num_generated)
    assert (values["request_prompt_tokens_sum"], values["request_generation_tokens_sum"]) == (
        num_prompt,
        num_generated,
    )
    assert values["request_max_num_generation_tokens_sum"] == sum(tokens for _, _, tokens in REQUESTS)
    # Every token of a sequence but its first has one before it.
    assert values["inter_token_latency_seconds_count"] == sum(n * (tokens - 1) for _, n, tokens in REQUESTS)
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
                 "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                 "e2e_request_latency_seconds", "time_to_first_token_seconds"):  # fmt: skip
        assert values[f"{name}_count"] == len(REQUESTS), name
    assert values["request_success_total"] == len(REQUESTS)
    assert (
        values["num_requests_running"],
        values["num_requests_waiting"],
        values["kv_cache_usage_perc"],
    ) == (0, 0, 0)
    parts = sum(values[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= values["e2e_request_latency_seconds_sum"]
    assert values["inter_token_latency_seconds_sum"] > 0


def test_lengths_lie_in_their_buckets(page: list[Any]) -> None:
    def below(name: str, bound: float) -> float:
        (found,) = (
            one.value
            for one in page
            if one.name == f"vllm:{name}_bucket" and float(one.labels["le"]) == bound
        )
        return found

    assert [below("request_prompt_tokens", bound) for bound in (2, 5, 20, 50)] == [0, 1, 2, 3]
    assert [below("request_generation_tokens", bound) for bound in (1, 5, 10, 20)] == [1, 2, 2, 3]
    gaps = [one for one in page if one.name == "vllm:inter_token_latency_seconds_bucket"]
    assert [one.value for one in gaps] == sorted(one.value for one in gaps)
    assert gaps[-1].labels["le"] == "+Inf"
