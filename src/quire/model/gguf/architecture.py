"""`Architecture`: the reader of one GGUF architecture. It gives the fields of a config, and what tensors become.

A new architecture is one entry of a module's `ARCHITECTURES` (see `quire.model.gguf`): a function from the header to
the fields of a config, and where the file's writer changed tensors, a processor that undoes it.

Source of what each key means: load_hparams and load_arch_hparams of llama.cpp; of what its converter writes: its
folder "conversion". Where the header lacks a fact of the config, the value that llama.cpp computes with is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from quire.model.gguf.header import GGUFHeader
from quire.model.gguf.rope_parameters import rotary_width, scaled_rope

__all__ = [
    "NO_DENSE_LAYERS",
    "Architecture",
    "decoder",
    "drop_head_dim",
    "expect_no_experts",
    "experts",
    "has_tensor",
    "head_dim",
    "kv_heads_of_some",
    "layer_types",
    "placed",
    "with_partial_rope",
    "with_whole_rope",
]

_PATTERN = "attention.sliding_window_pattern"

NO_DENSE_LAYERS: Mapping[str, str] = {
    "feed_forward_length": "of layers without experts, which the model has none of"
}
"""The key without effect on a model with experts in every layer."""


@dataclass(frozen=True)
class Architecture:
    """config: the fields of a transformers config, `model_type` among them. tensors: transformers' processor, or one
    like it. no_effect: keys that change no answer, and why."""

    config: Callable[[GGUFHeader], dict[str, Any]]
    tensors: type[TensorProcessor] = TensorProcessor
    no_effect: Mapping[str, str] = field(default_factory=dict)


def decoder(header: GGUFHeader, *, feed_forward: bool = True, kv_heads: int | None = None) -> dict[str, Any]:
    """The fields that every decoder's config has, under the names that most of transformers' configs give them.

    feed_forward: the model has one width of feed-forward layers, and `feed_forward_length` is it. kv_heads: where the
    reader has read them already.
    """
    heads = header.size("attention.head_count")
    hidden = header.size("embedding_length")
    fields = {
        "vocab_size": header.num_words,
        "max_position_embeddings": header.size("context_length"),
        "hidden_size": hidden,
        "num_hidden_layers": header.num_layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or header.size("attention.head_count_kv", heads),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **header.special_ids(),
    }
    if feed_forward:
        fields["intermediate_size"] = header.size("feed_forward_length")
    header.expect("embedding_length_out", hidden)
    header.expect("attention.causal", True)
    return fields


def head_dim(header: GGUFHeader, fields: Mapping[str, Any]) -> int:
    """The width of a head. *raises:* LoadError: values are of another width than keys."""
    width = header.size("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"])
    header.expect("attention.value_length", width)
    return width


def with_whole_rope(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields`, a head's width, and the rotary positions of a model that turns the whole head."""
    width = head_dim(header, fields)
    rotary_width(header, width, whole=True)
    rope = scaled_rope(header, fields["max_position_embeddings"], width=width, head_dim=width)
    return fields | {"head_dim": width, "rope_parameters": rope}


def with_partial_rope(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """As `with_whole_rope`, of a model that may turn a part of the head."""
    width = head_dim(header, fields)
    turned = rotary_width(header, width, whole=False)
    rope = scaled_rope(header, fields["max_position_embeddings"], width=turned, head_dim=width)
    rope.setdefault("partial_rotary_factor", 1.0)  # the configs' default is a part
    return fields | {"head_dim": width, "rope_parameters": rope}


def drop_head_dim(header: GGUFHeader, fields: dict[str, Any]) -> int:
    """Takes the width of a head out of `fields`, for a config that has none, and returns it.

    *raises:* LoadError: it is not a head's part of the hidden size.
    """
    header.expect("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"])
    return fields.pop("head_dim")


def layer_types(header: GGUFHeader, num_layers: int, usual: int) -> list[str]:
    """`layer_types` of a config. The key has a truth value for each layer, or a number n: the last of each n layers
    attends to everything. usual: n where the file has no such key."""
    pattern = header.take(_PATTERN, usual)
    if isinstance(pattern, list):
        sliding = header.each(_PATTERN, num_layers)
    else:
        sliding = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def kv_heads_of_some(header: GGUFHeader) -> tuple[list[bool], int]:
    """Which layers attend, of a model some of whose layers do, and the number of heads of their keys: the file has 0
    for the others. *raises:* LoadError: layers that attend have different numbers."""
    groups = header.each("attention.head_count_kv", header.num_layers())
    found = {one for one in groups if one}
    if len(found) != 1:
        raise header.refusal(
            "attention.head_count_kv", groups, "one number for all layers that attend, else 0"
        )
    return [one > 0 for one in groups], found.pop()


def experts(header: GGUFHeader) -> tuple[int, int]:
    """How many experts a layer has, and how many each token takes. *raises:* LoadError: more than there are."""
    count, used = header.size("expert_count"), header.size("expert_used_count")
    if used > count:
        raise header.refusal("expert_used_count", used, f"1 to {count}, the number of experts")
    return count, used


def expect_no_experts(header: GGUFHeader) -> None:
    """Refuse a file whose model has experts, which its architecture's reader does not expect."""
    for key in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"):
        header.expect(key, 0)


def has_tensor(header: GGUFHeader, name: str) -> bool:
    """Whether any layer has the tensor `blk.N.{name}`."""
    return any(found.startswith("blk.") and found.split(".", 2)[2] == name for found in header.tensors)


def placed(weights: np.ndarray) -> Any:
    """A processor's result for a tensor that it has put in the model's tensors itself."""
    named: Any = GGUFTensor
    return named(weights, None, {})
