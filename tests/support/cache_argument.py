"""`CACHE`: the keyword by which the installed transformers takes a cache, in `generate` and in a forward, without a
warning: `model.generate(ids, **{CACHE: cache})`."""

from __future__ import annotations

from transformers import LlamaForCausalLM

from quire.model.cache_keyword import cache_keyword

CACHE = cache_keyword(LlamaForCausalLM.forward)
assert CACHE is not None  # a causal model takes a cache
