"""The router: equal facts rank equally, bisection finds the longest cached beginning, load bounds affinity."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.cluster.routed_blocks import RecentWork, RoutedBlocks
from quire.cluster.router import ReplicaLoad, RouteCosts, rank_replicas

COSTS = RouteCosts(token_s=0.001, load_s={"host": 0.0001, "disk": 0.0005})
BLOCK = 16


def load(name: str, queue_s: float = 0.0, blocks: dict[int, str] | None = None) -> ReplicaLoad:
    return ReplicaLoad(name, queue_s, 0.0, blocks or {})


def ranked(keys: list[int], *replicas: ReplicaLoad, num_tokens: int | None = None) -> list[str]:
    num_tokens = BLOCK * len(keys) + 1 if num_tokens is None else num_tokens
    return [place.name for place in rank_replicas(keys, num_tokens, BLOCK, replicas, COSTS)]


def plain_work_s(keys: list[int], num_tokens: int, blocks: dict[int, str]) -> tuple[int, float]:
    """The twin: one look at each block."""
    num_cached, seconds = 0, 0.0
    while num_cached < len(keys) and keys[num_cached] in blocks:
        seconds += BLOCK * COSTS.load_s.get(blocks[keys[num_cached]], 0.0)
        num_cached += 1
    return num_cached, seconds + COSTS.token_s * (num_tokens - BLOCK * num_cached)


@pytest.mark.parametrize("seed", range(20))
def test_bisection_finds_what_a_walk_finds(seed: int) -> None:
    generator = random.Random(seed)
    keys = [generator.getrandbits(64) for _ in range(generator.randrange(40))]
    replicas = []
    for number in range(generator.randrange(1, 8)):
        tiers = sorted(generator.choice([0, 1, 2]) for _ in range(generator.randrange(len(keys) + 1)))
        blocks = {key: ("memory", "host", "disk")[tier] for key, tier in zip(keys, tiers, strict=False)}
        replicas.append(load(f"replica-{number}", generator.random(), blocks))
    num_tokens = BLOCK * len(keys) + generator.randrange(1, BLOCK)
    for place in rank_replicas(keys, num_tokens, BLOCK, replicas, COSTS):
        blocks = next(replica.blocks for replica in replicas if replica.name == place.name)
        assert isinstance(blocks, dict)
        assert (place.num_cached_blocks, place.work_s) == pytest.approx(
            plain_work_s(keys, num_tokens, blocks)
        )


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_replicas_changes_nothing(seed: int) -> None:
    generator = random.Random(seed)
    keys = list(range(10))
    replicas = [
        load(
            f"r{number}",
            generator.choice([0.0, 1.0]),
            dict.fromkeys(keys[: generator.randrange(11)], "memory"),
        )
        for number in range(6)
    ]
    first = ranked(keys, *replicas)
    generator.shuffle(replicas)
    assert ranked(keys, *replicas) == first
    assert sorted(first) == sorted(replica.name for replica in replicas)


def test_a_fast_tier_comes_before_a_slow_one_and_both_before_none() -> None:
    keys = list(range(8))
    tiers = {name: load(name, blocks=dict.fromkeys(keys, name)) for name in ("memory", "host", "disk")}
    assert ranked(keys, load("none"), tiers["disk"], tiers["host"], tiers["memory"]) == [
        "memory",
        "host",
        "disk",
        "none",
    ]


def test_a_queue_that_costs_more_than_the_cached_work_ends_affinity() -> None:
    keys = list(range(8))
    saved_s = COSTS.work_weight * COSTS.token_s * BLOCK * len(keys)
    known = dict.fromkeys(keys, "memory")
    assert ranked(keys, load("known", 0.9 * saved_s, known), load("other")) == ["known", "other"]
    assert ranked(keys, load("known", 1.1 * saved_s, known), load("other")) == ["other", "known"]


def test_a_replica_beyond_the_bound_comes_last_whatever_it_has_cached() -> None:
    keys = list(range(100_000))  # worth more than any queue here
    known = dict.fromkeys(keys, "memory")
    others = [load(f"other-{number}", 100.0) for number in range(9)]
    bound_s = 10 * (COSTS.max_load_ratio * 90 + COSTS.spare_queue_s) / (10 - COSTS.max_load_ratio)
    assert ranked(keys, load("known", 0.99 * bound_s, known), *others)[0] == "known"
    assert ranked(keys, load("known", 1.01 * bound_s, known), *others)[-1] == "known"


def test_new_prompts_spread_over_equal_replicas() -> None:
    replicas = [load(f"replica-{number}") for number in range(10)]
    first = [ranked([1 << 40, key], *replicas)[0] for key in range(1000)]
    counts = [first.count(replica.name) for replica in replicas]
    assert min(counts) > 50  # of 100 each


def test_a_shared_first_block_does_not_draw_all_new_prompts_to_one_replica() -> None:
    """Each prompt begins with block 0. Where nothing is busy, a hit of one block is worth little."""
    work = {f"replica-{number}": RecentWork() for number in range(4)}
    known = {name: RoutedBlocks(1e9) for name in work}
    sent = dict.fromkeys(work, 0)
    for number in range(400):
        now = float(number)
        keys = [0, *range(100 * number + 1, 100 * number + 20)]
        replicas = [ReplicaLoad(name, 0.0, work[name].seconds(now), known[name]) for name in work]
        best = rank_replicas(keys, BLOCK * len(keys), BLOCK, replicas, COSTS)[0]
        work[best.name].add(best.work_s, now)
        known[best.name].note_sent(keys, now)
        sent[best.name] += 1
    assert max(sent.values()) <= 1.2 * min(sent.values())


def test_a_prompt_without_a_full_block_goes_to_the_shortest_queue() -> None:
    assert ranked([], load("a", 2.0), load("b", 1.0), load("c", 3.0), num_tokens=5) == ["b", "a", "c"]


def test_a_block_counts_from_its_routing_until_the_digest_has_it_or_the_history_ends() -> None:
    blocks = RoutedBlocks(history_s=2.0)
    blocks.set_digest({1: "disk"})
    blocks.note_sent([1, 2], now=10.0)
    assert (blocks.get(1), blocks.get(2), blocks.get(3)) == ("memory", "memory", None)
    blocks.note_sent([1], now=11.5)
    blocks.expire(13.0)  # the first prompt is forgotten, the second is not
    assert (blocks.get(1), blocks.get(2)) == ("memory", None)
    blocks.expire(14.0)
    assert (blocks.get(1), blocks.get(2)) == ("disk", None)
    blocks.set_digest({2: "memory"})
    assert (blocks.get(1), blocks.get(2)) == (None, "memory")


def test_recent_work_fades() -> None:
    work = RecentWork(window_s=60.0)
    work.add(10.0, now=0.0)
    work.add(10.0, now=60.0)
    assert work.seconds(60.0) == pytest.approx(10.0 + 10.0 / 2.718281828)
    assert work.seconds(6000.0) < 1e-9


def test_the_ranking_takes_the_costs_it_is_given() -> None:
    keys = list(range(8))
    replicas = (load("disk", blocks=dict.fromkeys(keys, "disk")), load("none"))
    slow = replace(COSTS, load_s={"disk": 0.002})  # slower than computing
    assert rank_replicas(keys, 129, BLOCK, replicas, COSTS)[0].name == "disk"
    assert rank_replicas(keys, 129, BLOCK, replicas, slow)[0].name == "none"
