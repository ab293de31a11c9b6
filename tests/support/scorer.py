"""The likelihood of a text under a model: by Quire, through `ForwardStep.logits_rows`, and by transformers.

Both go through a text in windows of WINDOW tokens, each STRIDE after the last, and score the tokens that no earlier
window has: every token after the first WINDOW - STRIDE has at least that many before it. Logits exist for ROWS tokens
at a time, in float32 where they are compared: 128 x 262 144 x 4 bytes are 134 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.attention import attention_batch
from quire.memory.paged import PagedStorage
from quire.model import PreparedModel
from quire.spec import KVSpec
from quire.step import ForwardStep

__all__ = ["model_logprobs", "paged_logprobs", "perplexity", "windows"]

WINDOW, STRIDE, ROWS = 2048, 1024, 128
_BLOCK = 16

# (tokens of a window, first of them to be scored) -> float32 [tokens - first], their log probabilities.
Scorer = Callable[[list[int], int], torch.Tensor]


def perplexity(tokens: list[int], score: Scorer) -> float:
    """Of tokens[1:], each given those before it in its window."""
    found = torch.cat([score(window, first) for window, first in windows(tokens)])
    assert found.numel() == len(tokens) - 1
    return exp(-found.double().mean().item())


def windows(tokens: list[int]) -> Iterator[tuple[list[int], int]]:
    """Each window, and the first of its tokens that no window before has scored."""
    scored = 1
    for start in range(0, len(tokens), STRIDE):
        window = tokens[start : start + WINDOW]
        if start + len(window) > scored:
            yield window, scored - start
        scored = start + len(window)
        if scored == len(tokens):
            return


def paged_logprobs(prepared: PreparedModel, spec: KVSpec | None = None) -> Scorer:
    """By Quire: chunks of ROWS tokens on paged storage; logits only of rows whose next token is scored.

    spec: what K and V are kept in, else the model's own dtype."""
    kept = spec or prepared.spec

    def score(window: list[int], first: int) -> torch.Tensor:
        num_blocks = -(-len(window) // _BLOCK) * len(kept.groups)
        storage = PagedStorage(kept, num_blocks, _BLOCK, max_blocks=num_blocks)
        prepared.attach(storage)
        try:
            return torch.cat([_score_chunk(prepared, storage, window, first, at) for at in _chunks(window)])
        finally:
            prepared.attach(None)
            storage.close()

    return score


def model_logprobs(model: PreTrainedModel) -> Scorer:
    """By its own forward: once over the whole window for the hidden states, then what follows, ROWS at a time."""
    base = model.base_model

    def score(window: list[int], first: int) -> torch.Tensor:
        found = []
        with torch.inference_mode():
            ids = torch.tensor([window])
            hidden = base(input_ids=ids, use_cache=False).last_hidden_state
            for start, stop in _chunks(window):
                rows = [start + row for row in _rows(window, first, start, stop)]
                if rows:
                    some = BaseModelOutputWithPast(last_hidden_state=hidden[:, rows])
                    base.forward = lambda some=some, **_: some
                    try:
                        logits = model(input_ids=ids[:, rows], use_cache=False).logits[0]
                    finally:
                        del base.forward
                    found.append(_of_next(logits, window, 0, rows))
        return torch.cat(found)

    return score


def _score_chunk(
    prepared: PreparedModel, storage: PagedStorage, window: list[int], first: int, at: tuple[int, int]
) -> torch.Tensor:
    start, stop = at
    rows = _rows(window, first, start, stop)
    # Groups of layers have blocks of their own out of one pool, of unequal tokens: of each, neighbours.
    sizes = [group.tokens_per_block(_BLOCK) for group in storage.spec.groups]
    first_block, placed = 0, []
    for size in sizes:
        placed.append(first_block)
        first_block += -(-len(window) // size)
    tables = [list(range(block, block + -(-stop // size))) for block, size in zip(placed, sizes, strict=True)]
    plans = [
        attention_batch([0, stop - start], [stop], [table], size)
        for table, size in zip(tables, sizes, strict=True)
    ]
    logits = prepared.forward(
        ForwardStep(
            input_ids=torch.tensor(window[start:stop]),
            position_ids=torch.arange(start, stop),
            batches=tuple(plans),
            slot_mappings=tuple(
                torch.arange(start, stop) + block * size for block, size in zip(placed, sizes, strict=True)
            ),
            logits_rows=torch.tensor(rows, dtype=torch.int64),
        )
    )
    return _of_next(logits, window, start, rows)


def _chunks(window: list[int]) -> list[tuple[int, int]]:
    return [(start, min(start + ROWS, len(window))) for start in range(0, len(window), ROWS)]


def _rows(window: list[int], first: int, start: int, stop: int) -> list[int]:
    """Rows of a chunk whose next token is scored."""
    return list(range(max(first - 1, start) - start, min(stop, len(window) - 1) - start))


def _of_next(logits: torch.Tensor, window: list[int], start: int, rows: list[int]) -> torch.Tensor:
    """Log probability of the token after each row."""
    following = torch.tensor([window[start + row + 1] for row in rows], dtype=torch.int64)
    logits = logits.float()
    return logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(dim=-1)
