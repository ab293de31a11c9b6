"""The shapes of the models that are compared, and their directories in the format of transformers, with random weights.

dense       Qwen3-0.6B's with the vocabulary cut to 32 000 and tied embeddings: 473 M parameters. `REAL` is the same
            with its real vocabulary, 151 936: 596 M parameters, a quarter of them in the projection.
lfm2        LFM2-350M's, vocabulary cut: a short convolution in 10 of 16 layers, 321 M parameters.
granite4    a Granite 4 hybrid's, with the multipliers of that family: Mamba 2 in 27 of 30 layers, 456 M.
qwen3.5     Qwen3.5-0.8B's, vocabulary cut: a gated delta net in 18 of 24 layers, 530 M.

Weights are as transformers initialises them, those of recurrences (A_log, dt_bias, D) too. `small` is for --quick.
Standard library only at import; `write` needs torch, transformers and tokenizers, and takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = [
    "FULL",
    "HYBRIDS",
    "KINDS",
    "REAL",
    "SMALL",
    "Dense",
    "Hybrid",
    "Shape",
    "num_parameters",
    "shape_of",
    "write",
]


@dataclass(frozen=True)
class Shape:
    """
    Args:
        kv_bytes: of the cache in every case but the tight one.
        tight_kv_bytes: one request of the longest case fits, and not all of the tight case at once.
    """

    vocab_size: int
    dtype: str
    kv_bytes: int
    tight_kv_bytes: int

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_bytes_per_token(self) -> int:
        raise NotImplementedError

    @property
    def folder(self) -> str:
        """The folder of its models, in the folder of the peers."""
        raise NotImplementedError

    def config(self) -> tuple[str, dict[str, Any]]:
        """The model type of transformers, and the fields of its config in addition to the common ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(Shape):
    """Qwen3's."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * self.item_bytes

    @property
    def folder(self) -> str:
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

    def config(self) -> tuple[str, dict[str, Any]]:
        return "qwen3", {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


@dataclass(frozen=True)
class Hybrid(Shape):
    """Layers, some of them recurrent.

    Args:
        kind: of `KINDS`.
        fields: of its config, layer_types among them.
        state_numbers: in float32, of a sequence's recurrent states; the few columns of its convolutions not counted.
    """

    kind: str
    model_type: str
    fields: dict[str, Any]
    head_dim: int
    state_numbers: int

    @property
    def kv_bytes_per_token(self) -> int:
        layers = sum(layer in ("attention", "full_attention") for layer in self.fields["layer_types"])
        return layers * self.fields["num_key_value_heads"] * self.head_dim * 2 * self.item_bytes

    @property
    def folder(self) -> str:
        return f"models-{self.kind}"

    def config(self) -> tuple[str, dict[str, Any]]:
        return self.model_type, self.fields


_CUT = {"vocab_size": 32_000, "dtype": "bfloat16", "kv_bytes": 2 << 30, "tight_kv_bytes": 256 << 20}
_SMALL = {"vocab_size": 1_000, "dtype": "float32", "kv_bytes": 16 << 20, "tight_kv_bytes": 288 << 10}
FULL = Dense(**_CUT, hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128)
REAL = replace(FULL, vocab_size=151_936)
SMALL = Dense(**_SMALL, hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, head_dim=32)

_LFM2 = {"block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "norm_eps": 1e-5}
_GRANITE = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.246,
    "logits_scaling": 3.0,
}
_QWEN = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
_MAMBA, _DELTA = 64 * 128, 128 * 128  # numbers of the state of one head
HYBRIDS = {
    "lfm2": Hybrid(
        **_CUT,
        kind="lfm2",
        model_type="lfm2",
        fields=_LFM2
        | {
            "hidden_size": 1024,
            "intermediate_size": 4608,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": [
                "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
            ],
        },
        head_dim=64,
        state_numbers=0,
    ),
    "granite4": Hybrid(
        **_CUT,
        kind="granite4",
        model_type="granitemoehybrid",
        fields=_GRANITE
        | {
            "hidden_size": 1024,
            "intermediate_size": 2560,
            "shared_intermediate_size": 2560,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "attention_multiplier": 1 / 64,
            "mamba_n_heads": 32,
            "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 3,
        },
        head_dim=64,
        state_numbers=27 * 32 * _MAMBA,
    ),
    "qwen3.5": Hybrid(
        **_CUT,
        kind="qwen3.5",
        model_type="qwen3_5_text",
        fields=_QWEN
        | {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        },
        head_dim=256,
        state_numbers=18 * 16 * _DELTA,
    ),
}
KINDS = ("dense", *HYBRIDS)
_TOY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL_HYBRIDS = {
    "lfm2": replace(
        HYBRIDS["lfm2"],
        **_SMALL,
        fields=_LFM2 | _TOY | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        head_dim=32,
    ),
    "granite4": replace(
        HYBRIDS["granite4"],
        **_SMALL,
        fields=_GRANITE
        | _TOY
        | {
            "shared_intermediate_size": 256,
            "num_hidden_layers": 2,
            "attention_multiplier": 1 / 32,
            "mamba_n_heads": 4,
            "layer_types": ["mamba", "attention"],
        },
        head_dim=32,
        state_numbers=4 * _MAMBA,
    ),
    "qwen3.5": replace(
        HYBRIDS["qwen3.5"],
        **_SMALL,
        fields=_QWEN
        | _TOY
        | {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        head_dim=64,
        state_numbers=3 * 2 * _DELTA,
    ),
}


def shape_of(kind: str, vocabulary: str = "cut", *, quick: bool = False) -> Shape:
    """kind: of `KINDS`. vocabulary: cut or real, which dense alone has."""
    if kind == "dense":
        return SMALL if quick else REAL if vocabulary == "real" else FULL
    return (_SMALL_HYBRIDS if quick else HYBRIDS)[kind]


def write(shape: Shape, directory: Path) -> None:
    """Writes config, weights and a byte-level tokenizer (some peers insist on one) unless they are there; and a file
    `complete` with the number of parameters."""
    if (directory / "complete").exists():
        return
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model_type, fields = shape.config()
    config = AutoConfig.for_model(
        model_type,
        **fields,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a sequence but its length
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory)
    if "layer_types" in fields:  # names of checkpoints, which this transformers may change
        path = directory / "config.json"
        saved = json.loads(path.read_text())
        path.write_text(json.dumps(saved | {"layer_types": fields["layer_types"]}, indent=2) + "\n")

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<end>", *letters, *(f"<{i}>" for i in range(shape.vocab_size - len(letters) - 1))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(
        directory
    )
    (directory / "complete").write_text(json.dumps({"parameters": model.num_parameters()}) + "\n")


def num_parameters(directory: Path) -> int:
    """Of the model that `write` wrote there; tied weights counted once."""
    return json.loads((directory / "complete").read_text())["parameters"]
