"""A digest follows events: fastest tiers, the same object without a change, parents first; against a twin of sets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.cluster.block_digest import BlockDigest, unpacked_digest
from quire.observe.event_types import AllBlocksCleared, BlockRemoved, BlockStored
from quire.observe.kv_events import MEDIA, MEDIUM, EventBatch

TIERS = {MEDIUM: "memory", **{medium: tier for tier, medium in MEDIA.items()}}


def stored(*keys: int, medium: str = MEDIUM) -> BlockStored:
    return BlockStored(keys, None, (), 16, "", (), medium)


def removed(*keys: int, medium: str = MEDIUM) -> BlockRemoved:
    return BlockRemoved(keys, "", "evicted", medium)


def content(digest: BlockDigest) -> dict[int, str]:
    return unpacked_digest(digest.snapshot().keys_by_tier)


def take(digest: BlockDigest, *events: Any) -> None:
    digest(EventBatch(0.0, events))


def test_the_fastest_tier_counts_until_it_loses_the_block() -> None:
    digest = BlockDigest()
    take(
        digest,
        stored(1, 2),
        stored(1, medium="DISK"),
        stored(2, medium="REMOTE"),
        stored(2, medium="CPU_TIER1"),
    )
    assert content(digest) == {1: "memory", 2: "memory"}
    take(digest, removed(1, 2))
    assert content(digest) == {1: "disk", 2: "host"}
    take(digest, removed(2, medium="CPU_TIER1"), AllBlocksCleared("DISK"))
    assert content(digest) == {2: "remote"}
    take(digest, AllBlocksCleared(None))
    assert content(digest) == {}


def test_a_snapshot_is_the_same_object_until_a_change() -> None:
    digest = BlockDigest()
    first = digest.snapshot()
    assert digest.snapshot() is first
    take(digest, stored(2**64 - 1))
    assert digest.snapshot() is not first
    assert content(digest) == {2**64 - 1: "memory"}


def test_a_full_digest_has_the_oldest_blocks_with_their_parents() -> None:
    digest = BlockDigest(max_blocks=3)
    take(digest, stored(*range(10, 15)))
    assert list(content(digest)) == [10, 11, 12]
    take(digest, removed(12))
    assert list(content(digest)) == [10, 11, 13]


@pytest.mark.parametrize("seed", range(5))
def test_it_equals_sets_of_keys_by_medium(seed: int) -> None:
    chance = random.Random(seed)
    digest, twin = BlockDigest(), {medium: set() for medium in TIERS}
    for _ in range(300):
        medium, keys = chance.choice(list(TIERS)), chance.sample(range(30), 4)
        kind = chance.choice(
            ["stored", "stored", "removed", "cleared" if chance.random() < 0.05 else "removed"]
        )
        if kind == "stored":
            take(digest, stored(*keys, medium=medium))
            twin[medium] |= set(keys)
        elif kind == "removed":
            take(digest, removed(*keys, medium=medium))
            twin[medium] -= set(keys)
        else:
            take(digest, AllBlocksCleared(medium))
            twin[medium].clear()
        fastest = {key: TIERS[medium] for medium in reversed(TIERS) for key in twin[medium]}
        assert content(digest) == fastest
