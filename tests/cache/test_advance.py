"""`advance`, the end of a decode step in one call, is `commit` and `append` of each."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import make, prompt

from quire.errors import ArgumentError, SequenceClosedError


def test_it_is_commit_and_append_of_each(backend: str) -> None:
    together, one_by_one = make(backend), make(backend)
    prompts = [prompt(7, seed=1), prompt(4, seed=2), prompt(7, seed=1)]
    pairs = [(together.open(tokens), one_by_one.open(tokens)) for tokens in prompts]
    lengths = [7, 4, 7]
    for cache, index in ((together, 0), (one_by_one, 1)):
        assert cache.reserve([pair[index] for pair in pairs], lengths) is not None
    ids = np.array([pair[0].id for pair in pairs])
    together.advance(ids, lengths, np.array([5, 6, 7]))
    for (_, sequence), length, token in zip(pairs, lengths, (5, 6, 7), strict=True):
        one_by_one.commit(sequence, length)
        sequence.append([token])
    assert together.stats() == one_by_one.stats()
    for a, b in pairs:
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.num_computed_tokens == b.num_computed_tokens
        assert a.block_table().tolist() == b.block_table().tolist()
    together.check()


def test_arrays_of_another_length_or_kind_change_nothing(backend: str) -> None:
    cache = make(backend)
    sequence = cache.open(prompt(4))
    assert cache.reserve([sequence], [4]) is not None
    for counts, tokens in (([4, 4], [1]), ([4], [1, 2]), ([4], [-1]), ([4], [1.5])):
        with pytest.raises(ArgumentError):
            cache.advance([sequence], counts, tokens)
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (0, 4)


def test_a_sequence_that_cannot_be_committed_is_named(backend: str) -> None:
    cache = make(backend)
    first, second = cache.open(prompt(4, seed=1)), cache.open(prompt(4, seed=2))
    assert cache.reserve([first, second], [4, 4]) is not None
    with pytest.raises(ArgumentError, match=f"sequence {second.id} .* got 9"):
        cache.advance([first, second], [4, 9], [1, 2])
    cache.close(second)
    with pytest.raises(SequenceClosedError, match=f"sequence {second.id}"):
        cache.advance(np.array([second.id]), [4], [1])
    cache.check()
