"""`Architecture`: the reader of one GGUF architecture. It gives the fields of a config, and the parameters of tensors.

A new architecture is one entry of a module's `ARCHITECTURES` (see `quire.weights.gguf`): a function from the header to
the fields of a config and, if the file's writer changed tensors, a processor that undoes it.

Sources: load_hparams and load_arch_hparams of llama.cpp for the meaning of each key, its folder "conversion" for the
keys that its converter writes. A config field that the header lacks gets the value that llama.cpp computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from quire.weights.gguf.header import GGUFHeader
from quire.weights.gguf.rope_parameters import rotary_width, scaled_rope

__all__ = [
    "NO_DENSE_LAYERS",
    "Architecture",
    "already_placed",
    "attending_layers",
    "decoder_fields",
    "drop_head_dim",
    "expect_no_experts",
    "expert_counts",
    "has_tensor",
    "head_dim",
    "layer_types",
    "with_partial_rope",
    "with_whole_rope",
]

_PATTERN = "attention.sliding_window_pattern"

NO_DENSE_LAYERS: Mapping[str, str] = {
    "feed_forward_length": "of layers without experts, which the model has none of"
}
"""The key that has no effect on a model with experts in every layer."""


@dataclass(frozen=True)
class Architecture:
    """config: the fields of a transformers config, with `model_type`. tensors: transformers' processor, or one like it.
    no_effect: keys that do not change the output, each with the reason."""

    config: Callable[[GGUFHeader], dict[str, Any]]
    tensors: type[TensorProcessor] = TensorProcessor
    no_effect: Mapping[str, str] = field(default_factory=dict)


def decoder_fields(
    header: GGUFHeader, *, feed_forward: bool = True, kv_heads: int | None = None
) -> dict[str, Any]:
    """The fields that every decoder's config has, by the names of most transformers configs.

    feed_forward: the model has one width of feed-forward layers, `feed_forward_length`. kv_heads: given if the reader
    has already read them.
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
    """The width of a head. *raises:* LoadError: keys and values differ in width."""
    width = header.size("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"])
    header.expect("attention.value_length", width)
    return width


def with_whole_rope(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields`, a head's width, and the rotary positions of a model that rotates the whole head."""
    width = head_dim(header, fields)
    rotary_width(header, width, is_whole=True)
    rope = scaled_rope(header, fields["max_position_embeddings"], width=width, head_dim=width)
    return fields | {"head_dim": width, "rope_parameters": rope}


def with_partial_rope(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """As `with_whole_rope`, for a model that may rotate a part of the head."""
    width = head_dim(header, fields)
    num_rotated = rotary_width(header, width, is_whole=False)
    rope = scaled_rope(header, fields["max_position_embeddings"], width=num_rotated, head_dim=width)
    rope.setdefault("partial_rotary_factor", 1.0)  # the configs' default is a part
    return fields | {"head_dim": width, "rope_parameters": rope}


def drop_head_dim(header: GGUFHeader, fields: dict[str, Any]) -> int:
    """Removes the width of a head from `fields`, for a config that has none, and returns it.

    *raises:* LoadError: it is not the hidden size divided by the number of heads.
    """
    header.expect("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"])
    return fields.pop("head_dim")


def layer_types(header: GGUFHeader, num_layers: int, usual: int) -> list[str]:
    """`layer_types` of a config. The key has a truth value for each layer, or a number n: the last of each n layers has
    full attention. usual: n of a file without the key."""
    pattern = header.read(_PATTERN, usual)
    if isinstance(pattern, list):
        sliding = header.read_per_layer(_PATTERN, num_layers)
    else:
        sliding = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]


def attending_layers(header: GGUFHeader) -> tuple[list[bool], int]:
    """Which layers attend, in a model with other layers too, and the number of their KV heads: the file has 0 for the
    other layers. *raises:* LoadError: layers that attend have different numbers."""
    groups = header.read_per_layer("attention.head_count_kv", header.num_layers())
    numbers = {count for count in groups if count}
    if len(numbers) != 1:
        raise header.refusal(
            "attention.head_count_kv", groups, "one number for all layers that attend, else 0"
        )
    return [count > 0 for count in groups], numbers.pop()


def expert_counts(header: GGUFHeader) -> tuple[int, int]:
    """The numbers of experts in a layer and of experts for each token. *raises:* LoadError: the second is larger."""
    count, used = header.size("expert_count"), header.size("expert_used_count")
    if used > count:
        raise header.refusal("expert_used_count", used, f"1 to {count}, the number of experts")
    return count, used


def expect_no_experts(header: GGUFHeader) -> None:
    """Refuse a file with experts, for an architecture without them."""
    for key in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"):
        header.expect(key, 0)


def has_tensor(header: GGUFHeader, name: str) -> bool:
    """Whether any layer has the tensor `blk.N.{name}`."""
    return any(tensor.startswith("blk.") and tensor.split(".", 2)[2] == name for tensor in header.tensors)


def already_placed(weights: np.ndarray) -> Any:
    """A processor's result for a tensor that it has already put into the model's tensors."""
    named: Any = GGUFTensor
    return named(weights, None, {})
