"""The states of each sequence in a model's state layers, from its config: names, shapes, bytes.

A state has one size for any length of the sequence. The adapters of `quire.model.state` have the same fields, made from
the modules; a test compares the two. All fields are float32. A layer may have keys and values too (Falcon H1).

Cost: some attribute look-ups a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.errors import UnsupportedModelError

__all__ = ["ZERO_STATE", "StateField", "StateSpec", "state_fields", "state_specs"]

ZERO_STATE = -1  # as source of a copy: the state before any token

_BYTES = {"float32": 4}
_STATES_ALONE = ("rwkv", "xlstm")
_STATE_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent")


@dataclass(frozen=True)
class StateField:
    """One tensor of a layer's state: its shape for one sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class StateSpec:
    """The state of one layer."""

    layer: int
    fields: tuple[StateField, ...]

    @property
    def bytes_per_sequence(self) -> int:
        return sum(field.num_bytes for field in self.fields)


def state_specs(config: Any) -> tuple[StateSpec, ...]:
    """The state layers of a model, in order; empty for a model without any.

    Args:
        config: a transformers config; of a composite one the text part.

    Raises:
        UnsupportedModelError: state layers of an unsupported model type, or missing sizes.
    """
    text = config.get_text_config(decoder=True)
    kinds = _layer_kinds(text)
    num_layers = getattr(text, "num_hidden_layers", len(kinds))
    fields_by_layer = ((layer, state_fields(config, layer)) for layer in range(min(len(kinds), num_layers)))
    return tuple(StateSpec(layer, fields) for layer, fields in fields_by_layer if fields)


def state_fields(config: Any, layer_index: int) -> tuple[StateField, ...]:
    """The fields of layer `layer_index` for each sequence; empty for a layer without a state.

    *raises:* as `state_specs`.
    """
    text = config.get_text_config(decoder=True)
    kinds = _layer_kinds(text)
    kind = kinds[layer_index] if 0 <= layer_index < len(kinds) else None
    if kind not in _STATE_LAYERS:
        return ()
    model_type = str(text.model_type)
    read = _READERS.get(model_type)
    if read is None:
        raise UnsupportedModelError(
            f"model type {model_type}: layer {layer_index} is {kind!r}, with a state that quire does not support"
        )
    try:
        shapes = read(text)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"model type {model_type}: expected the sizes of layer {layer_index}'s state in the config, got {error}"
        ) from None
    return tuple(StateField(name, shape) for name, shape in shapes.items())


def _layer_kinds(text: Any) -> list[str]:
    """Kind of each layer; RecurrentGemma has its own field before transformers 5.24, RWKV and xLSTM have none."""
    if getattr(text, "model_type", None) in _STATES_ALONE:
        return ["recurrent"] * text.num_hidden_layers
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


_Shapes = dict[str, tuple[int, ...]]


def _convolution_and_state(width: int, channels: int, *recurrent: int) -> _Shapes:
    """A convolution of `width` over `channels`, and a recurrent state."""
    return {"convolution": (width - 1, channels), "recurrent": recurrent}


def _gated_delta(text: Any) -> _Shapes:
    v_heads, k_dim, v_dim = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
    channels = 2 * text.linear_num_key_heads * k_dim + v_heads * v_dim
    return _convolution_and_state(text.linear_conv_kernel_dim, channels, v_heads, k_dim, v_dim)


def _kimi(text: Any) -> _Shapes:
    heads, size = text.linear_num_heads, text.linear_head_dim
    return _convolution_and_state(text.linear_conv_kernel_dim, 3 * heads * size, heads, size, size)


def _mamba1(text: Any) -> _Shapes:
    return _convolution_and_state(
        text.conv_kernel, text.intermediate_size, text.intermediate_size, text.state_size
    )


def _jamba(text: Any) -> _Shapes:
    channels = text.mamba_expand * text.hidden_size
    return _convolution_and_state(text.mamba_d_conv, channels, channels, text.mamba_d_state)


def _scan2(width: int, channels: int, heads: int, size: int, groups: int, state: int) -> _Shapes:
    return _convolution_and_state(width, channels + 2 * groups * state, heads, size, state)


def _mamba2(text: Any) -> _Shapes:
    channels = int(text.expand * text.hidden_size)
    return _scan2(text.conv_kernel, channels, text.num_heads, text.head_dim, text.n_groups, text.state_size)


def _bamba(text: Any) -> _Shapes:
    inner = getattr(text, "mamba_d_ssm", None)  # Falcon H1
    channels = int(text.mamba_expand * text.hidden_size) if inner is None else inner
    heads, size, groups = text.mamba_n_heads, text.mamba_d_head, text.mamba_n_groups
    return _scan2(text.mamba_d_conv, channels, heads, size, groups, text.mamba_d_state)


def _nemotron(text: Any) -> _Shapes:
    heads, size, groups = text.mamba_num_heads, text.mamba_head_dim, text.n_groups
    return _scan2(text.conv_kernel, heads * size, heads, size, groups, text.ssm_state_size)


def _zamba2(text: Any) -> _Shapes:
    channels = int(text.mamba_expand * text.hidden_size)
    heads, size, groups = text.n_mamba_heads, text.mamba_headdim, text.mamba_ngroups
    return _scan2(text.mamba_d_conv, channels, heads, size, groups, text.mamba_d_state)


def _short_convolution(text: Any) -> _Shapes:
    return {"convolution": (text.conv_L_cache - 1, text.hidden_size)}


def _lightning(text: Any) -> _Shapes:
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return {"recurrent": (heads, size, size)}


def _rg_lru(text: Any) -> _Shapes:
    return _convolution_and_state(text.conv1d_width, text.lru_width, text.lru_width)


def _rwkv(text: Any) -> _Shapes:
    names = ("feed_forward", "attention", "numerator", "denominator", "maximum")
    return dict.fromkeys(names, (text.hidden_size,))


def _xlstm(text: Any) -> _Shapes:
    heads, size = text.num_heads, text.qk_head_dim
    return {"cell": (heads, size, text.v_head_dim), "normalizer": (heads, size), "maximum": (heads, 1)}


def _zaya(text: Any) -> _Shapes:
    channels = (text.num_attention_heads + text.num_key_value_heads) * text.head_dim
    return {
        "convolution": (text.cca_time0 - 1, channels),
        "mixed": (text.cca_time1 - 1, channels),
        "delayed": (1, text.num_key_value_heads * text.head_dim // 2),
    }


_READERS: dict[str, Callable[[Any], _Shapes]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini"), _gated_delta
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _kimi),
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba1),
    **dict.fromkeys(("jamba", "zamba"), _jamba),
    "mamba2": _mamba2,
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _bamba),
    "nemotron_h": _nemotron,
    "zamba2": _zamba2,
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_convolution),
    "minimax": _lightning,
    "recurrent_gemma": _rg_lru,
    "rwkv": _rwkv,
    "xlstm": _xlstm,
    "zaya": _zaya,
}
