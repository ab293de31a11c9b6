"""A segment as bytes: the keys and values of several blocks, with the fields to check them.

    8 bytes   "QUIRESEG"
    4 bytes   length of the header, little endian
    8 bytes   XXH3-64 of the header
    header    JSON: version, key, parent, start, num_tokens, SHA-256 of the token ids, dtype, layers' shapes, payload's
              length and XXH3-64, when it was made
    payload   see `quire.spec.payload`; of a state, `quire.spec.state_payload`; of scores, `quire.spec.score_payload`

XXH3 finds damage, not forgery: writers to a tier are trusted, unless `signed` signs the values. A key reveals nothing
of the content.

Invariants
    G1  `decode` returns bytes that were encoded for this key, this layout and this many tokens, or raises SegmentError.

Cost: `encode` and `decode` one pass of XXH3 over the payload (about 10 GB/s and more); neither copies it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash

from quire.errors import QuireError
from quire.spec.payload import PayloadLayout
from quire.spec.score_payload import ScorePayloadLayout
from quire.spec.state_payload import StatePayloadLayout

__all__ = [
    "Layout",
    "Segment",
    "SegmentError",
    "check_parts",
    "decode",
    "encode",
    "read_header",
    "segment_tokens",
]

_MAGIC = b"QUIRESEG"
_FRONT = len(_MAGIC) + 4 + 8
_MAX_HEADER = 1 << 20
VERSION = 1
Layout: TypeAlias = PayloadLayout | StatePayloadLayout | ScorePayloadLayout
"""Layout of payloads: of keys and values, of states, or of scores."""
MAX_BYTES = 2 << 20  # of a segment of several blocks


class SegmentError(QuireError):
    """A value that is not the expected segment: cut short, damaged, or of another shape or key."""


def segment_tokens(layout: PayloadLayout, block_size: int) -> int:
    """Tokens of a whole segment: the largest power of two of blocks of at most 2 MiB; at least one block."""
    tokens = block_size
    while layout.num_bytes(2 * tokens) <= MAX_BYTES:
        tokens *= 2
    return tokens


@dataclass(frozen=True, eq=False)
class Segment:
    """Keys and values of `tokens`, which begin at position `start` of a sequence.

    key: `block_hash.chained_key`. parent: the key of the segment before, or the root. payload: uint8.
    """

    key: bytes
    parent: bytes
    start: int
    tokens: np.ndarray
    payload: np.ndarray


def encode(segment: Segment, layout: Layout, *, made_at: float) -> list[memoryview]:
    """The value of a segment: its front and its payload, to be written one after the other. made_at: seconds, Unix."""
    payload = np.ascontiguousarray(segment.payload).view(np.uint8).reshape(-1).data
    expected = layout.num_bytes(len(segment.tokens))
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
            "dtype": layout.dtype,
            "layers": layout.shapes,
            "payload_bytes": len(payload),
            "payload_xxh3": xxhash.xxh3_64_hexdigest(payload),
            "made_at": made_at,
        },
        sort_keys=True,
    ).encode()
    front = _MAGIC + len(header).to_bytes(4, "little") + xxhash.xxh3_64_digest(header) + header
    return [memoryview(front), payload]


def decode(value: Any, *, key: bytes, tokens: np.ndarray, start: int, layout: Layout) -> np.ndarray:
    """The payload of a value, uint8, not copied: of these tokens at this position, in this layout.

    *raises:* SegmentError: another segment, or damaged; no byte of it may be used.
    """
    header, payload = _parts(value)
    _check_header(header, key=key, tokens=tokens, start=start, layout=layout)
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
    layout: Layout,
) -> None:
    """`decode` for a value whose payload was read elsewhere: `num_bytes` with this XXH3-64. *raises:* SegmentError."""
    header, rest = _parts(front)
    _check_header(header, key=key, tokens=tokens, start=start, layout=layout)
    _check_payload(header, len(rest) + num_bytes, digest)


def read_header(value: Any) -> dict[str, Any]:
    """The header of a value, all of whose bytes it checks. *raises:* SegmentError."""
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
    header: dict[str, Any], *, key: bytes, tokens: np.ndarray, start: int, layout: Layout
) -> None:
    expected = {
        "key": key.hex(),
        "start": start,
        "num_tokens": len(tokens),
        "tokens_sha256": _token_digest(tokens),
        "dtype": layout.dtype,
        "layers": layout.shapes,
        "payload_bytes": layout.num_bytes(len(tokens)),
    }
    for name, wanted in expected.items():
        if header.get(name) != wanted:
            raise SegmentError(f"expected a segment with {name} {wanted}, got {header.get(name)}")


def _check_payload(header: dict[str, Any], num_bytes: int, digest: int) -> None:
    if num_bytes != header.get("payload_bytes"):
        raise SegmentError(f"expected {header.get('payload_bytes')} bytes of payload, got {num_bytes}")
    if f"{digest:016x}" != header.get("payload_xxh3"):
        raise SegmentError(
            f"expected a payload with XXH3 {header.get('payload_xxh3')}, got {digest:016x}: damaged"
        )


def _token_digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).hexdigest()
