"""The disk tier: its content, its order of eviction, its use of the disk, and its recovery at opening."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from support.cache_case import BACKENDS
from support.tier_values import ROOT, SHAPE, Value, chain, value

from quire.cache.block_hash import root_key
from quire.errors import ArgumentError
from quire.tiers.disk.disk_errors import errors_in_use
from quire.tiers.disk.disk_index import DiskIndex
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.disk.files import Buffer, Files
from quire.tiers.segment import decode
from quire.tiers.tier import TierError

CAP = 16 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, CAP)
    yield tier
    tier.check()
    tier.close()


def put(tier: DiskTier, one: Value) -> bool:
    return tier.store(one.key, one.parts, one.info)


def folder_bytes(path: Path) -> int:
    """What the folder takes: the larger of length and blocks of each file."""
    return sum(max(file.stat().st_size, file.stat().st_blocks * 512) for file in path.iterdir())


def test_a_value_comes_back_and_can_be_decoded(tier: DiskTier) -> None:
    one = value(1)
    assert tier.load(one.key) is None
    assert put(tier, one)
    loaded = tier.load(one.key)
    assert loaded is not None
    payload = decode(loaded, key=one.key, tokens=one.tokens, start=0, layout=SHAPE)
    assert np.array_equal(payload, np.frombuffer(one.parts[1], np.uint8))
    stats = tier.stats()
    assert (stats.num_values, stats.stored, stats.hits, stats.misses) == (1, 1, 1, 1)


def test_a_value_outlives_its_eviction_where_it_is_referred_to(tier: DiskTier) -> None:
    one = value(1)
    put(tier, one)
    loaded = tier.load(one.key)
    assert tier.evict(one.key)
    put(tier, value(2))  # in the same pages
    assert loaded == one.whole
    assert not tier.evict(one.key)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 2900])
def test_all_sizes_and_an_empty_value(tier: DiskTier, num_tokens: int) -> None:
    one = value(1, num_tokens)
    assert put(tier, one)
    assert tier.load(one.key) == one.whole
    empty = value(2)
    assert tier.store(empty.key, [], empty.info)
    assert tier.load(empty.key) == b""


def test_what_is_larger_than_a_slab_is_not_kept(tier: DiskTier) -> None:
    one = value(1, 4000)
    assert not put(tier, one)
    assert tier.contains([one.key]) == [False]


def test_contains_takes_any_number_of_keys(tier: DiskTier) -> None:
    values = chain(1, 5)
    for one in values:
        put(tier, one)
    strangers = [bytes([i % 256, i // 256 % 256, i >> 16]) + bytes(29) for i in range(70_000)]
    keys = [one.key for one in values]
    assert tier.contains(keys[:2] + strangers + keys[2:]) == [True] * 2 + [False] * 70_000 + [True] * 3
    assert tier.contains([]) == []


def test_the_tree_comes_back_from_the_index_alone(tmp_path: Path) -> None:
    now = 1000.0
    tier = DiskTier(tmp_path, CAP, clock=lambda: now)
    values = chain(1, 4, owner="ann")
    other = value(9, root=root_key(b"model", b"other"), extra_keys=((2, b"image"),), cache_priority=2)
    for one in [values[2], values[0], other, values[1], values[3]]:  # a child may be there first
        assert put(tier, one)
    tier.describe(ROOT, "a model, float32")
    tier.check()
    now = 2000.0
    tier.load(values[1].key)
    tier.close()
    for slab in tmp_path.glob("slab-*"):
        slab.write_bytes(b"")  # nothing of this needs a value
    again = DiskTier(tmp_path, None)
    found = list(again.entries(ROOT))
    assert [entry.key for entry in found] == [one.key for one in values]
    assert [entry.info for entry in found] == [one.info for one in values]
    assert [entry.num_bytes for entry in found] == [len(one.whole) for one in values]
    assert [entry.used_at for entry in found] == [1000.0, 2000.0, 1000.0, 1000.0]
    assert {entry.made_at for entry in again.entries()} == {1000.0}
    assert [entry.info for entry in again.entries(other.info.root)] == [other.info]
    assert again.chain(values[2].key) == found[:3]
    assert again.chain(bytes(32)) is None
    roots = {root.root: root for root in again.roots()}
    assert roots[ROOT].description == "a model, float32"
    assert (roots[ROOT].num_values, roots[ROOT].num_tokens, roots[ROOT].owners) == (4, 32, ("ann",))
    assert again.max_bytes() == CAP
    again.close()


def fill(
    tier: DiskTier, num_tokens: int = 500, first: int = 100, count: int = 40, cache_priority: int = 1
) -> list[Value]:
    values = [value(first + i, num_tokens, cache_priority=cache_priority) for i in range(count)]
    for one in values:
        put(tier, one)
    return values


def present(tier: DiskTier, values: list[Value]) -> list[int]:
    return [i for i, there in enumerate(tier.contains([one.key for one in values])) if there]


def test_what_was_used_longest_ago_goes_first_and_the_cap_holds(tier: DiskTier, tmp_path: Path) -> None:
    first = fill(tier, count=5)
    tier.load(first[0].key)
    values = fill(tier, first=200, count=40)
    left = present(tier, values)
    assert left == list(range(40 - len(left), 40))
    assert 10 <= len(left) < 40
    assert folder_bytes(tmp_path) <= CAP
    assert tier.usage().total <= CAP
    kept = values[left[0]]
    tier.load(kept.key)
    fill(tier, first=300, count=len(left) - 2)
    assert tier.contains([kept.key]) == [True]
    stats = tier.stats()
    assert stats.stored == 5 + 40 + len(left) - 2
    assert stats.evicted == stats.stored - stats.num_values


def test_a_refused_refresh_and_a_kept_one(tier: DiskTier) -> None:
    one = value(1, 500)
    put(tier, one)
    assert tier.store(one.key, one.parts, one.info)  # a refresh
    assert tier.stats().stored == 1
    fill(tier, count=10)
    assert tier.store(one.key, one.parts, one.info)
    fill(tier, first=200, count=15)
    assert tier.contains([one.key]) == [True]


def test_keep_stays_and_discard_goes_first(tier: DiskTier) -> None:
    kept = fill(tier, count=4, cache_priority=2)
    discarded = fill(tier, first=200, count=4, cache_priority=0)
    fill(tier, first=300, count=10)
    fill(tier, first=400, count=10)
    assert present(tier, kept) == [0, 1, 2, 3]
    assert present(tier, discarded) == []
    full_of_kept = fill(tier, first=500, count=40, cache_priority=2)
    assert not put(tier, value(1, 500))  # all else has to stay
    last = value(2, 500, cache_priority=2)
    assert put(tier, last)
    assert len(present(tier, full_of_kept)) > 10


def test_tails_go_before_their_heads(tier: DiskTier) -> None:
    values = chain(1, 6, 500)
    for one in values:
        put(tier, one)
    lengths = []
    for turn in range(12):
        fill(tier, first=1000 * (turn + 1), count=3)
        left = present(tier, values)
        assert left == list(range(len(left)))  # always a prefix
        lengths.append(len(left))
    assert lengths[0] == 6
    assert lengths[-1] < 3


def test_mixed_sizes_find_room_again_and_again(tier: DiskTier, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(200):
        num_tokens = int(rng.choice([3, 17, 100, 500, 1500, 2500]))
        one = value(i, num_tokens)
        assert put(tier, one)
        assert tier.load(one.key) == one.whole
        if i % 40 == 0:
            tier.check()
            assert folder_bytes(tmp_path) <= CAP
    use = tier.usage()
    assert use.values > use.slabs * 0.6


@pytest.mark.ci
def test_the_index_of_many_small_values_stays_within_the_cap(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAP)
    parts = [memoryview(b"x" * 100)]
    for i in range(1800):
        one = value(i, 1)
        info = one.info.__class__(ROOT, ROOT, 0, bytes(8000))
        assert tier.store(one.key, parts, info)
        if i % 100 == 0:
            assert folder_bytes(tmp_path) <= CAP
    assert tier.stats().evicted > 0
    tier.check()
    tier.close()


def test_a_smaller_cap_shrinks_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 2 * CAP)
    values = fill(tier, count=45)
    tier.close()
    assert folder_bytes(tmp_path) > CAP
    tier = DiskTier(tmp_path, CAP)
    assert folder_bytes(tmp_path) <= CAP
    left = present(tier, values)
    assert len(left) >= 20
    for i in left:
        assert tier.load(values[i].key) == values[i].whole
    assert max(left) == 44
    tier.check()
    fill(tier, first=500)
    assert folder_bytes(tmp_path) <= CAP
    tier.close()


@pytest.mark.parametrize("mebibytes", [14, 9, 5, 4])
def test_prune_gives_the_disk_back(tier: DiskTier, tmp_path: Path, mebibytes: int) -> None:
    values = fill(tier, num_tokens=90, count=120)
    before = present(tier, values)
    removed = tier.prune(mebibytes << 20)
    assert folder_bytes(tmp_path) <= mebibytes << 20
    left = present(tier, values)
    assert removed == len(before) - len(left)
    assert left == before[len(before) - len(left) :]
    assert (len(left) > 0) == (mebibytes > 4)
    for i in left:
        assert tier.load(values[i].key) == values[i].whole


def test_a_clock_that_goes_back_changes_no_order(tmp_path: Path) -> None:
    time = iter(range(10_000, 0, -1))
    tier = DiskTier(tmp_path, CAP, clock=lambda: float(next(time)))
    values = fill(tier)
    left = present(tier, values)
    assert left == list(range(40 - len(left), 40))
    tier.close()


def test_threads_share_it(tier: DiskTier) -> None:
    values = [value(i, 40) for i in range(60)]
    wrong: list[str] = []

    def work(mine: list[Value]) -> None:
        for one in mine:
            if not put(tier, one):
                wrong.append("not kept")
            if tier.load(one.key) != one.whole:
                wrong.append("another value")

    threads = [threading.Thread(target=work, args=(values[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.stats().num_values == 60


def test_more_threads_than_a_batch_takes(tier: DiskTier) -> None:
    values = [value(i, 2) for i in range(150)]
    kept: list[bool] = []
    threads = [threading.Thread(target=lambda one=one: kept.append(put(tier, one))) for one in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == [True] * 150
    assert tier.stats().stored == 150


def test_a_closed_tier_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAP)
    tier.close()
    tier.close()
    one = value(1)
    for call in (
        lambda: tier.load(one.key),
        lambda: put(tier, one),
        lambda: tier.contains([one.key]),
        lambda: tier.evict(one.key),
        tier.stats,
    ):
        with pytest.raises(TierError, match="is closed"):
            call()


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "made", CAP)
    put(tier, value(1))
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "made").iterdir()} == {0}
    tier.close()


# Two of them, in the order that hurts


class Interrupted(Files):
    """Something else happens in the middle of each read."""

    def __init__(self) -> None:
        self.happens: list[Callable[[], object]] = []
        self.is_in_memory = True

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        half = super().read(descriptor, buffer[: len(buffer) // 2 + 1], offset)
        if self.happens:
            self.happens.pop()()
        return half

    def read_now(self, reads: Sequence[tuple[int, int, Buffer, Sequence[Buffer]]]) -> list[int]:
        return super().read_now(reads if self.is_in_memory else [])


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[DiskTier, DiskTier, Interrupted]]:
    files = Interrupted()
    reader, writer = DiskTier(tmp_path, CAP, files=files), DiskTier(tmp_path, CAP)
    yield reader, writer, files
    reader.check()
    reader.close()
    writer.close()


def test_pages_written_anew_under_a_reader_are_a_miss(two: tuple[DiskTier, DiskTier, Interrupted]) -> None:
    reader, writer, files = two
    old, new = value(1, 50), value(2, 50)
    put(writer, old)
    files.happens = [lambda: (writer.evict(old.key), put(writer, new))]
    assert reader.load(old.key) is None
    assert not files.happens
    assert reader.load(new.key) == new.whole


def test_what_a_lookup_saw_may_be_gone_or_another_when_it_is_loaded(
    two: tuple[DiskTier, DiskTier, Interrupted],
) -> None:
    """K3: the pages a lookup has seen may have been given to another value since, by another process."""
    reader, writer, _ = two
    old, new = value(1, 50), value(2, 50)
    for load in (reader.load, lambda key: (reader.load_many([key]) or [None])[0]):
        put(writer, old)
        assert reader.contains([old.key, new.key]) == [True, False]
        assert load(old.key) == old.whole  # as it was seen
        assert reader.contains([old.key]) == [True]
        writer.evict(old.key)
        put(writer, new)  # in the same pages
        assert load(old.key) is None
        assert load(new.key) == new.whole
        writer.evict(new.key)
        put(writer, old)
        assert load(old.key) == old.whole
        writer.evict(old.key)
    assert reader.stats().failures == 0


def test_many_are_loaded_as_far_as_they_are_there(two: tuple[DiskTier, DiskTier, Interrupted]) -> None:
    reader, writer, files = two
    values = [value(number, 50) for number in range(5)]
    for one in (*values[:2], *values[3:]):
        put(writer, one)
    keys = [one.key for one in values]
    assert reader.load_many(keys) == [one.whole for one in values[:2]]
    assert reader.contains(keys) == [True, True, False, True, True]
    assert reader.load_many(keys[3:]) == [one.whole for one in values[3:]]
    assert reader.load_many(keys[2:]) == reader.load_many([]) == []
    # The second one goes, and its pages are written anew, while the first is read.
    files.happens = [lambda: (writer.evict(keys[1]), put(writer, values[2]))]
    assert reader.load_many(keys[:2]) == [values[0].whole]
    assert reader.stats().hits == 5


def parts_of(one: Value, front: int) -> list[bytearray]:
    """Room for the bytes behind the first `front` ones, in pieces."""
    num_bytes = len(one.whole) - front
    return [bytearray(7), bytearray(num_bytes - 7)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_read_to_where_they_are_wanted(
    backend: str, two: tuple[DiskTier, DiskTier, Interrupted], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "python":
        monkeypatch.setattr(Files, "backend", "python")
    reader, writer, files = two
    values = [value(seed, 30) for seed in range(4)]
    for one in values[:3]:
        put(writer, one)
    keys = [one.key for one in values]
    assert reader.contains(keys) == [True, True, True, False]
    for _ in range(2):  # as the lookup saw it, and asked anew
        places = reader.locate(keys)
        assert len(places) == 3
        parts = [parts_of(one, 100) for one in values[:3]]
        expected = [(one.whole[:100], xxhash.xxh3_64_intdigest(one.whole[100:])) for one in values[:3]]
        assert reader.read_now(places, parts) == expected
        for one, some in zip(values, parts, strict=False):
            assert b"".join(some) == one.whole[100:]
    first = places[:1]
    assert reader.read_now(first, [parts_of(values[0], 0)]) == []  # nothing is left to be told
    assert reader.read_now(places, [parts[0], [bytearray(1 << 20)], parts[2]]) == expected[:1]
    lost = [places[0], replace(places[1], slab=99), places[2]]
    assert reader.read_now(lost, parts) == expected[:1]
    beyond = [places[0], replace(places[1], offset=1 << 40), places[2]]
    assert reader.read_now(beyond, parts) == expected[:1]
    writer.evict(keys[1])
    assert reader.confirm(keys, places) == 1
    assert reader.confirm(keys, []) == 0
    files.is_in_memory = False
    assert reader.read_now(first, parts[:1]) == []
    assert reader.load(keys[0]) == values[0].whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_at_hand_is_checked_like_the_library_does(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of every size, more than the system takes at once, and few bytes."""
    if backend == "python":
        monkeypatch.setattr(Files, "backend", "python")
    random = np.random.default_rng(5)
    content = random.bytes(4 << 20)
    path = tmp_path / "file"
    path.write_bytes(content)
    files = Files()
    descriptor = files.open(path)
    try:
        for case in range(300):
            front = bytearray(int(random.integers(0, 200)))
            sizes = random.choice([0, 1, 7, 63, 64, 65, 129, 1024, 1025], 1500 if case == 0 else case % 23)
            parts = [bytearray(int(size)) for size in sizes]
            num_bytes = len(front) + sum(map(len, parts))
            offset = int(random.integers(0, len(content) - num_bytes))
            digests = files.read_now([(descriptor, offset, front, parts)])
            expected = content[offset + len(front) : offset + num_bytes]
            assert front == content[offset : offset + len(front)]
            assert b"".join(parts) == expected
            assert digests == [xxhash.xxh3_64_intdigest(expected)]
        for length in range(200, 2200):
            into = bytearray(length)
            assert files.read_now([(descriptor, length, bytearray(1), [into])]) == [
                xxhash.xxh3_64_intdigest(content[length + 1 : 2 * length + 1])
            ]
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.read_now([(descriptor, 0, bytearray(1), [bytearray(500)])])


