"""`keep_top_p`: which tokens are left by top_p, found among the likeliest few instead of by sorting the vocabulary.

The same set, token by token, as transformers' `TopPLogitsWarper`, which is the definition: of the tokens from the least
likely on, those go that together have at most 1 - p. What the likeliest k leave to the others says how many stay, if
fewer than k do. Where that is not certain the row is sorted: where a sum lies so near to 1 - p that rounding decides,
and where tokens with the same score would be parted.

Each row is looked at by itself: what is left of it depends on no other.

Cost: O(vocabulary) a row with few tokens left; a sort of the vocabulary for the others.
"""

from __future__ import annotations

import torch

__all__ = ["keep_top_p"]

_SIZES = (64, 512)  # likeliest tokens that are looked at, one after the other
_LEAST_VOCABULARY = 8  # times so many: in less a sort is as good
# Sums that differ by less from the limit are not told apart, as there they are divided by a sum in float32. Relative to
# the limit, for each token of the vocabulary: what eight lanes may round at most. And relative to 1: of exponentials.
_DOUBT = 2.0**-24 / 8
_LEAST_DOUBT = 1e-6


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """scores: float32 [n, vocab], not changed. The same with -inf for the tokens that top_p (0 to below 1) removes."""
    num_rows, vocab = scores.shape
    least = torch.full((num_rows, 1), -torch.inf)  # of each row, the lowest score that stays
    to_sort: list[torch.Tensor] = []
    rows, part = torch.arange(num_rows), scores
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    for size in _SIZES:
        if not len(rows) or size * _LEAST_VOCABULARY > vocab:
            break
        best = part.topk(size, dim=-1).values
        limit = (1.0 - top_p) * total[rows]
        of_best = (best - best[:, :1]).exp_().double()
        behind = total[rows] - of_best.cumsum(dim=-1)  # what all have that are less likely than this one
        is_far = (behind - limit).abs() > _DOUBT * vocab * limit + _LEAST_DOUBT * total[
            rows
        ]  # never of a NaN
        num_kept = 1 + (behind[:, :-1] > limit).sum(dim=-1, keepdim=True)
        is_all = num_kept == size
        # Of the sums, the one that keeps the last and the one that removes the next; behind the likeliest nobody asks.
        last = num_kept - 1
        lowest, next_lower = best.gather(1, last), best.gather(1, num_kept.clamp(max=size - 1))
        is_certain = is_far.gather(1, last) & (is_far.gather(1, (last - 1).clamp(min=0)) | (last == 0))
        is_sure = (~is_all & is_certain & (lowest > next_lower))[:, 0]
        least[rows[is_sure]] = lowest[is_sure]
        to_sort.append(rows[~is_sure & ~is_all[:, 0]])
        rows = rows[is_all[:, 0]]
        part = scores[rows]
    others = torch.cat([*to_sort, rows])
    if len(others) == num_rows:
        return _sorted(scores, top_p)
    kept = scores.masked_fill(scores < least, -torch.inf)
    if len(others):
        kept[others] = _sorted(scores[others], top_p)
    return kept


def _sorted(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    from transformers.generation.logits_process import TopPLogitsWarper

    nothing = torch.empty(0, dtype=torch.int64)
    return TopPLogitsWarper(top_p)(nothing, scores)  # type: ignore[arg-type]
