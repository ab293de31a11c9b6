"""Helpers of the tests of the drop-in cache: models, modes of generation, and the twin's outputs.

The twin is transformers' own DynamicCache on the same model: every mode's tokens must be the same. For codes, the
twin's keys and values are encoded and decoded (`CodedTwin`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from support.architectures import VOCAB_SIZE, randomize, tiny
from support.cache_argument import CACHE
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from quire.attention.codecs import codec_of, rotate, rotate_query
from quire.hf import QuireCache
from quire.model.key_offsets import key_offset

STORAGES = ("virtual", "growing", "contiguous")
NUM_NEW = 9
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
# Beyond what the engine runs: states beside attention, latents, attention that never calls the interface.
_OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8,
              "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "bloom": {"n_head": 4, "n_layer": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "mamba_d_state": 16, "mamba_chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "block_multiple_of": 16},
    "mpt": {"max_seq_len": 512},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
}  # fmt: skip
OTHERS = tuple(_OTHERS)
WITH_STATES = ("bamba", "falcon_h1", "qwen3_next")  # transformers itself refuses to take tokens back there


@cache
def model_of(name: str) -> PreTrainedModel:
    """The tiny model of an architecture, float32, from a fixed seed."""
    if name not in _OTHERS:
        return tiny(name)
    config = AutoConfig.for_model(name, **{**_SMALL, **_OTHERS[name]})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if name not in WITH_STATES:  # random decays overflow
        randomize(model)
    return model


def quire_cache(model: PreTrainedModel, storage: str = "virtual", **options: Any) -> QuireCache:
    """Small pieces and little memory, so that boundaries are met."""
    options = {"kv_memory": "64MiB", "piece_size": 4096, "max_length": 256, **options}
    return QuireCache(model.config, storage=storage, **options)


class CodedTwin(DynamicCache):
    """Keys and values [rows, heads, tokens, width] become codes by the definition, and numbers again, as they come.

    formats: by layer, of K and of V; layers that it lacks are left alone. offsets: what is taken off keys; None: as
    `QuireCache` measures it.
    """

    def __init__(
        self,
        config: Any,
        formats: dict[int, tuple[str, str]],
        offsets: dict[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(config=config)
        self.formats = formats
        self.offsets: dict[int, Any] | None = None if offsets is None else dict(offsets)
        self.measured: dict[int, Any] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in self.formats:
            of_keys, of_values = self.formats[layer_idx]
            offset = self._offset(layer_idx, key_states, of_keys)
            codec = codec_of(of_keys)
            keys = key_states.float() - (0 if offset is None else offset[:, None])
            keys = codec.decode(*codec.encode(rotate(keys) if codec.rotates_keys else keys))
            keys = rotate_query(keys) if codec.rotates_keys else keys
            key_states = (keys + (0 if offset is None else offset[:, None])).to(key_states.dtype)
            codec = codec_of(of_values)
            value_states = codec.decode(*codec.encode(value_states.float())).to(value_states.dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _offset(self, layer: int, keys: torch.Tensor, name: str) -> torch.Tensor | None:
        if self.offsets is not None:
            return self.offsets.get(layer)
        if layer not in self.measured:
            last = keys[:, :, -(512 // len(keys)) :]
            self.measured[layer] = key_offset(torch.cat([row.transpose(0, 1) for row in last]).float(), name)
        return self.measured[layer]


def int8_twin(cache: QuireCache, offsets: dict[int, torch.Tensor] | None = None) -> CodedTwin:
    """The twin of a QuireCache with kv_dtype="int8"."""
    formats = {layer.index: ("int8", "int8") for layer in cache.row_layers}
    return CodedTwin(cache.config, formats, offsets)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of different lengths, padded on the left, and their mask."""
    ids = torch.randint(3, VOCAB_SIZE, (3, 21), generator=torch.Generator().manual_seed(11))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((6, 0, 13)):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return ids, mask


Make = Callable[[], Cache]


def _greedy(model: Any, make: Make) -> Any:
    ids, mask = prompts()
    return model.generate(ids, attention_mask=mask, **{CACHE: make()}, **_options())


def _beams(model: Any, make: Make) -> Any:
    ids, mask = prompts()
    return model.generate(ids, attention_mask=mask, **{CACHE: make()}, num_beams=3, **_options())


def _sequences(model: Any, make: Make) -> Any:
    ids, mask = prompts()
    torch.manual_seed(3)
    options = {**_options(), "do_sample": True, "num_return_sequences": 2}
    return model.generate(ids, attention_mask=mask, **{CACHE: make()}, **options)


def _lookup(model: Any, make: Make) -> Any:
    ids = prompts()[0][1:2].repeat(1, 2)  # which it finds itself in
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: make()},
        prompt_lookup_num_tokens=4,
        **_options(),
    )


def _assisted(model: Any, make: Make) -> Any:
    ids = prompts()[0][1:2]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: make()},
        assistant_model=model_of("llama"),
        **_options(),
    )


def _chunks(model: Any, make: Make) -> Any:
    ids, mask = prompts()
    return model.generate(ids, attention_mask=mask, **{CACHE: make()}, prefill_chunk_size=4, **_options())


def _continued(model: Any, make: Make) -> Any:
    """A conversation of two turns on one cache, and a copy of it that goes another way."""
    ids = prompts()[0][1:2]
    cache = make()
    first = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, **_options())
    other = copy.deepcopy(cache)
    answers = []
    for turn, past in ((ids[:, :5], cache), (ids[:, 5:14], other), (ids[:, 2:4], cache)):
        more = torch.cat([first, turn], dim=1)
        if past is cache and answers:
            more = torch.cat([answers[0], turn], dim=1)
        answers.append(
            model.generate(more, attention_mask=torch.ones_like(more), **{CACHE: past}, **_options())
        )
    return answers


def _options() -> dict[str, Any]:
    return {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, "use_cache": True}


MODES: dict[str, Callable[[Any, Make], Any]] = {
    "greedy": _greedy,
    "beams": _beams,
    "sequences": _sequences,
    "lookup": _lookup,
    "assisted": _assisted,
    "chunks": _chunks,
    "continued": _continued,
}
_TAKES_TOKENS_BACK = ("lookup", "assisted")


def modes_of(name: str) -> list[str]:
    return [mode for mode in MODES if not (name in WITH_STATES and mode in _TAKES_TOKENS_BACK)]


@cache
def expected(name: str, mode: str) -> list[list[list[int]]]:
    """The twin's tokens."""
    model = model_of(name)
    return as_lists(MODES[mode](model, lambda: DynamicCache(config=model.config)))


def as_lists(answer: Any) -> list[list[list[int]]]:
    return [one.tolist() for one in (answer if isinstance(answer, list) else [answer])]