def test_a_value_that_came_back_under_a_reader_is_read_again(
    two: tuple[DiskTier, DiskTier, Interrupted],
) -> None:
    reader, writer, files = two
    old, new = value(1, 50), value(2, 50)
    put(writer, old)
    files.happens = [
        lambda: (writer.evict(old.key), put(writer, new), writer.evict(new.key), put(writer, old))
    ]
    assert reader.load(old.key) == old.whole


def test_a_value_that_moved_under_a_reader_is_read_again(
    two: tuple[DiskTier, DiskTier, Interrupted], tmp_path: Path
) -> None:
    reader, writer, files = two
    values = [value(i, 700) for i in range(12)]
    for one in values:
        put(writer, one)
    for one in values[:8]:
        writer.evict(one.key)
    slabs = len(list(tmp_path.glob("slab-*")))
    files.happens = [lambda: writer.prune(8 << 20)]
    last = values[-1]
    assert reader.load(last.key) == last.whole
    assert len(list(tmp_path.glob("slab-*"))) < slabs
    assert put(reader, value(100, 700))  # and lets go of the slabs that are no more
    assert reader.usage().total <= 16 << 20


def test_they_see_each_other_and_share_the_last_cap(tmp_path: Path) -> None:
    one, other = DiskTier(tmp_path, 2 * CAP), DiskTier(tmp_path, CAP)
    first = value(1)
    put(one, first)
    assert other.load(first.key) == first.whole
    assert one.max_bytes() == CAP
    fill(one)
    assert folder_bytes(tmp_path) <= CAP
    one.close()
    other.check()
    other.close()


