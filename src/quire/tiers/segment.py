"""A segment as bytes: the keys and values of several blocks, with everything needed to trust them.

    8 bytes   "QUIRESEG"
    4 bytes   length of the header, little endian
    8 bytes   XXH3-64 of the header
    header    JSON: version, key, parent, start, num_tokens, SHA-256 of the token ids, dtype, layers' shapes, payload's
              length and XXH3-64, when it was made
    payload   for each layer that stores KV, in the order of layers: for each of its KV heads the keys
              [tokens, k_head_dim], then the values [tokens, v_head_dim], little endian

The payload is the same whatever the pool's layout, storage or block size is. XXH3 finds damage, not forgery: who can
write into a tier is trusted (a remote one's access is its server's business), and a key tells nothing about content.

Invariants
    G1  `decode` returns bytes that were encoded for this key, this shape and this many tokens, or raises SegmentError.

Cost: `encode` and `decode` one pass of XXH3 over the payload (about 10 GB/s and more); neither copies it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from quire.errors import QuireError
from quire.spec import KVSpec

__all__ = ["Segment", "SegmentError", "SegmentShape", "check_parts", "decode", "encode", "read_header"]

_MAGIC = b"QUIRESEG"
_FRONT = len(_MAGIC) + 4 + 8
_MAX_HEADER = 1 << 20
VERSION = 1
# Bytes of a segment that its size is chosen for.
MIN_BYTES, MAX_BYTES = 512 << 10, 2 << 20


class SegmentError(QuireError):
    """A value that is not the segment it is said to be: cut short, damaged, of another shape or key."""


@dataclass(frozen=True)
class SegmentShape:
    """What the segments of one model have in common.

    dtype: of the elements. layers: (num_kv_heads, k_head_dim, v_head_dim) of each layer that stores KV, in order.
    """

    dtype: str
    layers: tuple[tuple[int, int, int], ...]
    dtype_bytes: int

    @classmethod
    def of(cls, spec: KVSpec) -> SegmentShape:
        layers = tuple(
            (layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim)
            for layer in spec.layers
            if layer.shares_kv_with is None
        )
        return cls(spec.dtype, layers, spec.dtype_bytes)

    @cached_property
    def bytes_per_token(self) -> int:
        return self.dtype_bytes * sum(heads * (k + v) for heads, k, v in self.layers)

    def segment_tokens(self, block_size: int) -> int:
        """Tokens of a whole segment: a power of two of blocks, as many as take at most 2 MiB; one block at least."""
        tokens = block_size
        while 2 * tokens * self.bytes_per_token <= MAX_BYTES:
            tokens *= 2
        return tokens


@dataclass(frozen=True, eq=False)
class Segment:
    """Keys and values of `tokens`, which begin at position `start` of a sequence.

    key: `keys.chained_key`. parent: the key of the segment before, or the root. payload: uint8, see the module's text.
    """

    key: bytes
    parent: bytes
    start: int
    tokens: np.ndarray
    payload: np.ndarray


def encode(segment: Segment, shape: SegmentShape, *, made_at: float) -> list[memoryview]:
    """The value of a segment: its front and its payload, to be written one after the other. made_at: seconds, Unix."""
    payload = np.ascontiguousarray(segment.payload).view(np.uint8).reshape(-1).data
    expected = len(segment.tokens) * shape.bytes_per_token
    if len(payload) != expected:
        raise SegmentError(f"expected {expected} bytes of {len(segment.tokens)} tokens, got {len(payload)}")
    header = json.dumps(
        {
            "version": VERSION,
            "key": segment.key.hex(),
            "parent": segment.parent.hex(),
            "start": segment.start,
            "num_tokens": len(segment.tokens),
            "tokens_sha256": _token_digest(segment.tokens),
            "dtype": shape.dtype,
            "layers": shape.layers,
            "payload_bytes": len(payload),
            "payload_xxh3": xxhash.xxh3_64_hexdigest(payload),
            "made_at": made_at,
        },
        sort_keys=True,
    ).encode()
    front = _MAGIC + len(header).to_bytes(4, "little") + xxhash.xxh3_64_digest(header) + header
    return [memoryview(front), payload]


def decode(value: Any, *, key: bytes, tokens: np.ndarray, start: int, shape: SegmentShape) -> np.ndarray:
    """The payload of a value, uint8, not copied: that of these tokens at this position, of this shape.

    *raises:* SegmentError: it is not, or was damaged; nothing of it may be used then.
    """
    header, payload = _parts(value)
    _check_header(header, key=key, tokens=tokens, start=start, shape=shape)
    _check_payload(header, len(payload), xxhash.xxh3_64_intdigest(payload))
    return np.frombuffer(payload, np.uint8)


def check_parts(
    front: Any,
    num_bytes: int,
    digest: int,
    *,
    key: bytes,
    tokens: np.ndarray,
    start: int,
    shape: SegmentShape,
) -> None:
    """As `decode`, of a value whose payload lies elsewhere: so many bytes with this XXH3-64. *raises:* SegmentError."""
    header, rest = _parts(front)
    _check_header(header, key=key, tokens=tokens, start=start, shape=shape)
    _check_payload(header, len(rest) + num_bytes, digest)


def read_header(value: Any) -> dict[str, Any]:
    """The header of a value whose every byte has been checked. *raises:* SegmentError."""
    header, payload = _parts(value)
    _check_payload(header, len(payload), xxhash.xxh3_64_intdigest(payload))
    return header


def _parts(value: Any) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(value).cast("B")
    if len(view) < _FRONT or bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise SegmentError(f"expected a segment, got {len(view)} bytes that do not begin as one")
    length = int.from_bytes(view[8:12], "little")
    if length > _MAX_HEADER or _FRONT + length > len(view):
        raise SegmentError(f"expected a segment, got {len(view)} bytes with a header of {length}")
    front = view[_FRONT : _FRONT + length]
    if xxhash.xxh3_64_digest(front) != bytes(view[12:_FRONT]):
        raise SegmentError("expected a segment, got one whose header is damaged")
    try:
        header = json.loads(bytes(front))
    except ValueError:
        raise SegmentError("expected a segment, got one whose header is no JSON") from None
    if not isinstance(header, dict):
        raise SegmentError("expected a segment, got one whose header is no object")
    if header.get("version") != VERSION:
        raise SegmentError(f"expected a segment of version {VERSION}, got version {header.get('version')}")
    return header, view[_FRONT + length :]


def _check_header(
    header: dict[str, Any], *, key: bytes, tokens: np.ndarray, start: int, shape: SegmentShape
) -> None:
    expected = {
        "key": key.hex(),
        "start": start,
        "num_tokens": len(tokens),
        "tokens_sha256": _token_digest(tokens),
        "dtype": shape.dtype,
        "layers": [list(layer) for layer in shape.layers],
        "payload_bytes": len(tokens) * shape.bytes_per_token,
    }
    for name, wanted in expected.items():
        if header.get(name) != wanted:
            raise SegmentError(f"expected a segment with {name} {wanted}, got {header.get(name)}")


def _check_payload(header: dict[str, Any], num_bytes: int, digest: int) -> None:
    if num_bytes != header.get("payload_bytes"):
        raise SegmentError(f"expected {header.get('payload_bytes')} bytes of payload, got {num_bytes}")
    if f"{digest:016x}" != header.get("payload_xxh3"):
        raise SegmentError(
            f"expected a payload with XXH3 {header.get('payload_xxh3')}, got another one: damaged"
        )


def _token_digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).hexdigest()
