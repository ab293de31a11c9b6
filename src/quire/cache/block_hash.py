"""Chained content keys of blocks and segments of several blocks, which any process computes from the content.

A key is a SHA-256 over the previous key and all that its tokens add. Equal keys therefore mean the same tokens since
the start, the same extra keys at the same positions and the same namespace. Without the namespace's bytes its keys can
neither be computed nor found. There are two families. Their bytes are on disks and on wires and never change:

    block hashes    of the mirror and of KV events: one per block, chained from H("quire blocks", namespace). They do
                    not depend on the model: a listener of an engine knows it
        hash i = H(hash i - 1, tokens, then for each extra key: offset in the block, length, key)      numbers: 4 bytes
    segment keys    of the tiers: chained from H("quire kv" version, fingerprint, H(namespace)), so that they also mean
                    the same model and kernels. A segment is one block or several, so a key tells where it begins
        key i  = H(key i - 1, first position, number of tokens, tokens,
                   then for each extra key: position, length, key)                                     numbers: 8 bytes

`tiers.segment` checks whether a stored value matches its key.

Cost: one pass of SHA-256 over the tokens (4 bytes each); about 1 us for a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

__all__ = [
    "KEY_BYTES",
    "block_hashes",
    "block_number",
    "chained_hashes",
    "chained_key",
    "namespace_digest",
    "root_hash",
    "root_key",
]

KEY_BYTES = 32
_VERSION = 1


def _chained(
    before: bytes, head: bytes, tokens: np.ndarray, extra_keys: Iterable[tuple[int, bytes]], width: int
) -> bytes:
    """The key after `before`, 32 bytes. width: bytes of each number, little-endian."""
    digest = hashlib.sha256(before + head)
    digest.update(np.ascontiguousarray(tokens, "<i4").data)
    for at, key in extra_keys:
        digest.update(at.to_bytes(width, "little") + len(key).to_bytes(width, "little") + key)
    return digest.digest()


# Block hashes


def root_hash(namespace: bytes) -> bytes:
    """The hash that a namespace's first block is chained to."""
    return hashlib.sha256(b"quire blocks\0" + namespace).digest()


def chained_hashes(
    before: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None, block_size: int
) -> list[bytes]:
    """The hashes of the full blocks of `tokens`, which follow the block of hash `before`.

    extra_keys: by position within `tokens`.
    """
    hashes: list[bytes] = []
    keys = sorted((extra_keys or {}).items())
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        stop = start + block_size
        own = [(at - start, key) for at, key in keys if start <= at < stop] if keys else ()
        before = _chained(before, b"", tokens[start:stop], own, 4)
        hashes.append(before)
    return hashes


def block_hashes(
    namespace: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None, block_size: int
) -> list[bytes]:
    """The hashes of a prompt's full blocks."""
    return chained_hashes(root_hash(namespace), tokens, extra_keys, block_size)


def block_number(block_hash: bytes) -> int:
    """The number of the block of this hash in events: the hash's last 8 bytes, an unsigned integer."""
    return int.from_bytes(block_hash[-8:], "big")


def namespace_digest(namespace: bytes) -> str:
    """16 hexadecimal digits that distinguish namespaces without revealing them; "" for the unnamed namespace."""
    return hashlib.sha256(b"quire namespace\0" + namespace).hexdigest()[:16] if namespace else ""


# Segment keys


def root_key(fingerprint: bytes, namespace: bytes) -> bytes:
    """The key that a namespace's first segment continues, 32 bytes.

    fingerprint: of weights, config, dtype and all else that decides the bits of a forward. Another fingerprint gives
    other keys.
    """
    digest = hashlib.sha256(b"quire kv %d\0" % _VERSION)
    digest.update(len(fingerprint).to_bytes(8, "little") + fingerprint)
    digest.update(hashlib.sha256(namespace).digest())
    return digest.digest()


def chained_key(
    parent: bytes, start: int, tokens: np.ndarray, extra_keys: Iterable[tuple[int, bytes]] = ()
) -> bytes:
    """The key of the segment of `tokens` (integers [n]) that begins at position `start` after `parent`, 32 bytes.

    extra_keys: (position, key) of each extra key within the segment, positions increasing.
    """
    head = start.to_bytes(8, "little") + len(tokens).to_bytes(8, "little")
    return _chained(parent, head, tokens, extra_keys, 8)
