"""Segments whose bytes follow from their key, and a tier that fails on demand: what the tests of tiers share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from quire.spec import KVSpec
from quire.tiers.keys import root_key
from quire.tiers.names import SegmentName, segment_names
from quire.tiers.segment import SegmentShape
from quire.tiers.tier import SegmentInfo, TierError, TierStats

SHAPE = SegmentShape.of(KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32"))
ROOT = root_key(b"model", b"")
SEGMENT_TOKENS = 4


def chain(length: int, first_token: int = 0, root: bytes = ROOT) -> list[SegmentName]:
    """So many whole segments; chains of other first tokens share none."""
    tokens = np.arange(length * SEGMENT_TOKENS, dtype=np.int32)
    tokens[:1] = 1000 + first_token
    return segment_names(root, tokens, SEGMENT_TOKENS)


def payload(name: SegmentName, shape: SegmentShape = SHAPE) -> np.ndarray:
    """What this segment holds: bytes that follow from its key."""
    seed = int.from_bytes(name.key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, len(name.tokens) * shape.bytes_per_token, np.uint8)


def with_payloads(
    names: Sequence[SegmentName], shape: SegmentShape = SHAPE
) -> list[tuple[SegmentName, np.ndarray]]:
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


def raising(*, errno: int | None = None, text: str = "broken", at: str = "") -> Callable[[str], None]:
    """A fault: TierError at every operation (or the one named), from an OSError of that number where one is given."""

    def fault(operation: str) -> None:
        if at in ("", operation):
            raise TierError(text) from (None if errno is None else OSError(errno, text))

    return fault
