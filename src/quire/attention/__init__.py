"""Attention over paged keys and values: write them to slots, read them through block tables.

`AttentionBackend` is the contract, `reference_attention` the definition in torch; `quire.devices` finds a back end by
the name of its device. `attention_batch` makes a batch from arrays of a caller other than the engine.

Others may use the names below, and
    codecs                                K and V as codes
    attention_checks                      checks of arguments, for back ends
    reference_attention                   the definition
"""

from quire.attention.attention_backend import AttentionBackend
from quire.attention.attention_checks import attention_batch
from quire.attention.attention_options import AttentionOptions

__all__ = ["AttentionBackend", "AttentionOptions", "attention_batch"]
