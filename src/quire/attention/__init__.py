"""Attention over paged keys and values: write them to slots, read them through block tables.

`device_of()` is the entry point, and finds whole devices (`Device`); `reference_attention` is the definition in torch,
`native_attention` the kernels.

Others may use the names below, and
    devices           the devices by name
    codecs            K and V as codes
    native_attention  the kernels
"""

from quire.attention.attention_options import AttentionOptions
from quire.attention.devices import AttentionBackend, Device, device_of, register
from quire.attention.plan import AttentionPlan

__all__ = ["AttentionBackend", "AttentionOptions", "AttentionPlan", "Device", "device_of", "register"]
