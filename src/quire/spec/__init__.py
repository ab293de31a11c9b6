"""What a token costs: the shape of a model's KV cache, and how a model's config says it.

Others may use the names below, and
    config      what a model's config says
    formats     the formats of keys and values
    kv_dtype    a model's layers in a format
    payload, state_payload   where the bytes of tokens, and of a state, lie when they leave the pool
    state_spec  what state layers keep for each sequence
    weight_formats   how weights of a plain checkpoint are rounded
"""

from quire.spec.kv_formats import FORMATS, KVFormat, element_formats, format_of
from quire.spec.kv_spec import KVGroup, KVSpec
from quire.spec.layer_spec import KINDS, LayerSpec, Span, layer_ranges

__all__ = [
    "FORMATS",
    "KINDS",
    "KVFormat",
    "KVGroup",
    "KVSpec",
    "LayerSpec",
    "Span",
    "element_formats",
    "format_of",
    "layer_ranges",
]
