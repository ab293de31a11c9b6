"""What a segment is called: a SHA-256 chained over everything that decides its bits.

    root    = H("quire kv" version, fingerprint, H(namespace))
    key i   = H(key i - 1 (the root for i = 0), first position, number of tokens, tokens, extra keys)

so that equal keys mean: the same model, kernels and namespace, and the same tokens since the start. Nobody who lacks
the namespace's bytes can compute or find its keys. Whether a value holds what its key says is checked by `segment`.

Cost: one pass of SHA-256 over the tokens (4 bytes each).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

__all__ = ["KEY_BYTES", "chained_key", "root_key"]

KEY_BYTES = 32
_VERSION = 1


def root_key(fingerprint: bytes, namespace: bytes) -> bytes:
    """The key that a namespace's first segment continues, 32 bytes.

    fingerprint: of weights, config, dtype and of what decides the bits of a forward; other fingerprint, other world.
    """
    digest = hashlib.sha256(b"quire kv %d\0" % _VERSION)
    digest.update(len(fingerprint).to_bytes(8, "little") + fingerprint)
    digest.update(hashlib.sha256(namespace).digest())
    return digest.digest()


def chained_key(
    parent: bytes, start: int, tokens: np.ndarray, extra_keys: Iterable[tuple[int, bytes]] = ()
) -> bytes:
    """The key of the segment of `tokens` (integers [n]) that begins at position `start` behind `parent`, 32 bytes.

    extra_keys: (position, key) of those within the segment, positions increasing.
    """
    digest = hashlib.sha256(parent)
    digest.update(start.to_bytes(8, "little") + len(tokens).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(tokens, "<i4").data)
    for position, key in extra_keys:
        digest.update(position.to_bytes(8, "little") + len(key).to_bytes(8, "little") + key)
    return digest.digest()
