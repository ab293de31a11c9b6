"""A reorder copies only tokens in which rows differ, and rows are what an index would choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from quire.hf import QuireCache, dense
from quire.hf.row_lineage import RowLineage

ROWS, HEADS, DIM, LAYERS = 4, 2, 16, 2
CONFIG = LlamaConfig(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=HEADS, head_dim=DIM, num_hidden_layers=LAYERS
)


def step(cache: QuireCache, num_tokens: int, seed: int) -> list[torch.Tensor]:
    """Stores tokens; all keys of each layer."""
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(ROWS, HEADS, num_tokens, DIM, generator=random) for _ in range(LAYERS)]
    return [cache.update(k, -k, layer)[0] for layer, k in enumerate(drawn)]


@pytest.mark.parametrize("storage", ["growing", "contiguous"])
def test_a_reorder_copies_the_tokens_behind_the_common_ones(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = dense.write

    def noted(device: object, target: torch.Tensor, source: torch.Tensor) -> None:
        written.append(source.shape[0])
        write(device, target, source)  # type: ignore[arg-type]

    cache = QuireCache(CONFIG, storage=storage, kv_memory="1MiB", max_length=128)  # type: ignore[arg-type]
    step(cache, 40, 0)
    monkeypatch.setattr(dense, "write", noted)
    num_copies = 2 * LAYERS  # keys and values of each layer
    for order, num_tokens in (
        ([0, 0, 0, 0], 3 * 40),  # rows about which nothing is known
        ([1, 0, 3, 2], 4 * 1),  # one token behind the common ones
        ([0, 0, 2, 2], 2 * 2),
        ([0, 1, 2, 3], 0),
        ([2, 0, 0, 0], 1 * 4 + 1 * 2 + 2 * 4),  # row 1 differs from row 0 in its last two tokens
    ):
        written.clear()
        cache.reorder_cache(torch.tensor(order))
        assert sum(written) == num_copies * num_tokens, order
        step(cache, 1, len(written))


@pytest.mark.parametrize("storage", ["growing", "contiguous", "virtual"])
def test_rows_are_those_of_an_index_after_any_orders_and_crops(storage: str) -> None:
    random = np.random.default_rng(3)
    cache = QuireCache(CONFIG, storage=storage, kv_memory="8MiB", piece_size="4KiB", max_length=256)  # type: ignore[arg-type]
    twin = [keys.clone() for keys in step(cache, 70, 0)]
    for turn in range(40):
        order = torch.tensor(random.integers(0, ROWS, ROWS))
        if turn % 9 == 8:
            num_less = int(random.integers(1, 20))
            cache.crop(-num_less)
            twin = [keys[:, :, :-num_less] for keys in twin]
        if turn % 13 == 12:
            cache.batch_select_indices(order)
        else:
            cache.reorder_cache(order)
        keys = step(cache, 1 + turn % 3, turn + 1)
        twin = [
            torch.cat([old[order], new[:, :, old.shape[2] :]], 2) for old, new in zip(twin, keys, strict=True)
        ]
        for ours, theirs in zip(keys, twin, strict=True):
            assert torch.equal(ours, theirs)
        if turn % 10 == 9:
            cache = cache.fork()


def test_a_lineage_never_says_equal_of_rows_that_differ() -> None:
    random = np.random.default_rng(0)
    rows = np.arange(ROWS)[:, None].repeat(5, 1)  # a number of its own for each token
    lineage, number = RowLineage(ROWS), ROWS
    for turn in range(200):
        order = random.integers(0, ROWS, ROWS)
        for row, position in enumerate(lineage.equal_until(order.tolist())):
            assert (rows[row, :position] == rows[order[row], :position]).all()
        lineage.reorder(order.tolist(), rows.shape[1])
        rows = np.concatenate([rows[order], number + np.arange(ROWS)[:, None]], 1)
        number += ROWS
        if turn % 7 == 6:
            rows = rows[:, : -int(random.integers(1, 5))]
            lineage.forget_from(rows.shape[1])
