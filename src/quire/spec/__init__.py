"""The cost of a token: the shape of a model's KV cache, read from the model's config.

Others may use the names below, and
    model_config    the fields of a model's config
    kv_formats      the formats of keys and values
    kv_dtype        the format of each layer
    payload, state_payload, score_payload   the layout of tokens', states' and scores' bytes outside the pool
    state_spec      the states of each sequence in state layers
    cards           memory and bandwidth of graphics cards
    weight_formats  how weights of a dense checkpoint are rounded
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
