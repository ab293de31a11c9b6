"""The outputs of `model.generate`, one prompt at a time, computed once per architecture."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from support.architectures import VOCAB_SIZE, tiny
from transformers import PreTrainedModel

MAX_TOKENS = 12
_RANDOM = random.Random(5)


def _tokens(length: int) -> list[int]:
    return [_RANDOM.randrange(2, VOCAB_SIZE) for _ in range(length)]


_SHARED = _tokens(9)
# From one token to several windows; three that begin alike, two of them equal.
PROMPTS = [_tokens(1), _tokens(5), _SHARED + _tokens(4), _tokens(41), _SHARED + _tokens(7), _tokens(12)]
PROMPTS.append(list(PROMPTS[2]))


def generate(
    model: PreTrainedModel, prompt: list[int], max_tokens: int = MAX_TOKENS, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """(greedy tokens, their logits [max_tokens, vocab]) of transformers' own loop. options: more of its own."""
    with torch.inference_mode():
        output: Any = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits).float()


@cache
def expected(name: str) -> tuple[PreTrainedModel, list[list[int]], list[torch.Tensor]]:
    """The tiny model of architecture `name`, and tokens and logits of each of PROMPTS."""
    model = tiny(name)
    once = {
        tuple(prompt): generate(model, prompt) for prompt in PROMPTS[:-1]
    }  # the last is one of them again
    answers = [once[tuple(prompt)] for prompt in PROMPTS]
    return model, [tokens for tokens, _ in answers], [logits for _, logits in answers]
