"""The bytes of chained keys, which are on disks and on wires and never change."""

from __future__ import annotations

import numpy as np

from quire.cache.block_hash import (
    block_hashes,
    block_number,
    chained_key,
    namespace_digest,
    root_hash,
    root_key,
)

TOKENS = np.arange(7, 17)


def test_block_hashes() -> None:
    hashes = block_hashes(b"tenant", TOKENS, {1: b"image", 4: b"", 9: b"behind the last full block"}, 4)
    assert [one.hex() for one in hashes] == [
        "f45c556f956d7fbca10d78fcd158e5782cc25e6fc1f9aabb89a7fdaac4490eda",
        "6cd9e517c541298306a64538755405154a237fa4078b67de763bea6aea5b13b7",
    ]
    assert root_hash(b"").hex() == "c3741c8ecd69a1223318ea40e239dbd7da1378d284ca3e87d0562e4e8a63701e"
    assert block_number(hashes[0]) == 0x89A7FDAAC4490EDA


def test_namespace_digests() -> None:
    assert (namespace_digest(b""), namespace_digest(b"tenant")) == ("", "962d96b387693e68")


def test_segment_keys() -> None:
    root = root_key(b"model", b"tenant")
    assert root.hex() == "23236bf478bd07fbecefec754bd8525af6037a39729149727184904f33fbcfa4"
    key = chained_key(root, 8, TOKENS, [(9, b"image"), (12, b"")])
    assert key.hex() == "6c2e921c8e5d805e65430933a1e9506c79ce7ec0a5b3d3e200dcba431a4eb5ce"
