"""Patches attention modules that compute attention themselves (Bloom, MPT, Falcon) to call Quire's attention.

Such a module stores K and V and continues with torch operators. Within `PreparedModel.forward` a replacement forward
has the module make query, K and V and the output with the module's own layers, and calls the attention function between
them. Position biases (ALiBi) become one slope per head. A module is not chosen by its name: if a class's forward uses
the names of one of `_KINDS`, the patched module is compared with its own forward on rows of 512 positions in float32,
and is left unpatched if they differ (F1). Falcon's ALiBi is left unpatched: its biases are rounded to bfloat16 per
position, which no slope reproduces.

Cost: patching runs one module of each group of equal modules, 512 rows in float32 (and float64 if float32 does not
decide).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from quire.attention import AttentionOptions, attention_batch
from quire.devices import device_of
from quire.memory.view import KVView
from quire.model.attention_function import attend
from quire.model.paged_cache import PagedCache
from quire.model.prove.upcast import upcast_to
from quire.modules.equal_modules import kind_of
from quire.modules.error_bounds import decide
from quire.modules.module_patch import current_method, original_class, patch_methods

__all__ = ["AttentionPatch", "has_position_biases", "patch_attention"]

_NUM_POSITIONS = 512

# Query, K and V of hidden [1, T, width], each [1, heads, T, head_dim].
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionPatch(NamedTuple):
    """The result of `patch_attention`. no_positions: whether the model's forward needs no position_ids, since biases
    encode the positions. mask: the mask argument that the model's forward needs, which no patched module reads; None:
    no argument."""

    undo: Callable[[], None]
    no_positions: bool
    mask: torch.Tensor | None


class _AttentionContext(NamedTuple):
    """Inputs that a module gets from the model around it.

    slopes: float32 [heads], the rise of the model's biases from one position to the next; None without biases. biases:
    the biases of the positions of a proof, float32 [heads, 1, positions]. rotary: makes cos and sin of (hidden,
    position_ids).
    """

    slopes: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    rotary: nn.Module | None = None


class _AttentionKind(NamedTuple):
    """How modules of one kind are split around their attention.

    names: names that the class's forward uses, at least. heads(module, hidden, call) and join(module, attended [1, T,
    width], call): the module's own begin and end. scaling(module): of the scores. arguments(module, rows, mask,
    context): the module's arguments in a proof; mask: bool [T, T], true where a query sees the key. needs_mask: whether
    the model around the module fails if no mask is made.
    """

    names: frozenset[str]
    heads: Callable[[Any, torch.Tensor, dict[str, Any]], _Heads]
    join: Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]
    scaling: Callable[[Any], float]
    arguments: Callable[[Any, torch.Tensor, torch.Tensor, _AttentionContext], dict[str, Any]]
    needs_mask: bool = False


def _bloom_heads(module: Any, hidden: torch.Tensor, call: dict[str, Any]) -> _Heads:
    return module._reshape(module.query_key_value(hidden))


def _bloom_join(module: Any, attended: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    return call["residual"] + module.dense(attended)


def _bloom_arguments(
    module: Any, rows: torch.Tensor, mask: torch.Tensor, context: _AttentionContext
) -> dict[str, Any]:
    assert context.biases is not None
    return {
        "residual": rows.flip(1),
        "alibi": context.biases.to(rows),
        "attention_mask": _additive(mask, rows.dtype),
    }


def _mpt_heads(module: Any, hidden: torch.Tensor, call: dict[str, Any]) -> _Heads:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    return q, k, v


def _mpt_join(module: Any, attended: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    return module.out_proj(attended)


def _mpt_arguments(
    module: Any, rows: torch.Tensor, mask: torch.Tensor, context: _AttentionContext
) -> dict[str, Any]:
    assert context.biases is not None
    return {"position_bias": context.biases.to(rows.device), "attention_mask": ~mask[None, None]}


def _falcon_heads(module: Any, hidden: torch.Tensor, call: dict[str, Any]) -> _Heads:
    q, k, v = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden)))
    if module.new_decoder_architecture:  # K and V are repeated for each query head
        repeats = module.num_heads // module.num_kv_heads
        k, v = k[:, ::repeats], v[:, ::repeats]
    apply_rotary = sys.modules[original_class(module).__module__].apply_rotary_pos_emb  # pyright: ignore
    q, k = apply_rotary(q, k, *call["position_embeddings"])
    return q, k, v


def _falcon_join(module: Any, attended: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    return module.dense(attended)


def _falcon_arguments(
    module: Any, rows: torch.Tensor, mask: torch.Tensor, context: _AttentionContext
) -> dict[str, Any]:
    assert context.rotary is not None
    assert not module.config.alibi
    positions = torch.arange(rows.shape[1], device=rows.device)[None]
    return {
        "alibi": None,
        "attention_mask": _additive(mask, rows.dtype),
        "position_ids": positions,
        "position_embeddings": context.rotary(rows, position_ids=positions),
    }


_KINDS = (
    _AttentionKind(
        frozenset({"query_key_value", "_reshape", "baddbmm", "beta", "inv_norm_factor", "dense", "dropout_add"}),
        _bloom_heads, _bloom_join, lambda module: module.inv_norm_factor, _bloom_arguments,
    ),
    _AttentionKind(
        frozenset({"Wqkv", "clip_qkv", "chunk", "n_heads", "softmax_scale", "out_proj", "masked_fill"}),
        _mpt_heads, _mpt_join, lambda module: module.softmax_scale, _mpt_arguments, needs_mask=True,
    ),
    _AttentionKind(
        frozenset({"query_key_value", "_split_heads", "apply_rotary_pos_emb", "scaled_dot_product_attention",
                   "new_decoder_architecture", "inv_norm_factor", "dense"}),
        _falcon_heads, _falcon_join, lambda module: module.inv_norm_factor, _falcon_arguments,
    ),
)  # fmt: skip


def patch_attention(model: PreTrainedModel) -> AttentionPatch | None:
    """Have the model's attention modules call Quire's attention within a step. Returns None and changes nothing if the
    model has no module of a known kind, or one of them is not proved."""
    kinds = {module: kind for module in model.modules() if (kind := _kind_of(module)) is not None}
    if not kinds:
        return None
    context = _context_of(model)
    proved = set()
    for module, kind in kinds.items():
        if (group := kind_of(module)) not in proved:
            if not _is_proved(module, kind, context):
                return None
            proved.add(group)
    undo = []
    for module, kind in kinds.items():
        module_forward = current_method(module, "forward")
        patched = partial(
            _forward, module, kind, context.slopes, module_forward, inspect.signature(module_forward)
        )
        undo.append(patch_methods(module, forward=patched))

    def undo_all() -> None:
        while undo:
            undo.pop()()

    # transformers takes a mask of four dimensions for a finished one.
    needs_mask = any(kind.needs_mask for kind in kinds.values())
    place = next(model.parameters()).device
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=place) if needs_mask else None
    return AttentionPatch(undo_all, context.slopes is not None, mask)


def has_position_biases(model: PreTrainedModel) -> bool:
    """Whether `patch_attention` may find that biases encode the positions. Cheap: no module is run."""
    return _context_of(model).slopes is not None and any(
        _kind_of(module) is not None for module in model.modules()
    )


def _kind_of(module: nn.Module) -> _AttentionKind | None:
    if "forward" in module.__dict__:
        return None
    code = getattr(inspect.unwrap(original_class(module).forward), "__code__", None)
    names = frozenset(code.co_names) if code is not None else frozenset()
    return next((kind for kind in _KINDS if kind.names <= names), None)


def _context_of(model: PreTrainedModel) -> _AttentionContext:
    slopes = biases = rotary = None
    for module in model.modules():
        for name in ("build_alibi_tensor", "build_mpt_alibi_tensor"):
            if callable(getattr(module, name, None)):
                shortest, biases = (_biases(module, name, count) for count in (2, _NUM_POSITIONS))
                slopes = (shortest[..., 1] - shortest[..., 0]).flatten().contiguous()
        if isinstance(inner := getattr(module, "rotary_emb", None), nn.Module):
            rotary = inner
    return _AttentionContext(slopes, biases, rotary)


def _biases(module: Any, name: str, count: int) -> torch.Tensor:
    """float32 [heads, 1, count], made by the module's own method `name`."""
    build, heads = getattr(module, name), module.num_heads
    if name == "build_alibi_tensor":
        return build(torch.ones(1, count), heads, torch.float32)
    return build(heads, count).float()


