"""The comparison of block contents: as bytes whose order is the order of their elements.

The *element* at a position is (token id, extra key or none). Elements are ordered by token id, then no key before any
key, then by the key's bytes. `encode` writes them one after the other such that

    comparing two encodings as bytes  =  comparing the two lists of elements lexicographically
    one encoding is a prefix of another  =  one list of elements is a prefix of the other

so that Python compares plain bytes. An element without a key is the 4 big-endian bytes of 2 * token; one with a key
those of 2 * token + 1, then the key with each 0 written as 0 255, then 0 0.

Not here: hashes. Equality of content is always equality of all its bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from quire.cache.types import Int32Array

__all__ = ["ExtraKeys", "decode", "encode", "num_common_elements"]


@dataclass
class ExtraKeys:
    """Extra keys by position, positions strictly increasing (an image's digest at its placeholder, say)."""

    positions: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def truncated(self, position: int) -> ExtraKeys:
        """Those before `position`."""
        end = bisect_left(self.positions, position)
        return ExtraKeys(self.positions[:end], self.keys[:end])


def encode(tokens: Int32Array, extra_keys: ExtraKeys, start: int, stop: int) -> bytes:
    """The elements at positions start .. stop - 1. Cost O(stop - start)."""
    doubled = (tokens[start:stop].astype(np.uint32) << 1).astype(">u4")
    first = bisect_left(extra_keys.positions, start)
    last = bisect_left(extra_keys.positions, stop)
    if first == last:
        return doubled.tobytes()
    parts: list[bytes] = []
    done = 0
    for position, key in zip(extra_keys.positions[first:last], extra_keys.keys[first:last], strict=True):
        offset = position - start
        doubled[offset] += 1
        parts.append(doubled[done : offset + 1].tobytes())
        parts.append(key.replace(b"\0", b"\0\xff") + b"\0\0")
        done = offset + 1
    parts.append(doubled[done:].tobytes())
    return b"".join(parts)


def decode(content: bytes) -> tuple[list[int], list[tuple[int, bytes]]]:
    """The tokens, and (offset, key) of each extra key: the inverse of `encode`."""
    tokens: list[int] = []
    keys: list[tuple[int, bytes]] = []
    position = 0
    while position < len(content):
        doubled = int.from_bytes(content[position : position + 4], "big")
        position += 4
        if doubled & 1:
            # A key's own zeros are followed by 255, so the first pair of zeros ends it.
            end = content.index(b"\0\0", position)
            keys.append((len(tokens), content[position:end].replace(b"\0\xff", b"\0")))
            position = end + 2
        tokens.append(doubled >> 1)
    return tokens, keys


def num_common_elements(a: bytes, b: bytes) -> int:
    """Length, in elements, of the longest common prefix of two encodings."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        num_common_bytes = length
    else:
        differs = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
        num_common_bytes = int(differs.argmax())
    count = position = 0
    while position + 4 <= num_common_bytes:
        # Elements without a key are 4 bytes each: count them up to the next one with a key at once.
        has_key = np.frombuffer(a, np.uint8, num_common_bytes)[position + 3 :: 4] & 1
        num_plain = int(has_key.argmax()) if has_key.any() else len(has_key)
        count += num_plain
        position += 4 * num_plain
        if position + 4 <= num_common_bytes:
            position = a.index(b"\0\0", position + 4) + 2
            count += position <= num_common_bytes
    return count
