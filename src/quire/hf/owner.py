"""Which model fills a cache, and whether it goes about it rightly.

`generate` does not tell a cache whose it is, and a saved cache must name its model's weights: the callers tell.

Cost: some 10 us, in a forward that computes more than one token.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from transformers import PreTrainedModel

from quire.errors import ArgumentError

__all__ = ["calling_model"]


def calling_model() -> weakref.ref[PreTrainedModel] | None:
    """The outermost transformers model that is running now: whose keys are about to be stored.

    *raises:* ArgumentError: it is generating with use_cache=False, which computes all tokens again in every step and
        would store each of them again.
    """
    found: PreTrainedModel | None = None
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
        frame = frame.f_back
    return None if found is None else weakref.ref(found)