def _forward(
    module: Any,
    kind: _AttentionKind,
    slopes: torch.Tensor | None,
    module_forward: Callable[..., Any],
    signature: inspect.Signature,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's own forward, or the patched one within a step of Quire's."""
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, PagedCache)), None)
    if cache is None or kwargs.get("output_attentions"):
        return module_forward(hidden_states, *args, **kwargs)
    call = signature.bind_partial(hidden_states, *args, **kwargs).arguments
    q, k, v = kind.heads(module, hidden_states, call)
    k, v = cache.update(k, v, module.layer_idx)
    attended, _ = attend(module, q, k, v, None, scaling=kind.scaling(module), is_causal=True, slopes=slopes)
    return kind.join(module, attended.flatten(2), call), None


def _is_proved(module: Any, kind: _AttentionKind, context: _AttentionContext) -> bool:
    try:
        with torch.inference_mode():
            return bool(
                decide(
                    {True: _output(module, kind, context, torch.float32, _patched_output)},
                    _output(module, kind, context, torch.float32, _module_output),
                    lambda: _output(module, kind, context, torch.float64, _module_output),
                )
            )
    except Exception:  # the module lacks an attribute of its kind, or has another structure
        return False


def _output(
    module: Any,
    kind: _AttentionKind,
    context: _AttentionContext,
    dtype: torch.dtype,
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The module's output without the residual, [1, positions, width], with its weights cast to `dtype`."""
    width = module.hidden_size
    place = next(module.parameters()).device
    rows = torch.randn(1, _NUM_POSITIONS, width, generator=torch.Generator().manual_seed(width)).to(
        place, dtype
    )
    mask = torch.ones(_NUM_POSITIONS, _NUM_POSITIONS, dtype=torch.bool, device=place).tril()
    with upcast_to(module, dtype):
        call = kind.arguments(module, rows, mask, context)
        return compute(module, kind, context, rows, call) - call.get("residual", 0.0)


def _module_output(
    module: Any, kind: _AttentionKind, context: _AttentionContext, rows: torch.Tensor, call: dict[str, Any]
) -> torch.Tensor:
    return module(rows, **call)[0]


def _patched_output(
    module: Any, kind: _AttentionKind, context: _AttentionContext, rows: torch.Tensor, call: dict[str, Any]
) -> torch.Tensor:
    q, k, v = kind.heads(module, rows, call)
    count = rows.shape[1]
    plan = attention_batch([0, count], [count], torch.zeros(1, 1, dtype=torch.int32), count)
    options = AttentionOptions(scale=float(kind.scaling(module)), slopes=context.slopes)
    view = KVView(k.contiguous(), v.contiguous(), count)
    return kind.join(
        module, device_of("python").run(view, q[0].transpose(0, 1), plan, options).flatten(1)[None], call
    )


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask [T, T] is true, the lowest number elsewhere: [1, 1, T, T]."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(dtype).min
    )[None, None]
