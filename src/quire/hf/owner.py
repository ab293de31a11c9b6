"""Which model fills a cache, and whether it goes about it rightly.

`generate` does not tell a cache whose it is, and a saved cache must name its model's weights: the callers tell.

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

__all__ = ["calling_model", "wants_dense"]


def calling_model(cache: object) -> weakref.ref[PreTrainedModel] | None:
    """The outermost transformers model that is running now: whose keys are about to be stored in `cache`.

    *raises:* ArgumentError: it is generating with use_cache=False, which computes all tokens again in every step and
        would store each of them again; or it is an encoder-decoder, whose two caches `cache` cannot be at once.
    """
    found: PreTrainedModel | None = None
    bare = False
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, PreTrainedModel):
            found = owner
            arguments = frame.f_locals.get("model_kwargs")  # of `generate` and its loops
            if isinstance(arguments, dict) and arguments.get("use_cache") is False:
                raise ArgumentError(
                    f"expected use_cache=True where {type(owner).__name__} generates with a QuireCache, got False "
                    "(some configs, MPT's among them, say so): pass use_cache=True to generate, or set "
                    "model.generation_config.use_cache"
                )
            bare = bare or (
                getattr(owner.config, "is_encoder_decoder", False)
                and any(frame.f_locals.get(name) is cache for name in CACHE_KEYWORDS)
            )
        frame = frame.f_back
    if bare:
        raise ArgumentError(
            f"expected an EncoderDecoderCache for {type(found).__name__}, an encoder-decoder, which keeps keys of its "
            "own tokens and of the encoder's; got a bare QuireCache: pass "
            "EncoderDecoderCache(QuireCache(model.config), QuireCache(model.config))"
        )
    return None if found is None else weakref.ref(found)


def wants_dense(model: torch.nn.Module) -> bool:
    """Whether attention of the model may ask for a memory layout that views of rows have not.

    transformers' attention interface takes any strides. A module that computes attention itself may call `view` on the
    keys it is given back, as GPT-NeoX Japanese does, which fails on more than one row.
    """
    return any(attends_itself(type(module)) for module in model.modules())
