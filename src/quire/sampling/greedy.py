"""The most likely token of each row of logits.

Cost: one read of the logits on all threads, by the extension if it supports them; else torch's argmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.devices.cpu.packed_weights import DTYPE_NAMES

__all__ = ["likeliest", "most_likely", "tokens_and_logits"]


def most_likely(logits: torch.Tensor, native: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The first largest logit of each row: int64 [num_rows] tokens, float32 [num_rows] logits.

    logits: [num_rows, vocab], on any device. native: the extension; None for torch. A row with a NaN gives that NaN.
    """
    if native is None or logits.dtype not in DTYPE_NAMES or not logits.is_contiguous():
        return tokens_and_logits(likeliest(logits).cpu())
    num_rows = logits.shape[0]
    tokens, best = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
    native.argmax_rows(logits, tokens, best)
    return tokens, best


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """int32 [2, num_rows] on the device of the logits: the first largest of each row, and the bits of its logit in
    float32. So one copy to the host has both."""
    tokens = torch.argmax(logits.float(), dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0].float()
    return torch.stack([tokens.int(), best.view(torch.int32)])


def tokens_and_logits(found: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The answer of `most_likely` from that of `likeliest` in host memory."""
    tokens, bits = found.numpy()
    return tokens.astype(np.int64), bits.view(np.float32)