@pytest.mark.parametrize("change", ["transaction", "checkpoint", "vacuum"])
def test_one_of_all_writes_or_moves_the_log(tmp_path: Path, change: str) -> None:
    """SQLite before 3.51.3 may lose a transaction where two do (D4)."""
    one, other = (
        DiskIndex(tmp_path, Files(), max_bytes=None if begun else 16 << 20, timeout_s=0.2) for begun in (0, 1)
    )
    others = nullcontext()
    with suppress(ZeroDivisionError), one.transaction():
        with (
            pytest.raises(TierError, match=r"within 0\.2 s, got no lock"),
            getattr(other, change)() or others,
        ):
            pass
        with pytest.raises(TierError, match="at once, got no lock"), other.transaction(wait=False):
            pass
        assert not other.find_all([b"k"])  # nobody waits to read
        raise ZeroDivisionError
    with other.transaction(wait=False):  # an error gives it back
        pass
    for index in (one, other):
        index.checkpoint()
        index.close()


# What an opening finds


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least 16MiB, got 1MiB"):
        DiskTier(tmp_path, 1 << 20)
    for path in ("", "a\0b"):
        with pytest.raises(ArgumentError, match="expected a folder for the disk cache, got '"):
            DiskTier(path, CAP)
    with pytest.raises(ArgumentError, match="expected a folder with a disk cache, got none"):
        DiskTier(tmp_path / "nothing", None)
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArgumentError, match=r"expected a folder .* is a file"):
            DiskTier(path, CAP)
    assert not list(tmp_path.glob("quire*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    with pytest.raises(ArgumentError, match="Permission denied"):
        DiskTier(folder, CAP)


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "quire-cache.sqlite"
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE mine (x)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="an SQLite file of another program"):
        DiskTier(tmp_path, CAP)
    assert path.read_bytes() == before


def test_another_version_is_refused(tmp_path: Path) -> None:
    DiskTier(tmp_path, CAP).close()
    with sqlite3.connect(tmp_path / "quire-cache.sqlite") as index:
        index.execute("PRAGMA user_version = 7")
    index.close()
    with pytest.raises(ArgumentError, match=r"version 1, got version 7 .*quire cache rm"):
        DiskTier(tmp_path, CAP)


@pytest.mark.parametrize("damage", ["garbage", "cut", "header"])
def test_a_damaged_index_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, CAP)
    values = fill(tier, num_tokens=20)
    tier.close()
    path = tmp_path / "quire-cache.sqlite"
    whole = path.read_bytes()
    damaged = {
        "garbage": os.urandom(len(whole)),
        "cut": whole[:4096],
        "header": whole[:100] + bytes(8000) + whole[8100:],
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(TierError, match="damaged"):
        DiskTier(tmp_path, None)  # who only looks removes nothing
    assert path.read_bytes() == damaged
    tier = DiskTier(tmp_path, CAP)
    assert "set aside" in caplog.text
    assert (tmp_path / "quire-cache.set-aside").read_bytes() == damaged
    assert tier.stats().num_values == 0
    assert not list(tmp_path.glob("slab-*"))
    assert put(tier, values[0])
    assert tier.load(values[0].key) == values[0].whole
    assert folder_bytes(tmp_path) <= CAP
    tier.close()


def test_damage_found_in_use_is_set_aside_at_the_next_opening(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAP)
    values = [value(i, 1) for i in range(600)]
    for one in values:
        put(tier, one)
    tier.close()
    path = tmp_path / "quire-cache.sqlite"
    whole = bytearray(path.read_bytes())
    with sqlite3.connect(path) as index:
        root_page = index.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'entry_by_key'"
        ).fetchone()[0]
    index.close()
    whole[(root_page - 1) * 4096 : root_page * 4096] = bytes(4096)
    path.write_bytes(whole)
    tier = DiskTier(tmp_path, CAP)
    with pytest.raises(TierError, match="malformed"):
        tier.load(values[0].key)
    second = DiskTier.__new__(DiskTier)
    with pytest.raises(TierError, match="another process uses"):
        second.__init__(tmp_path, CAP)  # type: ignore[misc]
    tier.close()
    tier = DiskTier(tmp_path, CAP)
    assert tier.stats().num_values == 0
    assert put(tier, values[0])
    tier.close()


