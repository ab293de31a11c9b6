"""Attention of latent layers (MLA) in the latents' own space: keys and values are never expanded, neither in memory nor
for a step.

Such a module projects the hidden rows to a latent [rank] and a rotary part [turned], hands both to `Cache.update`, and
expands the result (`expand_kv`) by `kv_b_proj`, head by head, to keys and values. Memory holds one row per token,
latent and rotary part side by side; the values are the latent itself. So every head attends with

    query    (W_K^T q, q_turned)  [rank + turned]      W_K [nope, rank] and W_V [v, rank]: the head's rows of kv_b_proj
    scores   scale * <query, row>
    result   W_V sum(p * latent)  [v]

which is the same sum in another order. It is computed this way for any number of rows, so bits do not depend on how a
prompt is cut. All else (projections, norms, rotary embeddings, the scale) stays the module's own forward.

A module is recognised by its parts (`expand_kv`, a plain `kv_b_proj`); its arithmetic is proved on its outputs
(`prove.latent_proof`). The two products of a head are packed once, when a module first attends, and again whenever the
model is prepared again, as it is when its weights have changed.

Invariants
    L1  outside of a step on pages `expand_kv` is the module's own.

Cost: per call two products for each head, by the extension in two calls, else about 7 us each in addition to the work,
and the back end's run; packed, the bytes of kv_b_proj once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from quire.attention import AttentionOptions
from quire.backends import native_module
from quire.devices import Device, PackedWeight
from quire.devices.cpu.packed_weights import NativeWeight
from quire.errors import UnsupportedModelError
from quire.model.paged_cache import PagedCache, tag_of
from quire.modules.hooks import global_hooks, hooks_on
from quire.modules.module_patch import current_method, original_class, patch_methods
from quire.weights.dense_weights import dense_weight
from quire.weights.linear import DenseWeight, choose_packing

__all__ = ["LatentHeads", "install_latents", "is_latent"]


def is_latent(module: nn.Module) -> bool:
    """Whether the module expands latents by a `kv_b_proj`."""
    return callable(getattr(type(module), "expand_kv", None)) and isinstance(
        module._modules.get("kv_b_proj"), nn.Module
    )


def install_latents(model: nn.Module, model_type: str) -> Callable[[], None]:
    """Have the latent modules of `model` pass latents that lie in pages on to attention, unexpanded; returns the undo.

    *raises:* UnsupportedModelError: a module that would no longer be called has hooks or an adapter.
    """
    latents = [(name, module) for name, module in model.named_modules() if is_latent(module)]
    for name, module in latents:
        expanding: Any = module.kv_b_proj
        if (
            original_class(expanding) is not nn.Linear
            or expanding._parameters.get("bias") is not None
            or "forward" in expanding.__dict__
            or "expand_kv" in module.__dict__
            or hooks_on(expanding)
            or global_hooks()
        ):
            raise UnsupportedModelError(
                f"model type {model_type}: expected a plain linear layer without bias, hooks or adapters as "
                f"{name}.kv_b_proj, which is multiplied into queries and results, got {type(expanding).__name__} with "
                "a bias, a hook or an adapter; remove it, or merge it into the weight"
            )
    undos = [patch_methods(module, expand_kv=_paged_expand_kv(module)) for _, module in latents]

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


def _paged_expand_kv(module: nn.Module) -> Callable[..., Any]:
    module_expand_kv = current_method(module, "expand_kv")

    def expand_kv(latent: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if tag_of(latent) is None:
            return module_expand_kv(latent, turned)
        return latent, turned

    return expand_kv


class LatentHeads:
    """The absorbed heads of one latent module: the weights that multiply its queries and its results.

    Args:
        module: a module for which `is_latent` holds.
        query: [1, heads, T, nope + turned], of one of its calls: only its shape and dtype are used.
        rank, turned: widths of the stored parts.

    Raises:
        UnsupportedModelError: the widths do not match.
    """

    def __init__(
        self, module: nn.Module, query: torch.Tensor, rank: int, turned: int, backend: Device
    ) -> None:
        expanding: Any = module._modules["kv_b_proj"]
        packed = expanding.__dict__.get("_packed")
        weight = dense_weight(expanding._parameters["weight"]) if packed is None else packed.unpack()
        heads, nope_dim = query.shape[1], query.shape[3] - turned
        if weight.dim() != 2 or weight.shape[1] != rank or weight.shape[0] % heads or nope_dim < 1:
            raise UnsupportedModelError(
                f"expected kv_b_proj of {type(module).__name__} to expand a latent of {rank} to {heads} heads, got a "
                f"weight {tuple(weight.shape)} for queries of width {query.shape[3]}"
            )
        per_head = weight.detach().to(query.dtype).view(heads, -1, rank)
        self.rank, self.nope_dim = rank, nope_dim
        self.v_dim = per_head.shape[1] - nope_dim
        if self.v_dim < 1:
            raise UnsupportedModelError(
                f"expected kv_b_proj of {type(module).__name__} to give each head {nope_dim} columns of keys and those "
                f"of values, got {per_head.shape[1]} in all"
            )
        pack = _packing(backend, query.dtype)
        self.into_latent = [pack(head[:nope_dim].t().contiguous()) for head in per_head]
        self.out_of_latent = [pack(head[nope_dim:].contiguous()) for head in per_head]

    def attend(
        self, query: torch.Tensor, cache: PagedCache, layer: int, options: AttentionOptions
    ) -> torch.Tensor:
        """query [1, heads, T, nope_dim + turned] -> [T, heads, v_dim]."""
        num_rows, rank = query.shape[2], self.rank
        by_row = query[0].transpose(0, 1)
        rows = query.new_empty(num_rows, query.shape[1], rank + query.shape[3] - self.nope_dim)
        rows[..., rank:] = by_row[..., self.nope_dim :]
        _multiply_each(self.into_latent, by_row[..., : self.nope_dim], rows[..., :rank])
        mixed = cache.backend.run(cache.view(layer), rows, cache.batch(layer), options)
        out = query.new_empty(num_rows, query.shape[1], self.v_dim)
        _multiply_each(self.out_of_latent, mixed, out)
        return out


def _multiply_each(weights: list[PackedWeight], x: torch.Tensor, out: torch.Tensor) -> None:
    """x [T, heads, inputs] -> out [T, heads, outputs], each head by its own weight; the last dimensions are dense."""
    if isinstance(weights[0], NativeWeight):
        cast(Any, native_module()).multiply_each([weight.native for weight in cast(Any, weights)], x, out)
        return
    for head, weight in enumerate(weights):
        out[:, head] = weight.multiply(x[:, head], None)


def _packing(backend: Device, dtype: torch.dtype) -> Callable[[torch.Tensor], PackedWeight]:
    """The packing function of this back end: its own, the extension's if that computes, else `DenseWeight`."""
    if backend.pack is not None:
        return backend.pack
    return NativeWeight if backend.is_native and choose_packing(dtype) == "native" else DenseWeight
