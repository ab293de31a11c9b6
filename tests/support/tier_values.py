"""Values for tiers: a key, its value, and its index entry; all from one seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from quire.cache.block_hash import chained_key, root_key
from quire.spec import KVSpec
from quire.spec.payload import PayloadLayout
from quire.tiers.segment import Segment, encode
from quire.tiers.tier import SegmentInfo

# 1 KiB a token: values of any size in as few tokens.
SHAPE = PayloadLayout.from_spec(KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32"))
ROOT = root_key(b"model", b"namespace")


@dataclass(frozen=True)
class Value:
    key: bytes
    tokens: np.ndarray
    start: int
    parts: list[memoryview]
    info: SegmentInfo

    @property
    def whole(self) -> bytes:
        return b"".join(self.parts)


def value(
    seed: int,
    num_tokens: int = 8,
    *,
    parent: bytes = ROOT,
    start: int = 0,
    root: bytes = ROOT,
    cache_priority: int = 1,
    owner: str = "",
    extra_keys: tuple[tuple[int, bytes], ...] = (),
) -> Value:
    """The segment of `num_tokens` KiB that this seed stands for, behind `parent`."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, num_tokens, np.int32)
    payload = rng.integers(0, 256, num_tokens * SHAPE.bytes_per_token, np.uint8)
    key = chained_key(parent, start, tokens, extra_keys)
    info = SegmentInfo(root, parent, start, tokens.tobytes(), extra_keys, cache_priority, owner)
    return Value(
        key, tokens, start, encode(Segment(key, parent, start, tokens, payload), SHAPE, made_at=1.0), info
    )


def chain(seed: int, length: int, num_tokens: int = 8, *, root: bytes = ROOT, owner: str = "") -> list[Value]:
    """Segments that follow one another from the root."""
    values: list[Value] = []
    for index in range(length):
        parent = values[-1].key if values else root
        seed_here = int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4], "little")
        values.append(
            value(seed_here, num_tokens, parent=parent, start=index * num_tokens, root=root, owner=owner)
        )
    return values
