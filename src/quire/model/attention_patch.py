"""Attention modules that compute attention themselves, led to Quire's attention: Bloom's, MPT's and Falcon's.

Such a module stores K and V and goes on by torch. Within `PreparedModel.forward` another forward serves in its place:
it has the module make query, K and V and the output as it does, with the module's own layers, and calls the attention
interface between them. Biases for positions (ALiBi) become a slope for each head.
Not told by a name: a class whose forward names what one of `_KINDS` names is asked on rows of 512 positions, in
float32, and what is not the same there (F1) is left as it is. Falcon's ALiBi is left alone: its biases are rounded to
bfloat16 by position, which no slope is.

Cost: routing asks one module of all that are alike, 512 rows in float32 (and float64 where that is not near enough).
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

from quire.attention import AttentionOptions, attention_batch, device_of
from quire.memory.view import KVView
from quire.model.attention_function import attend
from quire.model.module_patch import below, install, own_class
from quire.model.paged_cache import PagedCache
from quire.model.prove.equal_modules import kind_of
from quire.model.prove.error_bounds import decide
from quire.model.prove.upcast import upcast_to

__all__ = ["AttentionPatch", "has_biases", "route"]

_NUM_POSITIONS = 512

# Query, K and V of hidden [1, T, width], each [1, heads, T, head_dim].
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionPatch(NamedTuple):
    """What `route` has done. no_positions: whether the model's forward needs no position_ids, since biases say them.
    mask: what its forward has to be given for a mask, which no routed module looks at; None for nothing."""

    undo: Callable[[], None]
    no_positions: bool
    mask: torch.Tensor | None


class _AttentionContext(NamedTuple):
    """What a module is given by the model around it.

    slopes: float32 [heads], by how much the model's biases rise from a position to the next; None where it has no
    biases. biases: those of the positions of a proof, float32 [heads, 1, positions]. rotary: makes cos and sin of
    (hidden, position_ids).
    """

    slopes: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    rotary: nn.Module | None = None


class _Kind(NamedTuple):
    """How modules of a kind are taken apart.

    names: what the class's forward names, at least. heads(module, hidden, call) and join(module, attended
    [1, T, width], call): the module's own beginning and end. scaling(module): of the scores. arguments(module, rows,
    mask, around): what the module is called with for a proof; mask: bool [T, T], true where a query sees the key.
    needs_mask: whether the model around it fails where no mask is made.
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
    module: Any, rows: torch.Tensor, mask: torch.Tensor, around: _AttentionContext
) -> dict[str, Any]:
    assert around.biases is not None
    return {
        "residual": rows.flip(1),
        "alibi": around.biases.to(rows.dtype),
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
    module: Any, rows: torch.Tensor, mask: torch.Tensor, around: _AttentionContext
) -> dict[str, Any]:
    assert around.biases is not None
    return {"position_bias": around.biases, "attention_mask": ~mask[None, None]}


def _falcon_heads(module: Any, hidden: torch.Tensor, call: dict[str, Any]) -> _Heads:
    q, k, v = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden)))
    if module.new_decoder_architecture:  # given once for each head of the query
        of_each = module.num_heads // module.num_kv_heads
        k, v = k[:, ::of_each], v[:, ::of_each]
    turn = sys.modules[own_class(module).__module__].apply_rotary_pos_emb  # pyright: ignore
    q, k = turn(q, k, *call["position_embeddings"])
    return q, k, v


def _falcon_join(module: Any, attended: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    return module.dense(attended)


def _falcon_arguments(
    module: Any, rows: torch.Tensor, mask: torch.Tensor, around: _AttentionContext
) -> dict[str, Any]:
    assert around.rotary is not None
    assert not module.config.alibi
    positions = torch.arange(rows.shape[1])[None]
    return {
        "alibi": None,
        "attention_mask": _additive(mask, rows.dtype),
        "position_ids": positions,
        "position_embeddings": around.rotary(rows, position_ids=positions),
    }


_KINDS = (
    _Kind(
        frozenset({"query_key_value", "_reshape", "baddbmm", "beta", "inv_norm_factor", "dense", "dropout_add"}),
        _bloom_heads, _bloom_join, lambda module: module.inv_norm_factor, _bloom_arguments,
    ),
    _Kind(
        frozenset({"Wqkv", "clip_qkv", "chunk", "n_heads", "softmax_scale", "out_proj", "masked_fill"}),
        _mpt_heads, _mpt_join, lambda module: module.softmax_scale, _mpt_arguments, needs_mask=True,
    ),
    _Kind(
        frozenset({"query_key_value", "_split_heads", "apply_rotary_pos_emb", "scaled_dot_product_attention",
                   "new_decoder_architecture", "inv_norm_factor", "dense"}),
        _falcon_heads, _falcon_join, lambda module: module.inv_norm_factor, _falcon_arguments,
    ),
)  # fmt: skip


def route(model: PreTrainedModel) -> AttentionPatch | None:
    """Have the model's attention modules call Quire's attention within a step; None where they are of no such kind, or
    one of them is not proved: nothing is changed then."""
    found = {module: kind for module in model.modules() if (kind := _kind_of(module)) is not None}
    if not found:
        return None
    around = _context_of(model)
    proved = set()
    for module, kind in found.items():
        if (alike := kind_of(module)) not in proved:
            if not _is_proved(module, kind, around):
                return None
            proved.add(alike)
    undo = []
    for module, kind in found.items():
        own = below(module, "forward")
        routed = partial(_forward, module, kind, around.slopes, own, inspect.signature(own))
        undo.append(install(module, forward=routed))

    def undo_all() -> None:
        while undo:
            undo.pop()()

    # Of four dimensions, transformers takes it for one that is made already.
    needs_mask = any(kind.needs_mask for kind in found.values())
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool) if needs_mask else None
    return AttentionPatch(undo_all, around.slopes is not None, mask)


