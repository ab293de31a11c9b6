"""`support.scorer`, which judges real checkpoints, equals a whole forward of each window."""

from __future__ import annotations

import random
from math import exp

import pytest
import torch
from support import scorer
from support.architectures import VOCAB_SIZE, tiny

from quire.model import PreparedModel
from quire.weights import load


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])  # with one kind of layers, and with two
def test_both_scorers_give_what_whole_windows_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in (("WINDOW", 64), ("STRIDE", 32), ("ROWS", 12)):
        monkeypatch.setattr(scorer, constant, value)
    model = tiny(name)
    draw = random.Random(0)
    tokens = [draw.randrange(VOCAB_SIZE) for _ in range(150)]
    expected = []
    for position in range(1, len(tokens)):
        # The last window that begins early enough for its token to be new there.
        start = 0 if position < 64 else (position - 32) // 32 * 32
        with torch.inference_mode():
            logits = model(torch.tensor([tokens[start:position]])).logits[0, -1]
        expected.append(logits.log_softmax(-1)[tokens[position]])
    own = scorer.perplexity(tokens, scorer.model_logprobs(model))
    assert own == pytest.approx(exp(-float(torch.stack(expected).mean())), rel=1e-4)
    prepared = PreparedModel(load((model, None)))
    try:
        assert scorer.perplexity(tokens, scorer.paged_logprobs(prepared)) == pytest.approx(own, rel=1e-4)
    finally:
        prepared.restore()


@pytest.mark.parametrize("number", [2, 63, 64, 65, 96, 97, 150])
def test_every_token_but_the_first_is_scored_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "WINDOW", 64)
    monkeypatch.setattr(scorer, "STRIDE", 32)
    tokens = list(range(number))
    scored = [token for window, first in scorer.windows(tokens) for token in window[first:]]
    assert scored == tokens[1:]
