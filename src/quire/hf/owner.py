"""Finds the model that fills a cache, and refuses models that use the cache wrongly.

`generate` does not pass its model to the cache, but a saved cache must name the model's weights: the call stack has it.

Cost: some 10 us, in a forward that computes more than one token.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from quire.errors import ArgumentError
from quire.model.cache_keyword import CACHE_KEYWORDS
from quire.model.unsupported import attends_itself

__all__ = ["calling_model", "needs_contiguous"]


def calling_model(cache: object) -> weakref.ref[PreTrainedModel] | None:
    """The outermost transformers model on the call stack: its keys are about to be stored in `cache`.

    *raises:* ArgumentError: the model generates with use_cache=False, which computes all tokens again in every step and
    would store each of them again; or it is an encoder-decoder, which needs two caches.
    """
    outermost: PreTrainedModel | None = None
    has_bare_cache = False
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(module, PreTrainedModel):
            outermost = module
            arguments = frame.f_locals.get("model_kwargs")  # of `generate` and its loops
            if isinstance(arguments, dict) and arguments.get("use_cache") is False:
                raise ArgumentError(
                    f"expected use_cache=True where {type(module).__name__} generates with a QuireCache, got False "
                    "(some configs, MPT's among them, say so): pass use_cache=True to generate, or set "
                    "model.generation_config.use_cache"
                )
            has_bare_cache = has_bare_cache or (
                getattr(module.config, "is_encoder_decoder", False)
                and any(frame.f_locals.get(name) is cache for name in CACHE_KEYWORDS)
            )
        frame = frame.f_back
    if has_bare_cache:
        raise ArgumentError(
            f"expected an EncoderDecoderCache for {type(outermost).__name__}, an encoder-decoder, which keeps keys of "
            "its own tokens and of the encoder's; got a bare QuireCache: pass "
            "EncoderDecoderCache(QuireCache(model.config), QuireCache(model.config))"
        )
    return None if outermost is None else weakref.ref(outermost)


def needs_contiguous(model: torch.nn.Module) -> bool:
    """Whether the model's attention may need a contiguous layout, which views of rows lack.

    transformers' attention interface takes any strides. A module that computes attention itself may call `view` on the
    returned keys, as GPT-NeoX Japanese does, which fails on more than one row.
    """
    return any(attends_itself(type(module)) for module in model.modules())
