"""`quire plan --replicas --store`: the sums of one replica's plan, and a store's prompts against real segments."""

from __future__ import annotations

import json

import pytest

from quire import LLM, SamplingParams, plan
from quire.cli.main import app
from quire.errors import ArgumentError


def test_replicas_hold_the_sum_of_theirs() -> None:
    options = {"context": 512, "kv_memory": "16MiB", "shared_prefix": 100}
    one = plan(concurrency=5, **options)
    four = plan(concurrency=18, replicas=4, **options)  # at most 5 each
    assert four.cluster is not None
    assert four.concurrency == one.concurrency == 5
    assert four.num_bytes("kv") == one.num_bytes("kv"), "the rows are those of one"
    assert one.cluster is None
    cluster = four.cluster
    assert cluster.max_concurrency == 4 * one.max_concurrency
    assert cluster.kv_bytes == 4 * one.budget_bytes
    assert cluster.total_bytes == 4 * four.total_bytes
    block_bytes = one.budget_bytes // one.num_blocks
    assert cluster.prefix_bytes == 4 * (100 // 16) * block_bytes, "whole blocks, once in each replica"
    assert (cluster.store_bytes, cluster.max_store_prompts) == (0, 0)
    assert four.as_dict()["cluster"]["num_replicas"] == 4
    assert "4 replicas" in four.lines()[-2]
    assert not plan(concurrency=4 * one.max_concurrency + 1, replicas=4, **options).fits
    assert plan(concurrency=4 * one.max_concurrency, replicas=4, **options).fits


def test_a_store_holds_the_prompts_that_its_bytes_give() -> None:
    num_tokens, num_prompts = 256, 4
    with LLM(host_cache="64MiB", cache_write="through", kv_memory="8MiB") as llm:
        prompts = [[number + 1] * num_tokens for number in range(num_prompts)]
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        llm.flush()
        stored_bytes = llm.stats()["tiers"]["host"]["bytes"]
    planned = plan(context=num_tokens, store=stored_bytes).cluster
    assert planned is not None
    assert planned.num_replicas == 1
    assert planned.max_store_prompts == num_prompts


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match="expected an integer of at least 1, got 0 - in `replicas`"):
        plan(replicas=0)
    with pytest.raises(ArgumentError, match=r"expected a size such as .*got 'much' for store"):
        plan(store="much")
    app(["plan", "--context", "64", "--replicas", "2", "--store", "1MiB", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)["cluster"]
    assert (found["num_replicas"], found["store_bytes"]) == (2, 1 << 20)
