"""Helpers of the tests of tiers: segments whose bytes follow from their key, and a tier that fails on demand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import xxhash

from quire.cache.block_hash import root_key
from quire.spec import KVSpec
from quire.spec.payload import PayloadLayout
from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack
from quire.tiers.tier import SegmentInfo, TierError, TierStats
from quire.tiers.transfer import Load

SHAPE = PayloadLayout.from_spec(KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32"))
ROOT = root_key(b"model", b"")
SEGMENT_TOKENS = 4

SMALL_TURN = 20 * SEGMENT_TOKENS * SHAPE.bytes_per_token
"""Bytes of a turn, so that chains of tens of segments take several."""


def chain(length: int, first_token: int = 0, root: bytes = ROOT) -> list[SegmentKey]:
    """So many whole segments; chains of other first tokens share none."""
    tokens = np.arange(length * SEGMENT_TOKENS, dtype=np.int32)
    tokens[:1] = 1000 + first_token
    return segment_keys(root, tokens, SEGMENT_TOKENS)


def payload(name: SegmentKey, shape: PayloadLayout = SHAPE) -> np.ndarray:
    """What this segment holds: bytes that follow from its key."""
    seed = int.from_bytes(name.hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, len(name.tokens) * shape.bytes_per_token, np.uint8)


def with_payloads(
    names: Sequence[SegmentKey], shape: PayloadLayout = SHAPE
) -> list[tuple[SegmentKey, np.ndarray]]:
    return [(name, payload(name, shape)) for name in names]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class DictTier:
    """A tier of unlimited size. fault(operation): called before each one; what it raises or returns comes of it.

    A string it returns says how the call lies: "nothing" (an empty answer), "garbage", "cut", "other" (another value).
    """

    def __init__(
        self, name: str = "disk", fault: Callable[[str], str | None] = lambda operation: None
    ) -> None:
        self.name = name
        self.fault = fault
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.infos: dict[bytes, SegmentInfo] = {}
        self.closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        match self.fault("contains"):
            case None:
                return [key in self.values for key in keys]
            case "nothing":
                return []
            case _:
                return [key not in self.values for key in keys]

    def load(self, key: bytes) -> memoryview | None:
        lie = self.fault("load")
        value = self.values.get(key)
        if lie == "garbage":
            return memoryview(b"\0garbage" * 9)
        if value is None or lie == "nothing":
            return None
        if lie == "cut":
            return memoryview(value)[: len(value) // 2]
        if lie == "other":
            return memoryview(next(reversed(self.values.values())))
        if lie == "flip":
            return memoryview(value[:-1] + bytes([value[-1] ^ 1]))
        return memoryview(value)

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        match self.fault("store"):
            case None:
                self.values.setdefault(key, b"".join(value))
                self.infos[key] = info
                return True
            case "cut":
                self.values[key] = b"".join(value)[:-3]
                return True
            case _:
                return False

    def evict(self, key: bytes) -> bool:
        self.fault("evict")
        return self.values.pop(key, None) is not None

    def stats(self) -> TierStats:
        return TierStats(len(self.values), sum(map(len, self.values.values())))

    def close(self) -> None:
        self.closed = True
        self.fault("close")


class InPlaceTier(DictTier):
    """One that reads to where values are wanted, too. Lies are those of the base, of whole calls or bytes read."""

    def locate(self, keys: Sequence[bytes]) -> list[bytes]:
        there = list(takewhile(lambda key: key in self.values, keys))
        match self.fault("locate"):
            case None:
                return there
            case "nothing":
                return []
            case _:
                return there[::-1]

    def read_now(
        self, places: Sequence[bytes], parts: Sequence[Sequence[Any]]
    ) -> list[tuple[memoryview, int]]:
        found = []
        for place, some in zip(places, parts, strict=True):
            one = self.read_one_now(place, some)
            if one is None:
                break
            found.append(one)
        return found

    def read_one_now(self, place: bytes, parts: Sequence[Any]) -> tuple[memoryview, int] | None:
        lie = self.fault("read_now")
        value = self.values.get(next(reversed(self.values), b"") if lie == "other" else place, b"")
        if lie == "flip":
            value = value[:-1] + bytes([value[-1] ^ 1])
        front = len(value) - sum(map(len, parts))
        if lie == "nothing" or front <= 0:
            return None
        at = front
        for part in parts[: len(parts) // 2] if lie == "cut" else parts:
            memoryview(part)[:] = value[at : at + len(part)]
            at += len(part)
        digest = xxhash.xxh3_64_intdigest(b"".join(parts))
        return memoryview(b"\0garbage" * 9 if lie == "garbage" else value[:front]), digest

    def confirm(self, keys: Sequence[bytes], places: Sequence[bytes]) -> int:
        if self.fault("confirm") is not None:
            return 0
        pairs = zip(keys, places, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def raising(*, errno: int | None = None, text: str = "broken", at: str = "") -> Callable[[str], None]:
    """A fault: TierError at every operation (or the one named), from an OSError of that number where one is given."""

    def fault(operation: str) -> None:
        if at in ("", operation):
            raise TierError(text) from (None if errno is None else OSError(errno, text))

    return fault


def check_cancel_waits(load: Load, leave: threading.Event) -> None:
    """`cancel` does not return before `leave` is set, for which whoever writes waits; and then it does."""
    canceller = threading.Thread(target=load.cancel)
    canceller.start()
    canceller.join(0.1)
    assert canceller.is_alive()
    leave.set()
    canceller.join(30)
    assert not canceller.is_alive()


def filled(stack: TierStack, names: list[SegmentKey]) -> TierStack:
    """The stack, once it has stored these."""
    assert stack.store(with_payloads(names)) == len(names)
    assert stack.flush(30)
    return stack
