"""`DependentContent`: exactly the values that follow from a token, in trees of segments, blocks and states."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.cache.block_hash import root_key
from quire.offload.dependent_content import DependentContent
from quire.offload.states import state_keys
from quire.tiers.segment_key import SegmentKey, chain_keys

ROOT = root_key(b"model", b"")
SEGMENT, NODE = 8, 4


def stored(draw: random.Random, heads: list[list[int]]) -> tuple[np.ndarray, dict[int, bytes]]:
    """Tokens that begin as others do, and their extra keys."""
    tokens = draw.choice(heads)[: draw.randrange(33)] + [
        draw.randrange(3) for _ in range(draw.randrange(1, 20))
    ]
    keys = {draw.randrange(len(tokens)): b"x"} if draw.random() < 0.3 else {}
    return np.array(tokens, np.int32), keys


def depends(
    tokens: np.ndarray, keys: dict[int, bytes], other: np.ndarray, other_keys: dict[int, bytes], at: int
) -> bool:
    """Whether other content goes through the token at `at` of the tokens."""
    return (
        len(other) > at
        and np.array_equal(tokens[: at + 1], other[: at + 1])
        and [pair for pair in sorted(keys.items()) if pair[0] <= at]
        == [pair for pair in sorted(other_keys.items()) if pair[0] <= at]
    )


@pytest.mark.parametrize("seed", range(12))
def test_what_follows_is_chosen_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    heads = [[draw.randrange(3) for _ in range(32)] for _ in range(2)]
    everything = [stored(draw, heads) for _ in range(40)]
    values: dict[bytes, tuple[SegmentKey, np.ndarray, dict[int, bytes]]] = {}
    for tokens, keys in everything:
        pairs = tuple(sorted(keys.items()))
        for key in chain_keys(ROOT, tokens, SEGMENT, NODE, extra_keys=pairs):
            values[key.hash] = (
                key,
                tokens[: key.end],
                {at: text for at, text in keys.items() if at < key.end},
            )
    contents = [(hashed, key.info()) for hashed, (key, _, _) in values.items()]
    for _ in range(20):
        tokens, keys = draw.choice(everything)
        at = draw.randrange(len(tokens))
        content = DependentContent(
            ROOT, [tokens], tuple(sorted(keys.items())), at, segment_tokens=SEGMENT, node_tokens=NODE
        )
        chosen = content.choose(contents) & values.keys()
        assert chosen == {
            hashed
            for hashed, (_, own, own_keys) in values.items()
            if depends(tokens, keys, own, own_keys, at)
        }
        # A gap: what hangs on it cannot be told from what follows.
        gone = draw.choice(contents)[0]
        left = [pair for pair in contents if pair[0] != gone]
        assert content.choose(left) >= chosen - {gone}
        # A tier that lists nothing: what the known tokens name.
        named = content.choose([])
        own_chain = chain_keys(ROOT, tokens, SEGMENT, NODE, extra_keys=tuple(sorted(keys.items())))
        assert {key.hash for key in own_chain if key.end > at} <= named
        assert not {key.hash for key in own_chain if key.end <= at} & named


def test_states_behind_the_token_go() -> None:
    tokens = np.arange(20, dtype=np.int32)
    keys = state_keys(ROOT, tokens, NODE, ())
    other = state_keys(ROOT, tokens[::-1].copy(), NODE, ())
    content = DependentContent(ROOT, [tokens], (), 9, segment_tokens=SEGMENT, node_tokens=NODE)
    chosen = content.choose([(key.hash, key.info()) for key in keys + other])
    assert [key.hash in chosen for key in keys] == [False, False, True, True, True]
    assert [key.hash in chosen for key in other] == [False, False, True, True, True]
