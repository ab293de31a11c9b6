"""A store is measured with values of its own, which are removed; a store that does not answer is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ArgumentError
from quire.simulate.measured_store import MeasuredStore, measure_store
from quire.tiers.by_url import register, unregister
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.tier import SegmentInfo


def keys_of(url: str) -> list[bytes]:
    tier = RemoteTier(url)
    try:
        return sorted(item.key for item in tier.items())
    finally:
        tier.close()


def test_a_folder_keeps_what_it_had_and_nothing_more(tmp_path: Path) -> None:
    url = f"folder://{tmp_path}"
    tier = RemoteTier(url)
    tier.store(b"k" * 32, [memoryview(b"value")], SegmentInfo(b"r" * 32, b"r" * 32, 0, b"\0" * 4))
    tier.close()
    found = measure_store(url, 1 << 20)
    assert (found.where, found.value_bytes) == (str(tmp_path), 1 << 20)
    assert min(found.lookup_s, found.load_s, found.store_s) > 0
    assert keys_of(url) == [b"k" * 32]


def test_the_line_is_a_lookup_and_a_value_a_block() -> None:
    line = MeasuredStore("there", 1000, lookup_s=0.5, load_s=4.0, store_s=9.0).cost(block_tokens=16)
    assert line.seconds(32, 0) == pytest.approx(0.5 + 2 * 4.0)


class ForgetfulTier:
    """Counts calls; stores nothing, or loses what it stored."""

    name = "remote"

    def __init__(self, stores: bool) -> None:
        self.stores = stores
        self.evicted: list[bytes] = []
        self.is_closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def load(self, key: bytes) -> None:
        return None

    def store(self, key: bytes, value: Any, info: Any) -> bool:
        return self.stores

    def evict(self, key: bytes) -> bool:
        self.evicted.append(key)
        return True

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def forgetful(request: pytest.FixtureRequest) -> Iterator[ForgetfulTier]:
    tier = ForgetfulTier(request.param)
    register("forgetful", lambda url: tier)  # type: ignore[arg-type,return-value]
    yield tier
    unregister("forgetful")


@pytest.mark.parametrize(
    ("forgetful", "message"),
    [(False, "remote does not store a value of 64 bytes"), (True, "remote has lost a value of 64 bytes")],
    indirect=["forgetful"],
)
def test_a_store_without_its_values_is_refused_and_cleaned(forgetful: ForgetfulTier, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measure_store("forgetful://", 64)
    assert len(set(forgetful.evicted)) == 5
    assert forgetful.is_closed


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://:secret@127.0.0.1:1", "expected a store that answers, got: a look-up at 127.0.0.1:1"),
        ("folder:///no-such-folder/of/any", "expected a store that answers.*make the folder above it"),
        ("ftp://there", "a tier's scheme"),
    ],
)
def test_a_store_that_does_not_answer_is_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        measure_store(url, 64)
    assert "secret" not in str(raised.value)
