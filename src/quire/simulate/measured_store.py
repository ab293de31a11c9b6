"""`measure_store`: seconds of a store's calls with values of a block's size, made as an engine with this `remote_cache`
makes them; `MeasuredStore`: the result.

    lookup_s   one look-up of a key
    load_s     one value loaded
    store_s    one value stored

Each is the median of five. A load in the simulation is one look-up, and a value for each block, one after another.

Invariants
    M1  the values have keys of their own, drawn at random; no other value is read or changed.
    M2  they are removed again, also after an error, as far as the store then answers.

Cost: five values stored, loaded and removed, and six look-ups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from quire.errors import ArgumentError
from quire.simulate.cost_line import CostLine
from quire.tiers.by_url import tier_from_url
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.tier import SegmentInfo, Tier, TierError

__all__ = ["MeasuredStore", "measure_store"]

_NUM_TIMES = 5


@dataclass(frozen=True)
class MeasuredStore:
    """where: the address, without any secret. value_bytes: of each value. The seconds: see the module's text."""

    where: str
    value_bytes: int
    lookup_s: float
    load_s: float
    store_s: float

    def cost(self, block_tokens: int) -> CostLine:
        """The line of a load. block_tokens: of a value."""
        return CostLine(self.lookup_s, self.load_s / block_tokens, 0.0)


def measure_store(url: str, value_bytes: int) -> MeasuredStore:
    """The store of a URL of `remote_cache`, or of a variable that holds one (`env:NAME`).

    *raises:* ArgumentError: an invalid URL, a store that does not answer, refuses values of this size or loses them.
    BackendError: its package is not installed.
    """
    tier = tier_from_url(url)
    keys = [os.urandom(32) for _ in range(_NUM_TIMES)]
    try:
        if isinstance(tier, RemoteTier):
            tier.raise_max_value_bytes(value_bytes)
        return _measured(tier, keys, value_bytes)
    except TierError as error:
        raise ArgumentError(
            f"expected a store that answers, got: {error} - in `store`; start it, or give --store SIZE and --store-cost"
        ) from None
    finally:
        for key in keys:
            with suppress(TierError):
                tier.evict(key)
        tier.close()


def _measured(tier: Tier, keys: list[bytes], value_bytes: int) -> MeasuredStore:
    where = tier.where if isinstance(tier, RemoteTier) else tier.name
    value, root = memoryview(os.urandom(value_bytes)), os.urandom(32)
    info = SegmentInfo(root, root, 0, b"\0\0\0\0")
    tier.contains(keys[:1])  # connects
    lookup_s = median(_seconds(tier.contains, [key]) for key in keys)

    def store(key: bytes) -> None:
        if not tier.store(key, [value], info):
            raise TierError(f"{where} does not store a value of {value_bytes} bytes")

    def load(key: bytes) -> None:
        loaded = tier.load(key)
        if loaded is None or len(loaded) != value_bytes:
            raise TierError(f"{where} has lost a value of {value_bytes} bytes that it had stored")

    store_s = median(_seconds(store, key) for key in keys)
    load_s = median(_seconds(load, key) for key in keys)
    return MeasuredStore(where, value_bytes, lookup_s, load_s, store_s)


def _seconds(call: Callable[[Any], object], argument: Any) -> float:
    began = time.perf_counter()
    call(argument)
    return time.perf_counter() - began
