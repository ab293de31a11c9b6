"""`keep_top_p`: the tokens left by top_p, found among the likeliest few instead of by sorting the vocabulary.

The same set, token by token, as transformers' `TopPLogitsWarper`, which defines it: from the least likely on, it
removes tokens that together have at most 1 - p. The mass outside of the likeliest k tokens tells how many stay, if
fewer than k do. The row is sorted if that is not certain: a sum is so near to 1 - p that rounding decides, or tokens
with equal scores would be separated.

Each row is computed by itself: its result depends on no other row.

Cost: O(vocabulary) a row with few tokens left; a sort of the vocabulary for the others.
"""

from __future__ import annotations

import torch

__all__ = ["keep_top_p"]

_SIZES = (64, 512)  # numbers of likeliest tokens, tried in turn
_LEAST_VOCABULARY = 8  # the vocabulary's least multiple of a size; below it a sort is as good
# A sum this near to the limit is uncertain, because the reference divides by a sum in float32. Relative to the limit,
# for each token of the vocabulary: the most that eight lanes may round. And relative to 1: rounding of exponentials.
_DOUBT = 2.0**-24 / 8
_LEAST_DOUBT = 1e-6


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """scores: float32 [n, vocab], not changed. The same with -inf for the tokens that top_p (0 to below 1) removes."""
    num_rows, vocab = scores.shape
    least = torch.full((num_rows, 1), -torch.inf)  # for each row the lowest score that stays
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
        behind = total[rows] - of_best.cumsum(dim=-1)  # the mass of all tokens less likely than this one
        is_far = (behind - limit).abs() > _DOUBT * vocab * limit + _LEAST_DOUBT * total[
            rows
        ]  # never of a NaN
        num_kept = 1 + (behind[:, :-1] > limit).sum(dim=-1, keepdim=True)
        is_all = num_kept == size
        # The sum that keeps the last token and the one that removes the next must be certain.
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
