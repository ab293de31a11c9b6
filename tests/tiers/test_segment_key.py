"""The chain of a prompt's segments: complete keys, from any entry point of the chain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.block_hash import chained_key, root_key
from quire.errors import ArgumentError
from quire.tiers.segment_key import segment_keys

ROOT = root_key(b"model", b"")


@given(st.integers(0, 40), st.integers(1, 9))
def test_covers_the_tokens_in_order(count: int, segment_tokens: int) -> None:
    tokens = np.arange(count)
    names = segment_keys(ROOT, tokens, segment_tokens)
    assert np.array_equal(np.concatenate([tokens[:0], *(name.tokens for name in names)]), tokens)
    behind, position = ROOT, 0
    for name in names:
        assert (name.root, name.parent, name.start) == (ROOT, behind, position)
        assert name.hash == chained_key(behind, position, name.tokens)
        assert len(name.tokens) == min(segment_tokens, count - position)
        behind, position = name.hash, name.end


def test_goes_on_where_another_chain_ended() -> None:
    tokens = np.arange(20)
    extra = [(3, b"a"), (9, b"image"), (17, b"c")]
    whole = segment_keys(ROOT, tokens, 4, extra_keys=extra)
    rest = segment_keys(ROOT, tokens[8:], 4, start=8, parent=whole[1].hash, extra_keys=extra)
    assert [name.hash for name in rest] == [name.hash for name in whole[2:]]
    assert whole[2].extra_keys == ((9, b"image"),)
    assert whole[2].hash != segment_keys(ROOT, tokens, 4)[2].hash


def test_info_holds_all_of_it() -> None:
    name = segment_keys(ROOT, np.arange(8), 4, extra_keys=[(5, b"k")])[1]
    info = name.info(cache_priority=2, owner="tenant")
    assert (info.root, info.parent, info.start, info.extra_keys) == (ROOT, name.parent, 4, ((5, b"k"),))
    assert info.tokens == np.arange(4, 8, dtype="<i4").tobytes()
    assert (info.cache_priority, info.owner) == (2, "tenant")


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="segment_tokens of 1 or more, got 0"):
        segment_keys(ROOT, np.arange(3), 0)
    with pytest.raises(ArgumentError, match="parent exactly where start is not 0"):
        segment_keys(ROOT, np.arange(3), 4, start=8)
