"""A tiny model with heads as wide as a large one's: 512 tokens fill a card's page of 2 MiB in each layer.

For `storage="virtual"` on a card, which refuses the other tiny models: a block would be of more than 4096 tokens.
"""

from __future__ import annotations

from functools import cache

import torch
from support.architectures import VOCAB_SIZE, randomize
from support.generate_oracle import PROMPTS, generate
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

__all__ = ["wide_model"]


@cache
def wide_model() -> tuple[PreTrainedModel, list[list[int]]]:
    """The model, and the tokens that `generate` gives for each of PROMPTS."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=256,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model, [generate(model, prompt)[0] for prompt in PROMPTS]