def test_a_slab_cut_short_is_a_miss_counted_and_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAP)
    values = fill(tier, num_tokens=100, count=10)
    tier.close()
    (slab,) = tmp_path.glob("slab-*")
    os.truncate(slab, 450 << 10)
    tier = DiskTier(tmp_path, CAP)
    found = [tier.load(one.key) for one in values]
    assert found[:4] == [one.whole for one in values[:4]]
    assert found[4:] == [None] * 6
    assert present(tier, values) == [0, 1, 2, 3]
    assert tier.stats().failures == 6
    for one in values:
        assert put(tier, one)
        assert tier.load(one.key) == one.whole
    tier.check()
    tier.close()


def test_what_it_gives_up_is_told(tmp_path: Path) -> None:
    """For want of room, and with a slab that is gone."""
    tier = DiskTier(tmp_path, CAP)
    told: dict[str, set[bytes]] = {"evicted": set(), "damaged": set()}
    tier.on_removed = lambda keys, reason: told[reason].update(keys)
    values = [value(i, 500) for i in range(40)]
    for one in values:
        assert put(tier, one)
    there = tier.contains([one.key for one in values])
    assert told["evicted"] == {one.key for one, is_there in zip(values, there, strict=True) if not is_there}
    assert told["evicted"]
    left = {one.key for one, is_there in zip(values, there, strict=True) if is_there}
    assert {key for key, _ in tier.contents([ROOT])} == left
    slabs = list(tmp_path.glob("slab-*"))
    tier.close()
    for slab in slabs:
        slab.unlink()
    tier = DiskTier(tmp_path, CAP)
    tier.on_removed = lambda keys, reason: told[reason].update(keys)
    for key in left:
        assert tier.load(key) is None
    assert told["damaged"] == left
    tier.close()