def has_biases(model: PreTrainedModel) -> bool:
    """Whether `route` may find that biases say the positions. Cheap: nothing is asked."""
    return _context_of(model).slopes is not None and any(
        _kind_of(module) is not None for module in model.modules()
    )


def _kind_of(module: nn.Module) -> _Kind | None:
    if "forward" in module.__dict__:
        return None
    code = getattr(inspect.unwrap(own_class(module).forward), "__code__", None)
    names = frozenset(code.co_names) if code is not None else frozenset()
    return next((kind for kind in _KINDS if kind.names <= names), None)


def _context_of(model: PreTrainedModel) -> _AttentionContext:
    slopes = biases = rotary = None
    for module in model.modules():
        for name in ("build_alibi_tensor", "build_mpt_alibi_tensor"):
            if callable(getattr(module, name, None)):
                least, biases = (_biases(module, name, count) for count in (2, _NUM_POSITIONS))
                slopes = (least[..., 1] - least[..., 0]).flatten().contiguous()
        if isinstance(inner := getattr(module, "rotary_emb", None), nn.Module):
            rotary = inner
    return _AttentionContext(slopes, biases, rotary)


def _biases(module: Any, name: str, count: int) -> torch.Tensor:
    """float32 [heads, 1, count], by the module that makes them."""
    build, heads = getattr(module, name), module.num_heads
    if name == "build_alibi_tensor":
        return build(torch.ones(1, count), heads, torch.float32)
    return build(heads, count).float()


def _forward(
    module: Any,
    kind: _Kind,
    slopes: torch.Tensor | None,
    own: Callable[..., Any],
    signature: inspect.Signature,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's own forward, or within a step of Quire's the routed one."""
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, PagedCache)), None)
    if cache is None or kwargs.get("output_attentions"):
        return own(hidden_states, *args, **kwargs)
    call = signature.bind_partial(hidden_states, *args, **kwargs).arguments
    q, k, v = kind.heads(module, hidden_states, call)
    k, v = cache.update(k, v, module.layer_idx)
    attended, _ = attend(module, q, k, v, None, scaling=kind.scaling(module), is_causal=True, slopes=slopes)
    return kind.join(module, attended.flatten(2), call), None


def _is_proved(module: Any, kind: _Kind, around: _AttentionContext) -> bool:
    try:
        with torch.inference_mode():
            return bool(
                decide(
                    {True: _answer(module, kind, around, torch.float32, _attended)},
                    _answer(module, kind, around, torch.float32, _own),
                    lambda: _answer(module, kind, around, torch.float64, _own),
                )
            )
    except Exception:  # it lacks what modules of the kind have, or is made otherwise
        return False


def _answer(
    module: Any,
    kind: _Kind,
    around: _AttentionContext,
    dtype: torch.dtype,
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """What the module adds to its rows, [1, positions, width], its weights widened."""
    width = module.hidden_size
    rows = torch.randn(1, _NUM_POSITIONS, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    mask = torch.ones(_NUM_POSITIONS, _NUM_POSITIONS, dtype=torch.bool).tril()
    with upcast_to(module, dtype):
        call = kind.arguments(module, rows, mask, around)
        return compute(module, kind, around, rows, call) - call.get("residual", 0.0)


def _own(
    module: Any, kind: _Kind, around: _AttentionContext, rows: torch.Tensor, call: dict[str, Any]
) -> torch.Tensor:
    return module(rows, **call)[0]


def _attended(
    module: Any, kind: _Kind, around: _AttentionContext, rows: torch.Tensor, call: dict[str, Any]
) -> torch.Tensor:
    q, k, v = kind.heads(module, rows, call)
    count = rows.shape[1]
    plan = attention_batch([0, count], [count], torch.zeros(1, 1, dtype=torch.int32), count)
    options = AttentionOptions(scale=float(kind.scaling(module)), slopes=around.slopes)
    view = KVView(k.contiguous(), v.contiguous(), count)
    return kind.join(
        module, device_of("python").run(view, q[0].transpose(0, 1), plan, options).flatten(1)[None], call
    )


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask [T, T] is true, the lowest number elsewhere: [1, 1, T, T]."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]
