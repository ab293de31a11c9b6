"""Constant offsets of key channels, measured once if K is stored as codes: real models have channels whose mean is
hundreds of times their spread, which would take up the whole range of a code.

If the same vector is subtracted from all keys of a head, all scores of a query fall by one number, which the softmax
cancels, so nothing is added back when codes are read. A learned sink and a soft cap do not cancel it: a layer with one
of these has no offset, and if its keys need one it stays in the model's dtype. Not a calibration: keys without such
channels have no offset, and values never have.

Cost: `measure_key_offsets` one forward of 512 tokens of a text in the package, and a storage for them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from quire.attention import attention_batch
from quire.attention.codecs import codec_of, rotate
from quire.memory.paged import PagedStorage
from quire.memory.state_slots import StateSlots
from quire.model.prepare import PreparedModel
from quire.model.prove.recorded_calls import text_tokens
from quire.recurrence import recurrence_step
from quire.spec import KVSpec
from quire.spec.state_spec import ZERO_STATE
from quire.step import ForwardStep

__all__ = ["KeyOffsets", "key_offset", "measure_key_offsets", "sees_offsets"]

_NUM_TOKENS = 512
_BLOCK_SIZE = 16
_MAX_STEP_RATIO = 0.75  # an offset is used if it shrinks the code step of some head to at most this ratio


class KeyOffsets(NamedTuple):
    """by_layer: float32 [num_kv_heads, k_head_dim]. left_out: layers whose keys need an offset and cannot have it."""

    by_layer: dict[int, torch.Tensor]
    left_out: frozenset[int]


def measure_key_offsets(prepared: PreparedModel, spec: KVSpec) -> KeyOffsets:
    """The offsets of the layers that `spec` stores as codes. The model is not changed.

    *raises:* CapacityError: no memory for the tokens; and the errors of a forward.
    """
    keys = _keys(prepared)
    model_sees_offsets = sees_offsets(prepared.loaded.model)
    by_layer: dict[int, torch.Tensor] = {}
    left_out: set[int] = set()
    for number, layer in enumerate(spec.layers):
        if not layer.stores_kv or not layer.k_format:
            continue
        offset = key_offset(keys[number], layer.k_format)
        if offset is not None:
            if model_sees_offsets:
                left_out.add(number)
            else:
                by_layer[number] = offset
    return KeyOffsets(by_layer, frozenset(left_out))


def key_offset(keys: torch.Tensor, name: str) -> torch.Tensor | None:
    """The vector to subtract from a layer's keys before they are encoded in the format `name`: the mean of `keys`, a
    sample, float32 [T, heads, width]; None if it would hardly make the codes finer, and for a single token."""
    count = len(keys)
    if count < 2:
        return None
    # In float64, and from one layout: the order of the sum does not change the bits of the mean.
    offset = keys.contiguous().mean(0, dtype=torch.float64).float()
    # The sampled tokens lie nearer to their own mean than new tokens do.
    spread = math.sqrt((count + 1) / (count - 1))
    fine, coarse = spread * _steps(keys - offset, name), _steps(keys, name)
    return offset if bool((fine < _MAX_STEP_RATIO * coarse).any()) else None


def _steps(keys: torch.Tensor, name: str) -> torch.Tensor:
    """float32 [heads], or [heads, groups]: the mean step of the codes of keys [T, heads, width]."""
    codec = codec_of(name)
    _, scales = codec.encode(rotate(keys) if codec.rotates_keys else keys)
    return scales.float().abs().mean(0)


def sees_offsets(model: PreTrainedModel) -> bool:
    """Whether some layer's attention is more than a softmax over its scores."""
    text = model.config.get_text_config(decoder=True)
    return bool(getattr(text, "attn_logit_softcapping", None)) or any(
        isinstance(getattr(module, "sinks", None), torch.Tensor) for module in model.modules()
    )


def _keys(prepared: PreparedModel) -> dict[int, torch.Tensor]:
    """By layer, float32 [T, num_kv_heads, k_head_dim]: the keys as the serving model computes them."""
    spec = prepared.spec
    tokens = text_tokens(prepared, min(_NUM_TOKENS, prepared.max_model_len))
    count = tokens.numel()
    group_blocks = -(-count // _BLOCK_SIZE)  # consecutive blocks of a group
    num_blocks = group_blocks * len(spec.groups)
    storage = PagedStorage(spec, num_blocks, _BLOCK_SIZE, max_blocks=num_blocks, device=prepared.device)
    positions = torch.arange(count)
    states = None
    if spec.states:
        storage.states = StateSlots(spec, 1, device=prepared.device)
        storage.states.apply([(ZERO_STATE, 0)])
        states = recurrence_step([0, count], [0], positions=positions)
    firsts = [group * group_blocks for group in range(len(spec.groups))]
    tables = [torch.arange(first, first + group_blocks, dtype=torch.int32)[None] for first in firsts]
    sizes = [group.tokens_per_block(_BLOCK_SIZE) for group in spec.groups]
    step = ForwardStep(
        input_ids=tokens,
        position_ids=positions,
        batches=tuple(
            attention_batch([0, count], [count], table, size)
            for table, size in zip(tables, sizes, strict=True)
        ),
        slot_mappings=tuple(first * size + positions for first, size in zip(firsts, sizes, strict=True)),
        logits_rows=positions[-1:],
        states=states,
    )
    cache = prepared.cache_over(storage)
    try:
        prepared.forward(step, cache)
        keys: dict[int, torch.Tensor] = {}
        for group, first in zip(spec.groups, firsts, strict=True):
            for layer in group.layers:
                blocks = storage.view(layer).k[first : first + group_blocks].transpose(1, 2).flatten(0, 1)
                keys[layer] = blocks[:count].float()
        return keys
    finally:
        cache.close()
        storage.close()
