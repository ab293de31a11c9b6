"""Attention over paged keys and values: write them to slots, read them through block tables.

`device_of()` is the entry point, and finds whole devices (`Device`); `reference_attention` is the definition in torch,
`native_attention` the kernels. `attention_batch` makes a batch from arrays of a caller other than the engine.

Others may use the names below, and
    devices           the devices by name
    codecs            K and V as codes
    native_attention  the kernels
"""

from quire.attention.attention_checks import attention_batch
from quire.attention.attention_options import AttentionOptions
from quire.attention.devices import AttentionBackend, Device, device_of, register

__all__ = ["AttentionBackend", "AttentionOptions", "Device", "attention_batch", "device_of", "register"]
