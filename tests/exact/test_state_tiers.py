"""Models with state layers over tiers: states are stored with keys and values, and restored bit for bit.

A restart with a disk cache computes a prompt from its last block boundary; a damaged state, or one without its keys
and values, costs time and no token.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exact.test_states import GREEDY, PROMPTS, answers_of, serve
from support.fake_redis import FakeRedis
from support.state_layers import tiny_model
from support.tiers_case import Clock
from transformers import PreTrainedModel

from quire import LLM
from quire.spec.state_payload import StatePayloadLayout
from quire.tiers.by_url import register, unregister
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.remote.redis_store import RedisStore
from quire.tiers.remote.remote_tier import RemoteTier

LONG = PROMPTS[4]
BLOCK = 4
BOUNDARY = (len(LONG) - 1) // BLOCK * BLOCK


def alone(model: PreTrainedModel, prompt: list[int]) -> Any:
    with serve(model, prefix_caching=False) as llm:
        [one] = answers_of(llm, [prompt])
    return one.token_ids, one.logprobs


def check(llm: LLM, prompt: list[int], num_cached: int, wanted: Any) -> None:
    [output] = llm.generate([prompt], GREEDY)
    [one] = output.outputs
    assert output.num_cached_tokens == num_cached
    assert (one.token_ids, one.logprobs) == wanted
    llm._opened.cache.check()


@pytest.mark.parametrize("name", ["falcon_h1", pytest.param("qwen3_next", marks=pytest.mark.ci)])
def test_after_a_restart_the_same_prompt_goes_on_from_its_state(name: str, tmp_path: Path) -> None:
    pytest.importorskip("quire._native")
    model = tiny_model(name)
    wanted = alone(model, LONG)
    options: dict[str, Any] = {"disk_cache": str(tmp_path), "max_batch_tokens": 64, "cache_write": "through"}
    with serve(model, **options) as llm:
        check(llm, LONG, 0, wanted)
        check(llm, LONG, len(LONG) - 1, wanted)
        assert llm.tiers is not None
        assert llm.tiers.disk is not None
        llm.tiers.stack.flush(10)
        # Of a whole segment, which would follow with its last block, this has a part alone.
        assert [entry.info.start + BLOCK for entry in llm.tiers.disk.entries()] == [BOUNDARY]
    with serve(model, **options) as llm:
        check(llm, LONG, BOUNDARY, wanted)
        # What was loaded is a checkpoint of memory's now.
        check(llm, LONG, len(LONG) - 1, wanted)


def test_a_state_larger_than_a_server_is_believed_in_is_kept_on_it() -> None:
    """The start says how large values are: those of states may be larger than any other."""
    pytest.importorskip("quire._native")
    server = FakeRedis(Clock())

    def cautious(url: str) -> RemoteTier:
        return RemoteTier(
            "redis://host",
            max_value_bytes=100,
            make_store=partial(RedisStore, connect=server.connect),
            probe_in_background=False,
        )

    model = tiny_model("falcon_h1")
    wanted = alone(model, LONG)
    register("cautious", cautious)
    try:
        for num_cached in (0, BOUNDARY):
            with serve(model, remote_cache="cautious://", max_batch_tokens=64) as llm:
                check(llm, LONG, num_cached, wanted)
    finally:
        unregister("cautious")


def test_states_evicted_from_slots_come_back_from_the_host() -> None:
    """Many prompts, little memory: the host tier has the states, which gave way. Poison says where none was written."""
    pytest.importorskip("quire._native")
    model = tiny_model("falcon_h1")
    prompts = [[*LONG[i:], *LONG[:i]] for i in range(7)]
    with serve(model, prefix_caching=False) as llm:
        wanted = [(one.token_ids, one.logprobs) for one in answers_of(llm, prompts)]
    with serve(model, kv_memory="192KiB", host_cache="16MiB", max_num_seqs=1, max_batch_tokens=64) as llm:
        num_cached = 0
        for _ in range(2):
            for prompt, answer in zip(prompts, wanted, strict=True):
                [output] = llm.generate([prompt], GREEDY)
                [one] = output.outputs
                assert (one.token_ids, one.logprobs) == answer
                num_cached = output.num_cached_tokens
            llm.flush()
        stats = llm.stats()
        assert stats["evicted_checkpoints"] > 0
        assert stats["hit_tokens_by_tier"]["host"] > 0
        assert num_cached >= BOUNDARY
        llm._opened.cache.check()


@pytest.mark.ci
def test_a_state_that_is_gone_or_damaged_costs_time_alone(tmp_path: Path) -> None:
    pytest.importorskip("quire._native")
    model = tiny_model("falcon_h1")
    wanted = alone(model, LONG)
    options: dict[str, Any] = {"disk_cache": str(tmp_path), "max_batch_tokens": 64}
    for damaged in (False, True):
        with serve(model, **options) as llm:
            answers_of(llm, [LONG])
            layout = StatePayloadLayout.from_spec(llm.spec)
        tier = DiskTier(str(tmp_path), None)
        states = [entry for entry in tier.entries() if entry.num_bytes > layout.bytes_per_state]
        assert len(states) == 1
        key, info = states[0].key, states[0].info
        value = tier.load(key)
        assert value is not None
        tier.evict(key)
        if damaged:
            tier.store(key, [memoryview(bytes(value[:-1]) + bytes([value[-1] ^ 1]))], info)
        tier.close()
        with serve(model, **options) as llm:
            check(llm, LONG, 0, wanted)
            check(llm, LONG, len(LONG) - 1, wanted)


@pytest.mark.ci
def test_a_snapshot_keeps_its_state(tmp_path: Path) -> None:
    """With priority "keep", and no longer than the snapshot is there."""
    pytest.importorskip("quire._native")
    model = tiny_model("falcon_h1")
    options: dict[str, Any] = {"disk_cache": str(tmp_path), "max_batch_tokens": 64}

    def priorities(llm: LLM) -> set[int]:
        assert llm.tiers is not None
        assert llm.tiers.disk is not None
        return {entry.info.cache_priority for entry in llm.tiers.disk.entries()}

    with serve(model, **options) as llm:
        talk = llm.conversation(LONG)
        talk.generate(GREEDY)
        made = talk.snapshot("talk")
        assert (made.num_tokens, made.num_stored_tokens) == (len(talk.token_ids), BOUNDARY)
        assert priorities(llm) == {2}
        turn = [*talk.token_ids, 11, 12, 13]
    wanted = alone(model, turn)
    with serve(model, **options) as llm:
        talk = llm.resume("talk")
        talk.append([11, 12, 13])
        output = talk.generate(GREEDY)
        [one] = output.outputs
        assert output.num_cached_tokens == BOUNDARY
        assert (one.token_ids, one.logprobs) == wanted
        llm.remove_snapshot("talk")
        assert priorities(llm) == {1}


def test_a_demoted_session_goes_on_from_its_state() -> None:
    """Keys, values and a state leave memory together, and come back before the request does."""
    pytest.importorskip("quire._native")
    model = tiny_model("falcon_h1")
    wanted = alone(model, LONG)
    with serve(model, host_cache="16MiB", max_batch_tokens=64) as llm:
        llm.generate([LONG], GREEDY, session="s")
        receipt = llm.sessions.demote("s")
        assert (receipt.outcome, receipt.reason, receipt.tokens["memory"]) == ("accepted", None, 0)
        assert receipt.tokens["host"] >= BOUNDARY
        assert llm.cache.match(LONG).num_tokens == 0
        before = llm.stats()["num_computed_tokens"]
        assert llm.sessions.prefetch("s").tokens["memory"] >= BOUNDARY
        assert llm.stats()["num_computed_tokens"] == before
        check(llm, LONG, BOUNDARY, wanted)
