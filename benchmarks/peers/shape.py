"""The shape of the model that is compared, and its directory in the format of transformers, with random weights.

Qwen3-0.6B's with the vocabulary cut to 32 000 and tied embeddings: 473 M parameters. `REAL` is the same with its real
vocabulary, 151 936: 596 M parameters, a quarter of them in the projection. `SMALL` is for --quick.
Standard library only at import; `write` needs torch, transformers and tokenizers, and takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["FULL", "REAL", "SMALL", "Shape", "write"]


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    kv_bytes: int  # of the cache in every case but the tight one
    tight_kv_bytes: int  # one request of the longest case fits, and not all of the tight case at once

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * (4 if self.dtype == "float32" else 2)

    @property
    def folder(self) -> str:
        """Where its models are, in the folder of the peers."""
        return "models" if self.vocab_size == FULL.vocab_size else f"models-{self.vocab_size}"

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of the linear layers of one decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (q, self.hidden),
            (kv, self.hidden),
            (kv, self.hidden),
            (self.hidden, q),
            (self.intermediate, self.hidden),
            (self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]


FULL = Shape(1024, 3072, 28, 16, 8, 128, 32_000, "bfloat16", kv_bytes=2 << 30, tight_kv_bytes=256 << 20)
REAL = replace(FULL, vocab_size=151_936)
SMALL = Shape(128, 384, 4, 4, 2, 32, 1_000, "float32", kv_bytes=16 << 20, tight_kv_bytes=288 << 10)


def write(shape: Shape, directory: Path) -> None:
    """Writes config, weights and a byte-level tokenizer (some peers insist on one) unless they are there."""
    if (directory / "complete").exists():
        return
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a sequence but its length
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory)

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<end>", *letters, *(f"<{i}>" for i in range(shape.vocab_size - len(letters) - 1))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(
        directory
    )
    (directory / "complete").write_text(json.dumps({"parameters": model.num_parameters()}) + "\n")
