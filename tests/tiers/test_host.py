"""The host tier: its limit at every moment, its order of eviction, values that stay valid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers_case import ROOT, SegmentKey, chain

from quire.errors import ArgumentError
from quire.tiers.host import HostTier
from quire.tiers.tier import SegmentInfo


def info(parent: bytes = ROOT, cache_priority: int = 1) -> SegmentInfo:
    return SegmentInfo(ROOT, parent, 0, b"", (), cache_priority)


def parts(num_bytes: int, fill: int = 0) -> list[memoryview]:
    whole = memoryview(bytes([fill]) * num_bytes)
    return [whole[: num_bytes // 3], whole[num_bytes // 3 :]]


def store(tier: HostTier, name: SegmentKey, num_bytes: int = 10, cache_priority: int = 1) -> bool:
    return tier.store(name.hash, parts(num_bytes, name.hash[0]), name.info(cache_priority=cache_priority))


def there(tier: HostTier, names: list[SegmentKey]) -> list[bool]:
    return tier.contains([name.hash for name in names])


def test_gives_what_it_was_given() -> None:
    tier = HostTier(100)
    assert tier.store(b"a", [memoryview(b"one"), memoryview(b""), memoryview(b"two")], info())
    loaded = tier.load(b"a")
    assert loaded is not None
    assert bytes(loaded) == b"onetwo"
    assert loaded.readonly
    assert tier.load(b"b") is None
    assert (tier.stats().hits, tier.stats().misses, tier.stats().num_bytes) == (1, 1, 6)


def test_a_value_loaded_outlives_its_eviction() -> None:
    tier = HostTier(10)
    tier.store(b"a", parts(10, 7), info())
    loaded = tier.load(b"a")
    assert loaded is not None
    tier.store(b"b", parts(10, 8), info())
    assert tier.contains([b"a", b"b"]) == [False, True]
    tier.close()
    assert bytes(loaded) == bytes([7]) * 10


def test_gives_back_as_much_as_is_asked_for_whatever_its_cache_priority() -> None:
    tier, names = HostTier(100), chain(4)
    gone: list[tuple[list[bytes], str]] = []
    tier.on_removed = lambda keys, reason: gone.append((list(keys), reason))
    for name in names:
        assert store(tier, name, cache_priority=2)
    assert tier.evict_bytes(0) == 0
    assert tier.evict_bytes(11) == 20
    assert there(tier, names) == [True, True, False, False], "tails first"
    assert gone == [([names[3].hash, names[2].hash], "evicted")]
    assert (tier.stats().num_bytes, tier.stats().evicted, tier.max_bytes) == (20, 2, 100)
    assert tier.evict_bytes(1000) == 20
    assert tier.evict_bytes(1000) == tier.stats().num_bytes == 0
    assert store(tier, names[0])


def test_used_longest_ago_goes_first() -> None:
    tier = HostTier(30)
    for key in (b"a", b"b", b"c"):
        tier.store(key, parts(10), info())
    tier.load(b"a")
    tier.contains([b"b"])  # is no use
    tier.store(b"d", parts(10), info())
    assert tier.contains([b"a", b"b", b"c", b"d"]) == [True, False, True, True]
    tier.store(b"c", parts(10), info())  # refreshes
    tier.store(b"e", parts(10), info())
    assert tier.contains([b"a", b"c", b"d", b"e"]) == [False, True, True, True]


def test_lower_cache_priority_goes_first_and_never_displaces_higher() -> None:
    tier = HostTier(30)
    tier.store(b"keep", parts(10), info(cache_priority=2))
    tier.store(b"normal", parts(10), info(cache_priority=1))
    tier.store(b"discard", parts(10), info(cache_priority=0))
    assert tier.store(b"new", parts(10), info(cache_priority=1))
    assert tier.contains([b"keep", b"normal", b"discard"]) == [True, True, False]
    assert not tier.store(b"late", parts(10), info(cache_priority=0))
    assert tier.contains([b"keep", b"normal", b"new"]) == [True] * 3
    assert tier.stats().evicted == 1


def test_a_chain_loses_its_tail_first_though_its_head_is_older() -> None:
    tier = HostTier(50)
    long, other = chain(4), chain(2, 1)
    for name in long:
        store(tier, name)
    for name in long:  # the head is used first, and so longest ago
        tier.load(name.hash)
    store(tier, other[0])
    store(tier, other[1])
    assert there(tier, long) == [True, True, True, False]
    tier.load(long[2].hash)
    store(tier, chain(1, 2)[0])
    assert there(tier, long) == [True, True, True, False]  # the other chain's tail was older
    assert there(tier, other) == [True, False]


def test_nothing_goes_for_what_continues_it() -> None:
    tier = HostTier(30)
    names = chain(4)
    assert [store(tier, name) for name in names] == [True, True, True, False]
    assert there(tier, names) == [True, True, True, False]


def test_larger_than_the_cap_is_refused_and_changes_nothing() -> None:
    tier = HostTier(30)
    tier.store(b"a", parts(10), info())
    assert not tier.store(b"b", parts(31), info())
    assert tier.contains([b"a", b"b"]) == [True, False]
    assert not HostTier(0).store(b"a", parts(1), info())


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected max_bytes of 0 or more for the host tier, got -1"):
        HostTier(-1)


CHAINS = [chain(4, first) for first in range(3)]
NAMES = [name for names in CHAINS for name in names]


@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(
            st.sampled_from(["store", "load", "evict"]),
            st.integers(0, len(NAMES) - 1),
            st.integers(1, 25),
            st.integers(0, 2),
        ),
        max_size=60,
    ),
)
def test_goes_by_the_order_that_a_plain_search_finds(
    cap: int, operations: list[tuple[str, int, int, int]]
) -> None:
    """Beside a model that looks through everything: the leaf of the lowest cache priority that was used longest ago."""
    tier = HostTier(cap)
    model: dict[bytes, tuple[int, int, int, bytes]] = {}  # size, cache priority, used, parent
    for now, (operation, which, size, cache_priority) in enumerate(operations):
        name = NAMES[which]
        known = model.get(name.hash)
        if operation == "evict":
            assert tier.evict(name.hash) == (model.pop(name.hash, None) is not None)
        elif operation == "load":
            value = tier.load(name.hash)
            assert (value is not None) == (known is not None)
            if known is not None and value is not None:
                assert value.nbytes == known[0]
                model[name.hash] = (known[0], known[1], now, known[3])
        elif known is not None:
            assert store(tier, name, size, cache_priority)
            model[name.hash] = (known[0], max(known[1], cache_priority), now, known[3])
        else:
            fits = size <= cap
            while fits and sum(entry[0] for entry in model.values()) + size > cap:
                parents = {entry[3] for entry in model.values()} | {name.parent}
                leaves = [
                    (entry[1], entry[2], key)
                    for key, entry in model.items()
                    if key not in parents and entry[1] <= cache_priority
                ]
                fits = bool(leaves)
                if leaves:
                    del model[min(leaves)[2]]
            assert store(tier, name, size, cache_priority) == fits
            if fits:
                model[name.hash] = (size, cache_priority, now, name.parent)
        assert there(tier, NAMES) == [name.hash in model for name in NAMES]
        stats = tier.stats()
        assert (stats.num_values, stats.num_bytes) == (
            len(model),
            sum(entry[0] for entry in model.values()),
        )
        assert stats.num_bytes <= cap


def test_uses_leave_nothing_behind() -> None:
    tier = HostTier(1000)
    for which in range(10):
        tier.store(bytes([which]), parts(10), info())
    for turn in range(10_000):
        tier.load(bytes([turn % 10]))
    assert len(tier._evictable) <= 2 * 10 + 65
