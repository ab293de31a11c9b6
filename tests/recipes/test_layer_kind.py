"""The recipe of a kind of layer: one file that adds it to KINDS. The cache gives blocks back, attention masks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire import Cache
from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.cache.block_counts import num_blocks_for
from quire.memory import PagedStorage
from quire.spec import KINDS, KVSpec, LayerSpec, Span


@pytest.fixture(autouse=True)
def span() -> Iterator[Span]:
    from recipes.window_step import NAME, STEP

    KINDS[NAME] = lambda size: (size, STEP)
    yield Span(NAME, 6)
    del KINDS[NAME]


def test_what_it_needs(span: Span) -> None:
    assert [span.first_needed(position) for position in range(14)] == [0] * 9 + [4] * 4 + [8]
    assert max(q - span.first_needed(q) + 1 for q in range(100)) == span.max_num_kept == 9


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_the_cache_holds_what_it_needs_and_no_more(span: Span, block_size: int) -> None:
    spec = KVSpec((LayerSpec(span, 1, 8, 8),), dtype="float32")
    most = num_blocks_for(spec, 50, block_size)
    cache = Cache(spec, num_blocks=most, block_size=block_size, backend="python")
    sequence = cache.open(np.arange(1, dtype=np.int32))
    for token in range(50):
        plan = cache.reserve([sequence], [1])
        assert plan is not None
        cache.advance([sequence], [token + 1], [token + 1])
        cache.check()
    cache.close(sequence)


def test_the_reference_reads_from_the_step_on(span: Span) -> None:
    spec, torch_rng = KVSpec((LayerSpec(span, 1, 8, 8),), dtype="float32"), torch.Generator().manual_seed(1)
    storage = PagedStorage(spec, 4, 4)
    storage.fill(float("nan"))
    k, v, q = (torch.randn(14, 1, 8, generator=torch_rng) for _ in range(3))
    view, slots = storage.view(0), torch.arange(14)
    reference_attention.write(view, k, v, slots)
    plan = attention_batch([0, 14], [14], [[0, 1, 2, 3]], 4)
    window, chunk = AttentionOptions.limits(span.window, span.step)
    out = reference_attention.run(view, q, plan, AttentionOptions(1.0, window=window, chunk=chunk))
    for position in range(14):
        first = span.first_needed(position)
        weights = (k[first : position + 1, 0] @ q[position, 0]).softmax(0)
        torch.testing.assert_close(out[position, 0], weights @ v[first : position + 1, 0])


def test_the_native_core_says_that_it_has_it_not(span: Span) -> None:
    pytest.importorskip("quire._native")
    spec = KVSpec((LayerSpec(span, 1, 8, 8),), dtype="float32")
    with pytest.raises(ValueError, match="expected full, window or chunked, got 'window-step-4'"):
        Cache(spec, num_blocks=8, block_size=4, backend="native")
