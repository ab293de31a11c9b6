"""Tiny models of every family with state layers, with realistic decays, and the outputs of their own mixers.

The mixers' own forward in torch is the reference: a whole prompt at once, or a token at a time with a cache.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from support.every_type import build
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

__all__ = ["FAMILIES", "StatesBesideKeys", "decode_by_tokens", "fresh_states", "keyword_of", "tiny_model"]

_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"mamba_n_groups": 2},
    "falcon_h1": {"mamba_n_groups": 2, "mamba_rms_norm": True, "ssm_in_multiplier": 0.7},
    "falcon_mamba": {},
    "granitemoehybrid": {},
    "jamba": {},
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lara_mini": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {},
    "lfm3": {},
    "mamba": {},
    "mamba2": {"n_groups": 2},
    "minimax": {},
    "nemotron_h": {"n_groups": 2},
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "recurrent_gemma": {},
    "zamba": {},
    "zamba2": {"mamba_ngroups": 2, "layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "attention_bias": True, "sliding_window": 8},
}

# Some are younger than the oldest transformers that Quire runs on.
FAMILIES = {name: fields for name, fields in FAMILIES.items() if name in CONFIG_MAPPING}


def tiny_model(model_type: str, **fields: Any) -> PreTrainedModel:
    """A random float32 model whose decays and time steps are spread as those of trained models."""
    model = build(AutoModelForCausalLM, model_type, **{**FAMILIES[model_type], **fields})
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            uniform = torch.rand(parameter.shape, generator=draw)
            if last == "A_log":  # decays of 1 to 16 a unit of time
                parameter.copy_(torch.log(1 + 15 * uniform))
            elif last in ("dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
                dt = 0.002 * 50**uniform  # 0.002 to 0.1
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif last == "recurrent_param":  # a of 0.9 to 0.999 where the gate is open
                a = (0.9 + 0.099 * uniform) ** 2
                parameter.copy_(torch.log(torch.expm1(-torch.log(a) / 16)))
    return model


def keyword_of(module: Any) -> str:
    """What the mixer's forward calls its cache; blocks that take any keyword are given `cache`."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "cache_params", "past_key_values") if name in names), "cache")


def decode_by_tokens(
    model: PreTrainedModel, module: Any, hidden: torch.Tensor, num_prompt: int
) -> torch.Tensor:
    """What the mixer answers to `hidden` [T, size]: `num_prompt` rows at once, then one at a time, with its cache."""
    cache: Any = DynamicCache(config=model.config)
    if model.config.model_type == "minimax":
        cache = MiniMaxCache()
    found: list[torch.Tensor] = []
    cuts = [0, *range(num_prompt, hidden.shape[0] + 1)]
    with torch.no_grad():
        for start, stop in itertools.pairwise(cuts):
            rows = hidden[None, start:stop]
            if hasattr(module, "rg_lru"):
                if start == 0:
                    module._setup_cache(1, rows.device, rows.dtype)
                position_ids = torch.arange(start, stop)[None]
                answer = module(rows, position_ids=position_ids, attention_mask=None, use_cache=True)
            elif model.config.model_type == "minimax":
                answer = module(rows, None, None, **{keyword_of(module): cache})
            elif hasattr(module, "conv_qk_grouped"):  # q, k and v
                answer = torch.cat([part.flatten(2) for part in module(rows, cache)], dim=-1)
            else:
                answer = module(rows, **{keyword_of(module): cache})
            found.append((answer[0] if isinstance(answer, tuple) else answer)[0])
    return torch.cat(found)


def fresh_states(adapter: Any, num_slots: int, used: list[int]) -> dict[str, torch.Tensor]:
    """States of `num_slots` slots: zeros in those that are used, NaN in all others."""
    states = {name: torch.full((num_slots, *shape), float("nan")) for name, shape in adapter.fields.items()}
    for state in states.values():
        state[used] = 0.0
    return states


class StatesBesideKeys(MiniMaxCache):
    """A cache of transformers for the attention of one sequence, and a `StateSource` for the other layers.

    MiniMax takes no cache but its own, so it is one.
    """

    def __init__(self, model: PreTrainedModel, adapters: dict[int, Any]) -> None:
        DynamicCache.__init__(self, config=model.config)
        self.linear_cache = []
        self.state_step: Any = None
        self.states = {layer: fresh_states(adapter, 1, [0]) for layer, adapter in adapters.items()}

    def state_of(self, layer_index: int) -> dict[str, torch.Tensor]:
        return self.states[layer_index]
