"""Rotary positions from a GGUF header: its keys `rope.*` and its tensors of factors, as transformers' parameters.

    none, absent    the frequencies of `rope.freq_base` (10 000 by default)
    linear          positions divided by `rope.scaling.factor`
    yarn            transformers' yarn and its attention factor, unless the header has one
    rope_factors_*  longrope: short and long factors
    rope_freqs      one factor a frequency (Llama 3.1's scaling, computed by the file's writer): longrope, short and
                    long alike, and no attention factor

Sources: load_hparams and the context's constructor of llama.cpp for the meaning of each key, set_gguf_parameters of its
TextModel for the keys that its converter writes. Yarn's attention factor and range follow the converted model;
llama.cpp computes with its own.
"""

from __future__ import annotations

import math
from typing import Any

from quire.weights.gguf.header import GGUFHeader

__all__ = ["default_rope", "rotary_width", "scaled_rope"]

_DEFAULT_BASE = 10000.0
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


def rotary_width(header: GGUFHeader, head_dim: int, *, is_whole: bool) -> int:
    """The number of rotated values of a head. is_whole: all must be; *raises:* LoadError: the header has fewer."""
    width = header.read("rope.dimension_count", head_dim)
    if is_whole and width != head_dim:
        raise header.refusal("rope.dimension_count", width, f"the width of a head, {head_dim}")
    if not 0 < width <= head_dim or width % 2:
        raise header.refusal(
            "rope.dimension_count", width, f"an even number up to the width of a head, {head_dim}"
        )
    return width


def default_rope(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def scaled_rope(
    header: GGUFHeader, max_positions: int, *, width: int, head_dim: int, truncate: bool = True
) -> dict[str, Any]:
    """`rope_parameters` of a config.

    max_positions: the header's `context_length`. width: from `rotary_width`. truncate: whether yarn's range of
    frequencies is rounded to whole numbers.

    *raises:* LoadError: a value or a pair of values that transformers' rotary embeddings lack.
    """
    rope = default_rope(header.number("rope.freq_base", _DEFAULT_BASE))
    if width != head_dim:
        rope["partial_rotary_factor"] = _part(width, head_dim)
    kind = header.read("rope.scaling.type", None)
    # 0 means none.
    factor_key = "rope.scaling.factor" if header.read("rope.scaling.factor", None) else "rope.scale_linear"
    factor = header.number(factor_key, 1.0) if header.read(factor_key, None) else 1.0
    original = header.size("rope.scaling.original_context_length", max_positions)
    attention = header.number("rope.scaling.attn_factor", 1.0)
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise header.refusal("rope.scaling.type", kind, "none, linear, yarn or longrope")
    freqs, long, short = (header.tensor(name) for name in (_FREQS, _LONG, _SHORT))
    if (long is None) != (short is None):
        raise header.refusal("rope.scaling.type", kind, f"given with both {_LONG} and {_SHORT}")
    if kind == "yarn":
        if freqs is not None or long is not None:
            raise header.refusal("rope.scaling.type", kind, "another type with a tensor of factors")
        return rope | _yarn(header, factor, original, attention, truncate)
    factor = factor if kind != "none" else 1.0
    if long is not None and short is not None:
        if freqs is not None or factor != 1.0:
            raise header.refusal("rope.scaling.factor", factor, f"absent with {_LONG}")
        return rope | {
            "rope_type": "longrope",
            "short_factor": _factors(header, _SHORT, short, width),
            "long_factor": _factors(header, _LONG, long, width),
            "original_max_position_embeddings": original,
            "factor": max_positions / original,
            "attention_factor": attention,
        }
    if kind == "longrope":
        raise header.refusal("rope.scaling.type", kind, f"given with {_LONG} and {_SHORT}")
    if attention != 1.0:
        raise header.refusal("rope.scaling.attn_factor", attention, "1 without long factors")
    if freqs is not None:
        factors = [value * factor for value in _factors(header, _FREQS, freqs, width)]
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": max_positions,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    if factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    return rope


def _yarn(
    header: GGUFHeader, factor: float, original: int, attention: float, truncate: bool
) -> dict[str, Any]:
    default = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    saved = header.number("rope.scaling.yarn_attn_factor", default)
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": header.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": header.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    header.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    if not truncate:
        yarn["truncate"] = False
    if saved * attention != default:
        yarn["attention_factor"] = saved * attention
    return yarn


def _part(width: int, head_dim: int) -> float:
    """A factor that gives `width` back: transformers truncates head_dim * factor to a whole number."""
    factor = width / head_dim
    return factor if int(head_dim * factor) == width else math.nextafter(factor, 1.0)


def _factors(header: GGUFHeader, name: str, values: Any, width: int) -> list[float]:
    if values.numel() != width // 2:
        raise header.refusal("rope.dimension_count", width, f"twice the {values.numel()} values of {name}")
    return [float(value) for value in values.flatten()]
