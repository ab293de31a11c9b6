"""Constant offsets of keys' channels, measured once where K is kept in codes: real models have channels whose mean is
hundreds of times their spread, which would take all of a code's range.

A key less a vector that is the same for every token of a head: all scores of a query fall by one number, which the
softmax does not see, so nothing is added back when codes are read. A learned sink and a soft cap do see it: a layer
with one of these has no offset, and where its keys need one it stays in the model's dtype.
Not a calibration: keys without such channels have no offset, and values never have.

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
_WORTH = 0.75  # offsets are taken where the codes of some head are finer by this factor with them


class KeyOffsets(NamedTuple):
    """taken: float32 [num_kv_heads, k_head_dim] by layer. left_out: layers whose keys need one and cannot have it."""

    taken: dict[int, torch.Tensor]
    left_out: frozenset[int]


def measure_key_offsets(prepared: PreparedModel, spec: KVSpec) -> KeyOffsets:
    """Of the layers that `spec` keeps in codes. Nothing of the model is changed.

    *raises:* CapacityError: no memory for the tokens; and what a forward raises.
    """
    keys = _keys(prepared)
    sees_them = sees_offsets(prepared.loaded.model)
    taken: dict[int, torch.Tensor] = {}
    left_out: set[int] = set()
    for number, layer in enumerate(spec.layers):
        if not layer.stores_kv or not layer.k_format:
            continue
        offset = key_offset(keys[number], layer.k_format)
        if offset is not None:
            if sees_them:
                left_out.add(number)
            else:
                taken[number] = offset
    return KeyOffsets(taken, frozenset(left_out))


def key_offset(keys: torch.Tensor, name: str) -> torch.Tensor | None:
    """What to take off a layer's keys before they are codes of the format `name`: the mean of `keys`, float32 [T,
    heads, width], which are some of them; None where codes would hardly be finer for it, and of a single token."""
    count = len(keys)
    if count < 2:
        return None
    # In float64, and from one layout: the bits of the mean are the same in whatever order it is summed.
    offset = keys.contiguous().mean(0, dtype=torch.float64).float()
    # Few tokens lie nearer to their own mean than others do.
    farther = math.sqrt((count + 1) / (count - 1))
    fine, coarse = farther * _steps(keys - offset, name), _steps(keys, name)
    return offset if bool((fine < _WORTH * coarse).any()) else None


def _steps(keys: torch.Tensor, name: str) -> torch.Tensor:
    """float32 [heads], or [heads, groups]: the mean step of the codes of keys [T, heads, width]."""
    codec = codec_of(name)
    _, scales = codec.encode(rotate(keys) if codec.rotates_keys else keys)
    return scales.float().abs().mean(0)


def sees_offsets(model: PreTrainedModel) -> bool:
    """Whether some layer's attention is no softmax over its scores alone."""
    text = model.config.get_text_config(decoder=True)
    return bool(getattr(text, "attn_logit_softcapping", None)) or any(
        isinstance(getattr(module, "sinks", None), torch.Tensor) for module in model.modules()
    )


def _keys(prepared: PreparedModel) -> dict[int, torch.Tensor]:
    """By layer, float32 [T, num_kv_heads, k_head_dim]: keys as they are when the model serves."""
    spec = prepared.spec
    tokens = text_tokens(prepared, min(_NUM_TOKENS, prepared.max_model_len))
    count = tokens.numel()
    each = -(-count // _BLOCK_SIZE)  # blocks of a group, one behind the other
    num_blocks = each * len(spec.groups)
    storage = PagedStorage(spec, num_blocks, _BLOCK_SIZE, max_blocks=num_blocks, device=prepared.device)
    positions = torch.arange(count)
    states = None
    if spec.states:
        storage.states = StateSlots(spec, 1)
        storage.states.apply([(ZERO_STATE, 0)])
        states = recurrence_step([0, count], [0], positions=positions)
    firsts = [group * each for group in range(len(spec.groups))]
    tables = [torch.arange(first, first + each, dtype=torch.int32)[None] for first in firsts]
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
        found: dict[int, torch.Tensor] = {}
        for group, first in zip(spec.groups, firsts, strict=True):
            for layer in group.layers:
                blocks = storage.view(layer).k[first : first + each].transpose(1, 2).flatten(0, 1)
                found[layer] = blocks[:count].float()
        return found
    finally:
        cache.close()
        storage.close()
