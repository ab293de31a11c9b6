"""A beam search from plain token lists: every list's logits anew, no cache, no batch, one sort a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

Logits = Callable[[list[int]], Any]


def beam_answers(
    logits: Logits,
    prompt: list[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop_ids: Collection[int] = (),
) -> list[tuple[list[int], float]]:
    """The answers and their scores, the best first. logits: float32 [vocab] behind a list of tokens."""
    beams: list[tuple[np.float32, list[int]]] = [(np.float32(0.0), [])]
    ended: list[tuple[np.float32, list[int]]] = []
    for length in range(1, max_tokens + 1):
        grown: list[tuple[np.float32, list[int]]] = []
        for total, answer in beams:
            row = torch.as_tensor(logits(prompt + answer), dtype=torch.float32)
            log_probs = torch.log_softmax(row, -1).numpy()
            grown += [(total + log_probs[token], [*answer, token]) for token in range(len(log_probs))]
        grown.sort(key=lambda entry: -entry[0])
        best = grown[: max(2, 1 + len(stop_ids)) * width]
        ends = [answer[-1] in stop_ids or length == max_tokens for _, answer in best]
        for (total, answer), is_end in list(zip(best, ends, strict=True))[:width]:
            if is_end:
                ended.append((total / np.float32(length**length_penalty), answer))
        ended = sorted(ended, key=lambda entry: -entry[0])[:width]
        beams = [entry for entry, is_end in zip(best, ends, strict=True) if not is_end][:width]
        if not beams or (len(ended) == width and early_stopping is True):
            break
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if len(ended) == width and not beams[0][0] / np.float32(reach**length_penalty) > ended[-1][0]:
            break
    return [(answer, float(score)) for score, answer in ended]
