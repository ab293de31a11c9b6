"""The most likely token of each row of logits.

Cost: one read of the logits on all threads, by the extension if it supports them; else torch's argmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.devices.cpu.packed_weights import DTYPE_NAMES

__all__ = ["most_likely"]


def most_likely(logits: torch.Tensor, native: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The first largest logit of each row: int64 [num_rows] tokens, float32 [num_rows] logits.

    logits: [num_rows, vocab], on any device. native: the extension; None for torch. A row with a NaN gives that NaN.
    """
    if native is None or logits.dtype not in DTYPE_NAMES or not logits.is_contiguous():
        tokens = torch.argmax(logits.float(), dim=-1)
        best = logits.gather(1, tokens[:, None])[:, 0].float()
        found = torch.stack([tokens.int(), best.view(torch.int32)]).cpu().numpy()  # one copy, one wait
        return found[0].astype(np.int64), found[1].view(np.float32)
    num_rows = logits.shape[0]
    tokens, best = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
    native.argmax_rows(logits, tokens, best)
    return tokens, best
