"""A tiny random model with a byte-level tokenizer and a chat template: all that `LLM` needs, in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from support.architectures import randomize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from quire import LLM

END = 256
VOCAB_SIZE = 258
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tokenizer() -> Any:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    made.chat_template = _TEMPLATE
    return made


def model(seed: int = 0, *, window: int = 0) -> Qwen3ForCausalLM:
    """window: of the second layer, 0 for none."""
    torch.manual_seed(seed)
    windows: dict[str, Any] = {}
    if window:
        windows["layer_types"] = ["full_attention", "sliding_attention"]
        windows |= {"use_sliding_window": True, "sliding_window": window}
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=END,
        pad_token_id=257,
        bos_token_id=None,
        tie_word_embeddings=False,
        **windows,
    )
    made = Qwen3ForCausalLM(config).float().eval()
    randomize(made)
    return made


def llm(*, window: int = 0, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"kv_memory": "2MiB", "max_batch_tokens": 64, "max_num_seqs": 8}
    return LLM((model(window=window), tokenizer()), **{**defaults, **options})