def test_a_slab_that_is_gone_is_a_miss_and_never_written_to_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAP)
    values = fill(tier, num_tokens=100, count=10)
    tier.close()
    (slab,) = tmp_path.glob("slab-*")
    slab.unlink()
    tier = DiskTier(tmp_path, CAP)
    assert put(tier, value(1, 100))  # found when written to
    assert present(tier, values) == []
    (slab,) = tmp_path.glob("slab-*")
    tier.close()
    slab.unlink()
    tier = DiskTier(tmp_path, CAP)
    assert tier.load(value(1, 100).key) is None  # found when read
    assert tier.usage().slabs == 0
    tier.check()
    tier.close()


def test_a_folder_that_vanishes_fails_with_one_line_each_or_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, CAP)
    values = fill(tier, num_tokens=20, count=4)
    shutil.rmtree(folder)
    calls = [lambda one=one: tier.load(one.key) in (None, one.whole) for one in values]
    calls += [lambda one=one: put(tier, one) in (True, False) for one in [value(i, 900) for i in range(20)]]
    for call in calls:
        with suppress(TierError):  # and nothing but that
            assert call()
    tier.close()
    assert not folder.exists()
    tier = DiskTier(folder, CAP)
    assert present(tier, values) == []
    assert put(tier, values[0])
    tier.close()


