"""Segments that a tier reads directly into their target, without a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from support.tiers_case import SHAPE, DictTier, InPlaceTier, chain, check_cancel_waits, filled, payload

from quire.tiers.stack import TierStack


class WatchedTier(InPlaceTier):
    """waits: keys of which reading would have to wait; moved: of which it was too late; loaded: in the other way.

    reading: called in the middle of each read.
    """

    def __init__(self, waits: Collection[bytes] = (), moved: Collection[bytes] = ()) -> None:
        super().__init__()
        self.waits, self.moved = waits, moved
        self.loaded: list[bytes] = []
        self.reading: Callable[[], object] = lambda: None

    def load(self, key: bytes) -> Any:
        self.loaded.append(key)
        return super().load(key)

    def read_one_now(self, place: bytes, parts: Sequence[Any]) -> tuple[memoryview, int] | None:
        found = super().read_one_now(place, parts)
        self.reading()
        return None if place in self.waits else found

    def confirm(self, keys: Sequence[bytes], places: Sequence[bytes]) -> int:
        return super().confirm(keys, list(takewhile(lambda key: key not in self.moved, places)))


def cut(payload: np.ndarray) -> list[memoryview]:
    """A payload's memory as three buffers."""
    return [payload.data[:5], payload.data[5:9], payload.data[9:]]


@pytest.mark.parametrize("other_way", ["", "waits", "moved", "damaged", "nowhere"])
def test_a_tier_reads_to_where_segments_are_wanted(other_way: str) -> None:
    names = chain(9)
    odd = names[4].hash
    tier = WatchedTier(*[[odd] if other_way == what else [] for what in ("waits", "moved")])
    stack = filled(TierStack([tier], SHAPE, workers=1), names)
    if other_way == "damaged":
        tier.values[odd] = bytes(tier.values[odd][:-1]) + b"x"
    wanted = [np.full(payload(name).nbytes, 255, np.uint8) for name in names]

    def places(index: int) -> list[memoryview] | None:
        return None if other_way == "nowhere" and index == 4 else cut(wanted[index])

    def into(index: int, found: np.ndarray) -> None:
        wanted[index][:] = found

    load = stack.load(names, into=into, places=places)
    assert load.wait(30)
    count = 4 if other_way == "damaged" else 9
    assert (load.outcome, load.num_loaded) == ("missing" if count == 4 else "complete", count)
    assert load.bytes_done == sum(one.nbytes for one in wanted[:count])
    assert all(np.array_equal(wanted[i], payload(names[i])) for i in range(count))
    # Behind a damaged value the others are looked at too, beside this thread.
    assert tier.loaded[:1] == ([odd] if other_way else [])
    assert len(tier.loaded) <= 1 or other_way == "damaged"
    [counts] = stack.stats().tiers
    assert (counts.hits, counts.misses, counts.damaged) == (count, int(count == 4), int(count == 4))
    assert counts.loaded_bytes == load.bytes_done
    assert stack.close()


def test_cancel_waits_for_what_a_tier_reads_in_place() -> None:
    tier, names, inside, leave = WatchedTier(), chain(3), threading.Event(), threading.Event()
    stack = filled(TierStack([tier], SHAPE, workers=1), names)
    wanted = [np.zeros(payload(name).nbytes, np.uint8) for name in names]
    tier.reading = lambda: inside.set() or leave.wait(30)
    load = stack.load(names, into=lambda index, found: None, places=lambda index: cut(wanted[index]))
    assert inside.wait(30)
    check_cancel_waits(load, leave)
    assert load.outcome == "cancelled"
    assert not wanted[2].any()
    assert stack.flush()
    assert stack.close()
    assert load.num_loaded in (0, 1)  # whether it was confirmed before the end was noted


def test_what_a_lower_tier_reads_is_promoted_and_not_read_in_place() -> None:
    host, disk, names = DictTier("host"), WatchedTier(), chain(3)
    below = filled(TierStack([disk], SHAPE, workers=1), names)
    assert below.flush()
    stack = TierStack([host, disk], SHAPE, workers=1)
    wanted = [np.zeros(payload(name).nbytes, np.uint8) for name in names]
    load = stack.load(
        names,
        into=lambda i, found: wanted[i].__setitem__(slice(None), found),
        places=lambda i: cut(wanted[i]),
    )
    assert load.wait(30)
    assert stack.flush()
    assert disk.loaded == [name.hash for name in names] == list(host.values)
    again = stack.load(
        names, into=lambda i, found: None, places=lambda i: cut(wanted[i]), cache_priority=0
    )  # the host has them
    assert again.wait(30)
    assert again.tiers == ["host"] * 3
    assert stack.close()
    below.close()
