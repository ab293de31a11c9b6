"""The one attention function that models call while Quire runs them, registered with transformers as `quire`.

It gets the query, and K and V of the new tokens only; the history lies in the pages. It finds cache, layer, plan and
window through the tag that `PagedCache.update` left on K and V, builds the layer's `AttentionOptions` once, and runs
the back end. It is strict: a mask, a bias, an unknown keyword that may change the result, or K and V that are not the
very tensors that were stored raise an UnsupportedModelError; nothing is approximated.

Cost: some microseconds of Python per layer, and the back end's run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from quire.attention import AttentionOptions
from quire.errors import UnsupportedModelError
from quire.model.latent import LatentHeads, is_latent
from quire.model.paged_cache import KVTag, tag_of

__all__ = ["NAME", "attend", "register"]

NAME = "quire"

# Keywords that reach attention functions and do not change the result of this one.
_HARMLESS = frozenset({
    "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "deterministic",
})  # fmt: skip


def register() -> None:
    """Register `NAME` with transformers, without a mask function, so that no mask is ever built for it."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the flattened row over the pages.

    Args:
        query: [1, num_q_heads, T, k_head_dim]; key and value: the tensors that `PagedCache.update` returned.
        slopes: float32 [num_q_heads] of ALiBi, from `quire.model.attention_patch`; no model passes them.

    Returns:
        ([1, T, num_q_heads, v_head_dim], None).
    """
    tag = tag_of(key)
    if tag is None or tag_of(value) is not tag:
        raise UnsupportedModelError(
            f"model type {_model_type(module)}: K and V are altered between Cache.update and the attention interface "
            f"in {type(module).__name__}, so the stored K and V are not the ones it attends to"
        )
    cache = tag.cache
    if is_causal is None:  # transformers' own functions read the module too
        is_causal = getattr(module, "is_causal", True)
    if not is_causal and query.shape[2] > 1:
        raise _unsupported(
            tag,
            module,
            "attends to later tokens as well (is_causal=False), where Quire computes causal attention",
        )
    if attention_mask is not None or dropout:
        got = f"dropout {dropout}" if dropout else f"a mask ({type(attention_mask).__name__})"
        raise _unsupported(tag, module, f"attends with {got}, where Quire computes plain causal attention")
    for name, argument in kwargs.items():
        if argument is not None and argument is not False and name not in _HARMLESS:
            raise _unsupported(tag, module, f"passes {name}= to attention, which Quire does not understand")

    tensors = tuple(None if tensor is None else id(tensor) for tensor in (s_aux, slopes))
    identity = (id(module), tag.layer, scaling, sliding_window, softcap, *tensors)
    options = cache.options.get(identity)
    if options is None:
        options = _options(tag, module, query.shape[3], scaling, sliding_window, softcap, s_aux, slopes)
        cache.options[identity] = options
    cache.num_attended += 1
    if cache.attended is not None:
        cache.attended[module] = (tag.layer, options)
    if cache.spec.layers[tag.layer].latent:
        return _of_latents(tag, module, query, options), None
    out = cache.backend.run(cache.view(tag.layer), query[0].transpose(0, 1), cache.batch(tag.layer), options)
    return out.unsqueeze(0), None


def _of_latents(
    tag: KVTag, module: torch.nn.Module, query: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """[1, T, num_q_heads, v_head_dim] of a latent layer."""
    cache = tag.cache
    heads = cache.latents.get(module)
    if heads is None:
        if not is_latent(module):
            raise _unsupported(
                tag, module, "stores latents, and has no expand_kv and kv_b_proj to expand them by"
            )
        heads = LatentHeads(module, query, *cache.spec.layers[tag.layer].input_dims, cache.device)
        cache.latents[module] = heads
    return heads.attend(query, cache, tag.layer, options).unsqueeze(0)


def _options(
    tag: KVTag,
    module: torch.nn.Module,
    head_dim: int,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> AttentionOptions:
    """The layer's settings: from the call where it states them, else from the module and the spec."""
    span = tag.cache.spec.layers[tag.layer].span
    window, chunk = AttentionOptions.limits(span.window, span.step)
    if sliding_window is not None and sliding_window != window:
        raise _unsupported(
            tag, module, f"attends through a window of {sliding_window} tokens, where its config says "
            + (f"{window}" if window else f"{span.kind} attention"),
        )  # fmt: skip
    if softcap is None:
        softcap = getattr(module, "attn_logit_softcapping", None)
    if s_aux is None:
        s_aux = getattr(module, "sinks", None)
    return AttentionOptions(
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window=window,
        chunk=chunk,
        softcap=float(softcap or 0.0),
        sinks=None if s_aux is None else s_aux.detach().float().flatten(),
        slopes=slopes,
    )


def _unsupported(tag: KVTag, module: torch.nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {tag.cache.model_type}: layer {tag.layer} ({type(module).__name__}) {reason}"
    )


def _model_type(module: torch.nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "model_type", "unknown"))
