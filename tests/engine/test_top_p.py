"""`keep_top_p` against a sort, token by token."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from quire.sampling import top_p as module
from quire.sampling.top_p import keep_top_p

TOP_P = [0.0, 1e-6, 0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1 - 1e-6]


def by_sort(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    return TopPLogitsWarper(top_p)(torch.empty(0, dtype=torch.int64), scores)  # type: ignore[arg-type]


def rows(vocab: int, seed: int) -> torch.Tensor:
    """Flat and peaked ones, some of them with few different scores, or with tokens that are out already."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(24, vocab, generator=generator) * torch.logspace(-2, 1.5, 24)[:, None]
    drawn[::3] = drawn[::3].bfloat16().float()
    drawn[1::6] = drawn[1::6].round()
    drawn[2, vocab // 2 :] = drawn[3, 5:] = -torch.inf
    drawn[4] = 0.0
    drawn[5] = torch.arange(vocab) % 7 / 3
    drawn[6, :] = -30.0
    drawn[6, 17] = 5.0
    return drawn


@pytest.mark.parametrize("vocab", [30, 600, 4096, 20_000])
def test_the_same_tokens_are_left_as_by_the_sort(vocab: int) -> None:
    for seed, top_p in enumerate(TOP_P):
        scores = rows(vocab, seed)
        assert torch.equal(keep_top_p(scores, top_p), by_sort(scores, top_p))


def test_of_equal_scores_at_the_edge_the_sort_says_which_stay() -> None:
    """Of eight tokens with an eighth each, four stay: their sum is the limit to the last bit."""
    scores = torch.full((3, 4096), -torch.inf)
    scores[:, 100:108] = 1.0
    scores[1, 200] = 1.0 + 2**-20
    scores[2, :100] = -20.0
    for top_p in (0.5, 0.5 - 1e-7, 0.5 + 1e-7, 0.55):
        assert torch.equal(keep_top_p(scores, top_p), by_sort(scores, top_p))


def test_few_rows_are_sorted_and_a_row_depends_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(200, 4096, generator=torch.Generator().manual_seed(1)) * 3
    whole = keep_top_p(scores, 0.9)
    sorted_rows = 0
    sort = module._sorted

    def counted(part: torch.Tensor, top_p: float) -> torch.Tensor:
        nonlocal sorted_rows
        sorted_rows += len(part)
        return sort(part, top_p)

    monkeypatch.setattr(module, "_sorted", counted)
    for at in range(0, 200, 25):
        assert torch.equal(keep_top_p(scores[at : at + 25], 0.9), whole[at : at + 25])
    assert sorted_rows < 40