def test_stray_slabs_are_removed(tmp_path: Path) -> None:
    DiskTier(tmp_path, CAP).close()
    (tmp_path / "slab-deadbeef-000001").write_bytes(bytes(100))
    (tmp_path / "mine.txt").write_text("not of the cache")
    DiskTier(tmp_path, CAP).close()
    assert not list(tmp_path.glob("slab-*"))
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_an_index_that_cannot_grow_says_that_the_disk_is_full(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR | 3 << 8  # while writing
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    said = "disk I/O error" if free else r"the disk is full \(disk I/O error\)"
    with (
        pytest.raises(TierError, match=f"could not store a value: {said}$"),
        errors_in_use(tmp_path, "store a value", lambda damage: None),
    ):
        raise error


class FullDisk(Files):
    """A file system of which others, and the folder's files, take some."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room, self.others = folder, room, 0

    def free_bytes(self, path: Path) -> int:
        return self.room - self.others - folder_bytes(self.folder)


def test_it_leaves_what_the_file_system_is_to_have_left(tmp_path: Path) -> None:
    files = FullDisk(tmp_path, 40 << 20)
    tier = DiskTier(tmp_path, 64 << 20, min_free_bytes=20 << 20, files=files)
    big = [value(number, num_tokens=1024) for number in range(60)]
    for one in big:
        assert put(tier, one)  # older ones make room
        assert files.free_bytes(tmp_path) >= (20 << 20) - (4 << 20)  # index and log may grow
    held = tier.stats().num_values
    assert 8 <= held < 30
    files.others = 12 << 20  # somebody else takes more
    assert put(tier, value(100, num_tokens=1024))
    assert files.free_bytes(tmp_path) >= (20 << 20) - (4 << 20)
    assert tier.stats().num_values < held
    files.others = 40 << 20  # all of it
    assert not put(tier, value(101, num_tokens=1024))
    assert tier.stats().num_values == 0
    files.others = 0
    assert put(tier, value(102, num_tokens=1024))
    tier.check()
    tier.close()


def test_an_opening_leaves_it_too(tmp_path: Path) -> None:
    files = FullDisk(tmp_path, 64 << 20)
    with closing(DiskTier(tmp_path, 64 << 20, files=files)) as tier:
        for number in range(20):
            assert put(tier, value(number, num_tokens=1024))
    with closing(DiskTier(tmp_path, 64 << 20, min_free_bytes=50 << 20, files=files)) as tier:
        assert 0 < tier.stats().num_values < 20
        assert files.free_bytes(tmp_path) >= 50 << 20
        tier.check()
