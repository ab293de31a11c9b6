"""A record as bytes, for stores that keep one value a key; its checksum; its entry for an index.

    8 bytes   "QUIREVAL"
    8 bytes   checksum of key and value
    4 bytes   length of the entry, little endian
    entry     JSON, see `index_entry`
    value

Cost: `checksum` one pass of XXH3; `pack` and `unpack` copy nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import xxhash

from quire.tiers.remote.store_protocol import Record
from quire.tiers.tier import SegmentInfo

__all__ = ["FRONT_BYTES", "checksum", "index_entry", "pack", "start_of", "unpack"]

_MAGIC = b"QUIREVAL"
FRONT_BYTES = len(_MAGIC) + 8 + 4


def checksum(key: bytes, parts: Sequence[Any]) -> bytes:
    """XXH3-64 of the value, seeded with the key, so that another key's value does not pass."""
    digest = xxhash.xxh3_64(seed=int.from_bytes(key[:8], "little"))
    for part in parts:
        digest.update(part)
    return digest.digest()


def pack(record: Record) -> list[memoryview]:
    front = _MAGIC + record.checksum + len(record.info).to_bytes(4, "little") + record.info
    return [memoryview(front), *record.parts]


def unpack(data: Any) -> Record:
    """The record in `data`; if it is malformed, one whose checksum no value has."""
    view = memoryview(data).cast("B").toreadonly()
    start = FRONT_BYTES + int.from_bytes(view[16:FRONT_BYTES], "little")
    if len(view) < FRONT_BYTES or bytes(view[:8]) != _MAGIC or start > len(view):
        return Record([view], b"", b"")
    return Record([view[start:]], bytes(view[8:16]), bytes(view[FRONT_BYTES:start]))


def index_entry(info: SegmentInfo) -> bytes:
    return json.dumps(
        {
            "root": info.root.hex(),
            "parent": info.parent.hex(),
            "start": info.start,
            "tokens": base64.b64encode(info.tokens).decode(),
            "extra_keys": [[position, key.hex()] for position, key in info.extra_keys],
            "cache_priority": info.cache_priority,
            "owner": info.owner,
        }
    ).encode()


def start_of(entry: bytes) -> int:
    """The position of an entry's segment in its sequence; 0 if the entry does not say."""
    try:
        start = json.loads(entry)["start"]
    except (ValueError, TypeError, KeyError):
        return 0
    return start if type(start) is int and start >= 0 else 0
