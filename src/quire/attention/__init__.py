"""Attention over paged keys and values: write them to slots, read them through block tables.

`backend()` is the way in, and finds whole devices (`Device`); `reference` is the definition in torch, `native` the
kernels. `attention_batch` makes a batch of arrays that are not the engine's.

Others may use the names below, and
    backends   the back ends by name; home of the names below
    codecs     K and V as codes
    native     the kernels
"""

from quire.attention.attention_checks import attention_batch
from quire.attention.attention_options import AttentionOptions
from quire.attention.devices import AttentionBackend, Device, backend, register

__all__ = ["AttentionBackend", "AttentionOptions", "Device", "attention_batch", "backend", "register"]
